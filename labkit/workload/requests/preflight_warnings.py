"""Warnings before a run: servers of unknown state, and requests that memory cannot hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.config import PRESET_LAYOUTS, EosHandling, Experiment, KVLayout, Reservation
from labkit.config.requests import LENGTH_TRACES
from labkit.engine import memory_budget
from labkit.engine.memory_budget.required_kv_slots import slots_for
from labkit.machine import worker_environment

EXACT_SOURCES = ("synthetic", *LENGTH_TRACES)  # sources whose lengths are known without a tokenizer


def sentences(experiment: Experiment, together: Sequence[int]) -> tuple[str, ...]:
    """Return the warnings about the server, the KV memory and the number of batch rows.

    ``together``: prompt and output tokens of the longest requests that can be in flight together
    or, if a rate or a trace sets the arrivals, can run together.
    """
    engine, requests = experiment.engine, len(together)
    warnings = ["; ".join(of_server(experiment))]
    threads, cores = engine.threads, worker_environment.core_count()
    if threads is not None and threads > cores:
        warnings.append(
            f"engine.threads={threads}: this machine has {cores} cores, and surplus threads only "
            f"wait for others; set engine.threads={cores} or less"
        )
    warnings.append(_memory(experiment, together) or "")
    rows = engine.scheduler.max_num_seqs
    if engine.name in PRESET_LAYOUTS and requests > rows:
        warnings.append(
            f"engine.scheduler.max_num_seqs={rows}: {requests - rows} of {requests} requests in "
            "flight will queue"
        )
    return tuple(filter(None, warnings))


def of_server(experiment: Experiment) -> Iterator[str]:
    """Yield the warnings about the arm's server, if it is one."""
    server = experiment.engine.server
    if experiment.engine.name != "openai":
        return
    if server.url is not None:
        yield f"{server.url} is not restarted, so its earlier requests may affect results"
    if not server.server_preset.tested:
        yield (
            f"engine.server.preset={server.preset} follows that server's documentation and was "
            "not run by labkit's tests"
        )
    stops = server.server_preset.eos_handling is EosHandling.none
    if stops and experiment.workload.ignore_eos:
        yield (
            f"engine.server.preset={server.preset} asks for nothing past the end token, so a "
            "request that ends there fails; set workload.ignore_eos=false for all arms"
        )
    if server.packages:
        own = server.packages == server.server_preset.requirements
        size = f" ({server.server_preset.size})" if own else ""
        yield (
            f"{' '.join(server.packages)} and what it needs{size} is installed once in labkit's "
            "cache, for the server alone"
        )


def _memory(experiment: Experiment, together: Sequence[int]) -> str | None:
    """Compare the KV tokens that the requests need with the capacity, if that can be planned."""
    planned, engine = memory_budget.plan_for_arm(experiment), experiment.engine
    if planned is None or planned.full_blocks is None:
        return None
    blocks = planned.full_blocks - (engine.kv.layout is KVLayout.paged)  # without the null block
    capacity = blocks * engine.kv.block_size
    needed = slots_for(engine.kv, [tokens - 1 for tokens in together])  # the last is not computed
    about = "" if experiment.workload.prompts.source in EXACT_SOURCES else "about "
    # If a rate or a trace sets the arrivals, fewer may run at a time.
    paced = experiment.workload.arrivals.is_paced
    most, will = ("up to ", "may") if paced else ("", "will")
    fit = "so they fit"
    if needed > capacity:
        full = engine.scheduler.reservation is Reservation.full
        fit = f"so they {will} queue" if full else f"so some {will} queue or be preempted"
    return (
        f"{_size(planned.pool_bytes)} of KV memory holds {capacity:,} tokens; "
        f"{most}{len(together)} requests need {about}{needed:,}, {fit}"
    )


def _size(size: int) -> str:
    """Format bytes in GiB, or in MiB below 1 GiB."""
    unit, scale = ("GiB", 2**30) if size >= 2**30 else ("MiB", 2**20)
    printed = size / scale
    return f"{printed:,.0f} {unit}" if printed >= 100 else f"{printed:.3g} {unit}"
