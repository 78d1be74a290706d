"""Inference engines: labkit's own with continuous batching, mlx_lm's, and OpenAI-compatible ones.

Importing this package imports neither MLX nor numba: the names in ``__all__`` load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.engine.engine_factory import create
    from labkit.engine.engine_protocol import EngineError, InferenceEngine, TokenEvent
    from labkit.engine.llm import LLM
    from labkit.engine.output_processor import RequestOutput
    from labkit.engine.request import Request
    from labkit.engine.sampling.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "EngineError",
    "InferenceEngine",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "TokenEvent",
    "create",
]

_MODULE_OF = {
    "LLM": "llm",
    "EngineError": "engine_protocol",
    "InferenceEngine": "engine_protocol",
    "Request": "request",
    "RequestOutput": "output_processor",
    "SamplingParams": "sampling.sampling_params",
    "TokenEvent": "engine_protocol",
    "create": "engine_factory",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
