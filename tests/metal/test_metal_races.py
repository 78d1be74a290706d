"""Every barrier is needed: without it ThreadSanitizer, to which only barriers order memory,
sees a race. With all of them it sees none.
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from metal_batches import attend, batch
from metal_mutants import mutants
from metal_probes import edited

from labkit.metal.emulator.cpp_compilation import BuildKind
from labkit.metal.emulator.emulator_errors import KernelFault
from labkit.metal.emulator.kernel_emulator import Emulator
from labkit.metal.emulator.kernel_process import DEFAULT_SCHEDULES
from labkit.metal.kernel_call import KernelCall

pytestmark = pytest.mark.slow

RACES = Emulator(DEFAULT_SCHEDULES, BuildKind.race, 100.0)
SHARE = KernelCall(
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
    """Skip where the compiler has no ThreadSanitizer, or the kernel does not let it run."""
    from labkit.metal.emulator.emulator_errors import EmulatorUnavailable

    try:
        RACES(SHARE)
    except (KernelFault, EmulatorUnavailable) as error:
        pytest.skip(f"no ThreadSanitizer: {error}")


def test_race_is_seen_where_a_barrier_is_missing(sanitizer):
    body = SHARE.body.replace("threadgroup_barrier(mem_flags::mem_threadgroup);", "")
    with pytest.raises(KernelFault, match=r"race: kernel\.metal:"):
        RACES(replace(SHARE, body=body))


def test_correct_kernels_have_no_race(sanitizer):
    b = batch([1], [150], heads=2, kv_heads=1, block_size=8)
    attend(b, executor=RACES)
    attend(b, executor=RACES, gqa_sharing=True)
    attend(b, executor=RACES, split_kv=2)
    attend(batch([9], [20], heads=1, kv_heads=1), executor=RACES)


BARRIERS = [m for m in mutants(["decode"]) if "_barrier(" in m.what.split(" -> ")[0]]


@pytest.mark.parametrize("mutant", BARRIERS, ids=lambda m: f"line {m.line}")
def test_every_barrier_is_needed(mutant, sanitizer):
    b = batch([1], [150], heads=2, kv_heads=1, block_size=8)
    edits = {"decode": mutant.text}
    with pytest.raises(KernelFault, match="race"):
        attend(b, executor=lambda call: RACES(edited(call, edits)), gqa_sharing=True)


def test_every_barrier_is_tried():
    assert len(BARRIERS) == 5
