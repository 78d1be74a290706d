"""The launch parameters that the CPU backend prepares for a batch, per kind of layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from labkit.engine.attention.kernel_dispatch import Dispatch

if TYPE_CHECKING:
    from labkit.engine.attention.backends.replay_state import ReplayState

# The fields of ``attention_params.PARAMS_DTYPES`` that differ from layer to layer: array addresses.
LAYER_ARRAYS = ("q", "k_pool", "v_pool", "out", "sinks")


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """A kernel launch and its parameters, for all layers of one kind in a batch."""

    dispatch: Dispatch
    params: NDArray[Any]  # [1], of ``attention_params.PARAMS_DTYPES``
    params_address: int
    array_fields: tuple[Any, ...]  # views of the ``LAYER_ARRAYS`` in ``params``
    body: int  # address of the kernel's compiled arithmetic
    workers: int  # threads that share the launch
    splits: int  # units that share the work of one token and its KV heads
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    pool_dtype: int  # index into ``attention_launch.POOL_DTYPES``
    token_numbers: int  # elements in the keys of one token


@dataclass(slots=True)
class CpuPrepared:
    """Data that a batch's launches share, filled in while its layers run."""

    launches: dict[int, PreparedLaunch] = field(default_factory=dict)  # by kind of layer
    replay: ReplayState | None = None
