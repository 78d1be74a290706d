"""The Python door: prompts in, texts out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from labkit import config
from labkit.engine.base import EngineError
from labkit.engine.factory import create
from labkit.engine.output_processor import OutputProcessor, RequestOutput, Tokenizer
from labkit.engine.request import Request, SamplingParams
from labkit.model.tokenizer import load as load_tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A model directory, served.

    Parameters
    ----------
    path
        A directory that mlx_lm can load.
    **options
        The engine's options (``labkit.config.Engine``), each by its own name wherever it
        stands in the tree: ``LLM(path, max_num_seqs=8, block_size=32, resolver="seq_map")``.
        Not ``blas`` and ``threads``: a process settles them before MLX and numba are
        imported (``labkit.platform``, ``NUMBA_NUM_THREADS``).

    Raises
    ------
    ConfigError
        There is no such option, or its value is not allowed.
    EngineError
        The model cannot be served; the reason in one line.
    """

    def __init__(self, path: str | Path, **options: Any) -> None:
        engine_options = engine_config(options)
        self._tokenizer: Tokenizer = load_tokenizer(Path(path))
        self._engine = create(engine_options, Path(path))
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts, batched; results in the order of the prompts.

        ``prompts`` are texts or lists of token ids; ``params`` is one for all or one each.
        A request that cannot be served has ``finish_reason="error"``; the others go on.
        """
        last: dict[str, RequestOutput] = {}
        for output in self.stream(prompts, params):
            last[output.request_id] = output
        return [last[key] for key in sorted(last, key=int)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield every request's output after each of its tokens, as they are computed.

        Leaving the loop early aborts what is not finished.
        """
        open_requests = self._submit(as_list(prompts), params)
        try:
            while open_requests:
                for event in self._engine.step():
                    processor = open_requests.get(event.request_id)
                    if processor is None:
                        continue
                    if event.finish_reason is not None:
                        del open_requests[event.request_id]
                    yield processor.process(event)
        finally:
            for request_id in open_requests:
                self._engine.abort(request_id)

    def _submit(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> dict[str, OutputProcessor]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise EngineError(f"{len(prompts)} prompts but {len(params)} sampling parameters")
        processors: dict[str, OutputProcessor] = {}
        for prompt, chosen in zip(prompts, params, strict=True):
            text = prompt if isinstance(prompt, str) else None
            ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            request = Request(str(next(self._ids)), tuple(ids), chosen)
            processors[request.request_id] = OutputProcessor(
                request.request_id, text, request.prompt_token_ids, self._tokenizer
            )
            self._engine.submit(request)
        return processors

    def counters(self) -> dict[str, float]:
        """Return the engine's counters."""
        return self._engine.counters()

    def close(self) -> None:
        """Release the model and the KV memory."""
        self._engine.close()


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts: a text or a list of ids alone is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and not hasattr(items[0], "__len__") else items


def engine_config(options: dict[str, Any]) -> config.Engine:
    """Build the engine's config from options named without their group.

    Raises
    ------
    ConfigError
        An unknown option or a value that is not allowed.
    """
    tree: dict[str, Any] = {}
    homes = _homes()
    for name, value in options.items():
        config.require(name in homes, f"{name}: no such engine option; there are {_names(homes)}")
        group = homes[name]
        (tree.setdefault(group, {}) if group else tree)[name] = value
    return config.from_plain(config.Engine, tree)


def _homes() -> dict[str, str | None]:
    """Map every option of the engine to its group, None at the top."""
    homes: dict[str, str | None] = {}
    default = config.Engine()
    for item in dataclasses.fields(default):
        value = getattr(default, item.name)
        if dataclasses.is_dataclass(value):
            homes |= {leaf.name: item.name for leaf in dataclasses.fields(value)}
        elif item.name not in ("name", "blas", "threads"):
            homes[item.name] = None
    return homes


def _names(homes: dict[str, str | None]) -> str:
    return ", ".join(sorted(homes))
