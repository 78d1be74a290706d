"""The scaling of rotary embeddings (RoPE) in a GGUF file, converted to mlx_lm's config.json.

The keys are those of llama.cpp's ``gguf-py/gguf/constants.py``. Llama 3's scaling has no key: its
factors are the tensor ``rope_freqs.weight``, from which the parameters are recovered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from labkit.models.gguf.gguf_header import GGUFError, GGUFFile

FACTORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
TENSORS = (FACTORS, LONG, SHORT)
MAX_RELATIVE_ERROR = 1e-5  # of Llama 3's factors, computed from the recovered parameters
MAX_FACTOR_ERROR = 1e-4  # relative; the file's is a float32


def read_rope_scaling(file: GGUFFile, name: str, theta: float, dims: int) -> dict[str, Any] | None:
    """Return ``rope_scaling`` of config.json, or None if positions are not scaled.

    ``name``: the file's architecture, with which the keys of the metadata begin. ``theta``: the
    base of the frequencies. ``dims``: the dimensions of a head that are rotated. Raises
    ``GGUFError`` if the scaling is invalid, or mlx_lm does not have it.
    """
    prefix = f"{name}.rope.scaling"
    # Older files have the factor of linear scaling under another key.
    factor = float(file.number(f"{prefix}.factor", file.number(f"{name}.rope.scale_linear", 1.0)))
    kind = file.string(f"{prefix}.type", "none" if factor == 1.0 else "linear")
    tensor = next((tensor for tensor in TENSORS if tensor in file.tensors), None)
    if tensor is not None:
        if kind != "none" and (kind == "yarn" or factor != 1.0):
            raise GGUFError(
                f"{prefix}.type is {kind} with factor {factor}, beside the tensor {tensor}; "
                "mlx_lm does not compute both"
            )
        return _scaling_by_tensor(file, name, theta, dims)
    _check_constants(file, prefix, {"attn_factor": 1.0, "yarn_attn_factor": 1.0})
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if not 0 < factor < math.inf:
        raise GGUFError(f"{prefix}.factor is {factor}; it must be finite and above 0")
    if kind == "linear":
        return {"type": "linear", "rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise GGUFError(f"{prefix}.type is {kind}; must be one of: none, linear, yarn")
    return _yarn(file, name, prefix, factor)


def _scaling_by_tensor(file: GGUFFile, name: str, theta: float, dims: int) -> dict[str, Any] | None:
    """Return Llama 3's scaling or LongRoPE, whose factors are tensors; None if all are 1."""
    prefix, is_llama3 = f"{name}.rope.scaling", FACTORS in file.tensors
    attn_factor = 1.0 if is_llama3 else _longrope_attn_factor(file, name)
    _check_constants(file, prefix, {"attn_factor": attn_factor, "yarn_attn_factor": 1.0})
    if is_llama3:
        return _llama3(_factors(file, FACTORS, dims), theta)
    factors = {
        f"{word}_factor": _factors(file, f"rope_factors_{word}.weight", dims).tolist()
        for word in ("long", "short")
    }
    return {"type": "longrope", "rope_type": "longrope", **factors}


def _longrope_attn_factor(file: GGUFFile, name: str) -> float:
    """Return the factor by which mlx_lm's LongRoPE multiplies queries and keys."""
    context = file.count(f"{name}.context_length")
    original = file.count(f"{name}.rope.scaling.original_context_length", context)
    if not 1 < original < context:
        return 1.0
    return math.sqrt(1 + math.log(context / original) / math.log(original))


def _check_constants(file: GGUFFile, prefix: str, computed: Mapping[str, float]) -> None:
    """Refuse values of keys (by default 1) other than those with which mlx_lm computes."""
    for word, value in computed.items():
        given = float(file.number(f"{prefix}.{word}", 1.0))
        if not math.isclose(given, value, rel_tol=MAX_FACTOR_ERROR):
            raise GGUFError(f"{prefix}.{word} is {given:g}; mlx_lm computes with {value:.6}")


def _yarn(file: GGUFFile, name: str, prefix: str, factor: float) -> dict[str, Any]:
    _check_constants(file, prefix, {"yarn_ext_factor": 1.0})
    if file.number(f"{prefix}.yarn_log_multiplier", 0.0) != 0.0:
        raise GGUFError(f"{prefix}.yarn_log_multiplier is not 0; mlx_lm computes with 0")
    return {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.count(
            f"{prefix}.original_context_length", file.count(f"{name}.context_length")
        ),
        "beta_fast": float(file.number(f"{prefix}.yarn_beta_fast", 32.0)),
        "beta_slow": float(file.number(f"{prefix}.yarn_beta_slow", 1.0)),
    }


def _factors(file: GGUFFile, name: str, dims: int) -> npt.NDArray[np.float32]:
    tensor = file.tensors.get(name)
    if tensor is None or tensor.shape != (dims // 2,) or tensor.type.name != "F32":
        raise GGUFError(f"tensor {name} must be F32 of shape ({dims // 2},)")
    factors = np.array(file.blocks(tensor)).view("<f4").reshape(-1)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise GGUFError(f"tensor {name} has a factor that is not above 0")
    return factors


def _llama3(factors: npt.NDArray[np.float32], theta: float) -> dict[str, Any] | None:
    """Recover the parameters of Llama 3's scaling, or return None if all factors are 1.

    Llama 3 divides frequencies below a lower limit by ``factor``, and keeps those above an upper
    limit. Frequencies between the limits are divided by ``1 / ((1 - s) / factor + s)``, where ``s``
    grows linearly with the frequency, from 0 at the lower limit to 1 at the upper limit. The file's
    factors give the values of ``s``. A line fitted to these values is 0 at the lower limit and 1 at
    the upper limit. Multiplying ``low_freq_factor``, ``high_freq_factor`` and the original context
    length by the same number changes nothing, so ``low_freq_factor`` is set to 1.
    """
    factor = float(factors[-1])
    if (factors == 1).all():
        return None
    frequencies = theta ** (-2.0 * np.arange(len(factors)) / (2 * len(factors))) / (2 * math.pi)
    between = (factors > 1) & (factors < factor)
    if between.sum() >= 2 and factor > 1:
        s = (1 / factors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
        slope, start = np.polyfit(frequencies[between], s, 1)
        low, high, context = 1.0, _tidy(1 - 1 / start), round(-slope / start)
        s = np.clip((context * frequencies - low) / (high - low), 0, 1)
        computed = 1 / ((1 - s) / factor + s)
        if np.abs(computed / factors - 1).max() < MAX_RELATIVE_ERROR:
            return {
                "type": "llama3",
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    raise GGUFError(f"the factors of tensor {FACTORS} are not those of Llama 3's scaling")


def _tidy(number: float) -> float:
    return float(round(number)) if abs(number - round(number)) < 1e-3 else float(number)
