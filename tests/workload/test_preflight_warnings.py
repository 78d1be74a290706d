"""Warnings of a plan about KV memory and estimated request lengths."""

import dataclasses

import pytest

from labkit import workload
from labkit.config import Budget, Reservation
from labkit.engine import memory_budget
from labkit.workload.requests import post_run_profiling, preflight_warnings

BASE = (
    "workload=uniform",
    "workload.concurrency=16",
    "engine.budget.blocks=129",
    "engine.kv.block_size=16",
    "engine.scheduler.max_num_seqs=16",
)


def warnings(experiment):
    return workload.estimate(experiment).warnings


def test_a_plan_warns_when_kv_memory_is_too_small_for_the_requests(compose_experiment):
    (warning,) = warnings(compose_experiment(*BASE, "engine.scheduler.reservation=full"))
    # 128 blocks of 16 beside the null block; a request computes 255 of its 256 tokens: 16 blocks.
    assert "of KV memory holds 2,048 tokens; 16 requests need 4,096, so they will queue" in warning
    assert warning.startswith(f"{129 * 16 * kv_bytes(compose_experiment) / 2**20:.3g} MiB of")
    (warning,) = warnings(compose_experiment(*BASE, "engine.scheduler.reservation=optimistic"))
    assert warning.endswith("some will queue or be preempted")
    (warning,) = warnings(compose_experiment(*BASE, "workload.concurrency=8"))
    assert warning.endswith("8 requests need 2,048, so they fit")


def kv_bytes(compose_experiment):
    shape = compose_experiment(*BASE).model.shape
    return 4 * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim


def test_estimated_lengths_and_too_few_rows_are_reported(compose_experiment):
    memory, rows = warnings(compose_experiment("workload=chat", "engine.scheduler.max_num_seqs=12"))
    assert "16 requests need about " in memory
    assert rows == "engine.scheduler.max_num_seqs=12: 4 of 16 requests in flight will queue"
    kernels = compose_experiment("workload=kernel_decode")
    assert warnings(kernels) == ()


def test_how_many_requests_are_in_flight_at_a_rate_is_unknown(compose_experiment):
    words = ("workload=chat_poisson", "engine.scheduler.max_num_seqs=12")
    (warning,) = warnings(compose_experiment(*words))
    assert "up to 12 requests need about " in warning and warning.endswith("so they fit")
    (warning,) = warnings(compose_experiment(*words, "engine.budget.blocks=129"))
    assert "up to 12 requests" in warning and "may queue" in warning


def test_a_reservation_counts_the_memory_of_its_layout(compose_experiment):
    contiguous = compose_experiment("engine=contiguous", *BASE)
    assert contiguous.engine.scheduler.reservation is Reservation.full
    warning = warnings(contiguous)[0]
    assert "16 requests need 4,096" in warning and "holds 2,064 tokens" in warning


def test_window_pools_leave_more_memory_to_the_layers_that_keep_every_token(compose_experiment):
    base = (*BASE, "model=window", "engine.budget.blocks=1000")
    pools = (*base, "engine.kv.window_pools=true")
    (one_pool,), (windowed,) = (warnings(compose_experiment(*arm)) for arm in (base, pools))
    assert "holds 15,984 tokens" in one_pool
    # Of three layers, 16 requests of 4 + 3 blocks and two steps of 512 tokens.
    window = 16 * 7 + 2 * 512 // 16 + 1
    assert f"holds {((4 * 1000 - 3 * window) - 1) * 16:,} tokens" in windowed
    assert one_pool.partition(" of KV memory")[0] == windowed.partition(" of KV memory")[0]


def test_an_open_loop_lasts_until_its_last_arrival(compose_experiment):
    fast, slow = (
        workload.estimate(
            compose_experiment("workload=chat_poisson", f"workload.arrivals.rate={rate}")
        ).seconds
        for rate in (1000, 0.1)
    )
    assert slow > 640 > 10 * fast
    assert dataclasses.is_dataclass(workload.estimate(compose_experiment("workload=chat_poisson")))


def test_more_threads_than_cores_are_named(compose_experiment, monkeypatch):
    monkeypatch.setattr(preflight_warnings.worker_environment, "core_count", lambda: 2)
    many = preflight_warnings.sentences(compose_experiment("engine.threads=64"), [10])
    assert any("engine.threads=64: this machine has 2 cores" in w for w in many)
    fits = preflight_warnings.sentences(compose_experiment("engine.threads=2"), [10])
    assert not any("engine.threads" in w for w in fits)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1020 << 20, "1,020 MiB"),
        (16 << 20, "16 MiB"),
        (3 << 30, "3 GiB"),
        (2000 << 30, "2,000 GiB"),
    ],
)
def test_sizes_have_no_exponent(size, text):
    assert preflight_warnings._size(size) == text


def test_an_own_engine_has_no_pool_rows_or_clocks_to_plan_with(compose_experiment):
    small = compose_experiment(*BASE, "engine.scheduler.max_num_seqs=12")
    assert len(warnings(small)) == 2 and memory_budget.plan_for_arm(small) is not None
    own = dataclasses.replace(small.engine, name="mine.plain:Plain", budget=Budget(blocks=2))
    own = dataclasses.replace(small, engine=own)
    assert warnings(own) == () and memory_budget.plan_for_arm(own) is None
    assert (
        post_run_profiling.share(small, 4096) == 0.25 and post_run_profiling.share(own, 4096) == 0
    )
