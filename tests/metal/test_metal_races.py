"""ThreadSanitizer detects a race if any barrier is missing, and none in the kernels as they are.

Only barriers order memory for it.
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from metal_batches import attend, batch
from metal_mutants import mutants
from metal_probes import edited

from labkit.metal.emulator import KernelFault
from labkit.metal.emulator.cpp_compilation import BuildKind
from labkit.metal.emulator.kernel_emulator import DEFAULT_SCHEDULES, Emulator
from labkit.metal.kernel_call import KernelCall

pytestmark = pytest.mark.slow

RACE_EMULATOR = Emulator(DEFAULT_SCHEDULES, BuildKind.race, 100.0)
REVERSE = KernelCall(
    "race_test",
    "#include <metal_stdlib>\nusing namespace metal;\n",
    """
    threadgroup float shared[32];
    uint i = thread_index_in_threadgroup;
    shared[i] = a[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = shared[31 - i];
    """,
    (("a", mx.array(np.arange(32, dtype=np.float32))),),
    (("out", (32,), mx.float32),),
    (),
    (1, 1, 1),
    32,
)


@pytest.fixture(scope="module")
def sanitizer():
    """Skip if the compiler has no ThreadSanitizer, or the operating system does not let it run."""
    from labkit.metal.emulator import EmulatorUnavailable

    try:
        RACE_EMULATOR(REVERSE)
    except (KernelFault, EmulatorUnavailable) as error:
        pytest.skip(f"no ThreadSanitizer: {error}")


def test_a_missing_barrier_is_a_race(sanitizer):
    body = REVERSE.body.replace("threadgroup_barrier(mem_flags::mem_threadgroup);", "")
    with pytest.raises(KernelFault, match=r"race: kernel\.metal:"):
        RACE_EMULATOR(replace(REVERSE, body=body))


def test_correct_kernels_have_no_race(sanitizer):
    b = batch([1], [150], heads=2, kv_heads=1, block_size=8)
    attend(b, executor=RACE_EMULATOR)
    attend(b, executor=RACE_EMULATOR, unit="auto")
    attend(batch([1], [20], heads=2, kv_heads=2), executor=RACE_EMULATOR, unit="token")
    attend(b, executor=RACE_EMULATOR, split_kv=2)
    attend(batch([9], [20], heads=1, kv_heads=1), executor=RACE_EMULATOR)


BARRIERS = [m for m in mutants(["decode"]) if "_barrier(" in m.change.split(" -> ")[0]]


@pytest.mark.parametrize("mutant", BARRIERS, ids=lambda m: f"line {m.line}")
def test_every_barrier_is_needed(mutant, sanitizer):
    b = batch([1], [150], heads=2, kv_heads=1, block_size=8)
    edits = {"decode": mutant.text}
    with pytest.raises(KernelFault, match="race"):
        attend(b, executor=lambda call: RACE_EMULATOR(edited(call, edits)), unit="auto")


def test_all_barriers_are_tested():
    assert len(BARRIERS) == 5
