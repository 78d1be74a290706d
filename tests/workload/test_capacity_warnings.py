"""What a plan sees of requests before they run."""

import dataclasses

from labkit import workload
from labkit.config import Reservation

BASE = (
    "workload=uniform",
    "workload.concurrency=16",
    "engine.budget.blocks=129",
    "engine.kv.block_size=16",
    "engine.scheduler.max_num_seqs=16",
)


def warnings(experiment):
    return workload.estimate(experiment).warnings


def test_memory_that_does_not_hold_the_requests_together_is_said_with_both_numbers(asked):
    (said,) = warnings(asked(*BASE, "engine.scheduler.reservation=full"))
    # 128 blocks of 16 beside the null block; a request computes 255 of its 256 tokens: 16 blocks.
    assert "of KV memory holds 2,048 tokens; 16 requests need 4,096: they will queue" in said
    assert said.startswith(f"{129 * 16 * kv_bytes(asked) / 2**20:.3g} MiB of")
    (said,) = warnings(asked(*BASE, "engine.scheduler.reservation=optimistic"))
    assert said.endswith("some will queue or be preempted")
    (said,) = warnings(asked(*BASE, "workload.concurrency=8"))
    assert said.endswith("8 requests need 2,048: they fit")


def kv_bytes(asked):
    shape = asked(*BASE).model.shape
    return 4 * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim


def test_lengths_that_are_guessed_are_called_so_and_missing_rows_are_said(asked):
    memory, rows = warnings(asked("workload=chat", "engine.scheduler.max_num_seqs=12"))
    assert "16 requests need about " in memory
    assert rows == "engine.scheduler.max_num_seqs=12: of 16 requests in flight 4 will queue"
    kernels = asked("workload=kernel_decode")
    assert warnings(kernels) == ()


def test_the_memory_of_a_reservation_is_that_of_its_layout(asked):
    contiguous = asked("engine=contiguous", *BASE)
    assert contiguous.engine.scheduler.reservation is Reservation.full
    said = warnings(contiguous)[0]
    assert "16 requests need 4,096" in said and "holds 2,064 tokens" in said


def test_an_open_loop_lasts_until_its_last_arrival(asked):
    fast, slow = (
        workload.estimate(asked("workload=chat_poisson", f"workload.arrivals.rate={rate}")).seconds
        for rate in (1000, 0.1)
    )
    assert slow > 640 > 10 * fast
    assert dataclasses.is_dataclass(workload.estimate(asked("workload=chat_poisson")))
