"""What the CPU backend prepares for a batch, once for each kind of layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from labkit.engine.attention.kernel_dispatch import Dispatch

if TYPE_CHECKING:
    from labkit.engine.attention.replay_state import ReplayState

# The fields of ``kernel_params.PARAMS_DTYPES`` that differ from layer to layer: addresses.
LAYER_ARRAYS = ("q", "k_pool", "v_pool", "out", "sinks")


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """The launch of a kernel, for all layers of one kind in a batch."""

    dispatch: Dispatch
    params: NDArray[Any]  # [1], of ``kernel_params.PARAMS_DTYPES``
    params_address: int
    array_fields: tuple[Any, ...]  # views of the ``LAYER_ARRAYS`` in ``params``
    body: int  # address of the kernel's compiled arithmetic
    workers: int  # threads that share the launch
    splits: int  # units that share the work on one token and some KV heads
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    pool_dtype: int  # index into ``attention_launch.POOL_DTYPES``
    token_numbers: int  # numbers in the keys of one token


@dataclass(slots=True)
class CpuPrepared:
    """What a batch's launches share, filled in as its layers run."""

    launches: dict[int, PreparedLaunch] = field(default_factory=dict)  # by kind of layers
    replay: ReplayState | None = None
