"""What can be seen of requests before they run: whether the KV memory holds them together."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.config import Experiment, KVLayout, Reservation
from labkit.engine import budget
from labkit.engine.budget.capacity import slots_for

EXACT = ("synthetic", "trace")  # sources whose lengths are known without a tokenizer


def sentences(experiment: Experiment, together: Sequence[int]) -> tuple[str, ...]:
    """Say where requests in flight together must wait for each other.

    ``together``: prompt and output tokens of the longest that can be in flight at a time.
    """
    return tuple(filter(None, (_memory(experiment, together), _rows(experiment, len(together)))))


def _memory(experiment: Experiment, together: Sequence[int]) -> str | None:
    """Compare what they ask of the KV memory with what it holds; None where that is not known."""
    planned, engine = budget.check(experiment), experiment.engine
    if planned is None:
        return None
    blocks = planned.blocks - (engine.kv.layout is KVLayout.paged)  # without the null block
    held = blocks * engine.kv.block_size
    asked = slots_for(engine.kv, [tokens - 1 for tokens in together])  # the last is not computed
    about = "" if experiment.workload.prompts.source in EXACT else "about "
    fit = "they fit"
    if asked > held:
        full = engine.scheduler.reservation is Reservation.full
        fit = "they will queue" if full else "some will queue or be preempted"
    return (
        f"{_size(planned.pool_bytes)} of KV memory holds {held:,} tokens; {len(together)} requests "
        f"ask for {about}{asked:,}: {fit}"
    )


def _rows(experiment: Experiment, requests: int) -> str | None:
    if experiment.engine.name == "mlx_lm":
        return None
    rows = experiment.engine.scheduler.max_num_seqs
    if requests <= rows:
        return None
    return (
        f"engine.scheduler.max_num_seqs={rows}: of {requests} requests in flight "
        f"{requests - rows} will queue"
    )


def _size(size: int) -> str:
    """Write bytes in GiB, or in MiB where that is too coarse."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
