"""What can be seen of requests before they run: who serves them, and whether memory holds them."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.config import ELSEWHERE, Experiment, KVLayout, Reservation
from labkit.engine import budget
from labkit.engine.budget.kv_demand import slots_for

EXACT = ("synthetic", "trace")  # sources whose lengths are known without a tokenizer


def sentences(experiment: Experiment, together: Sequence[int]) -> tuple[str, ...]:
    """Say where requests in flight together must wait for each other.

    ``together``: prompt and output tokens of the longest that can be in flight at a time.
    """
    found = _server(experiment), _memory(experiment, together), _rows(experiment, len(together))
    return tuple(filter(None, found))


def _server(experiment: Experiment) -> str | None:
    """Say what is not proven of a server, or is not fresh; None where nothing is."""
    server = experiment.engine.server
    if experiment.engine.name != "openai":
        return None
    said = []
    if server.url is not None:
        said.append(f"{server.url} is kept: what it did before is part of what is measured")
    if not server.known.run_here:
        said.append(
            f"engine.server.preset={server.preset} is written by that server's documentation and "
            "was not run by labkit's tests"
        )
    return "; ".join(said) or None


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
    if experiment.engine.name in ELSEWHERE:
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
