"""Kernel cases in half precision: the same numbers rounded, counted and fingerprinted as such."""

import shutil

import kernel_stubs
import mlx.core as mx
import numpy as np
import pytest

from labkit.config import Case, Precision, Workload
from labkit.cpu.precision.kv_dtypes import from_float32, to_float32
from labkit.engine.attention.backends.mlx_backend_base import MlxBackend
from labkit.engine.attention.launch_report import LaunchReport
from labkit.workload import kind_of
from labkit.workload.kernels import kernel_cases
from labkit.workload.kernels.interleaved_kernels import InterleavedKernels
from labkit.workload.kernels.kernel_arms import KernelArm
from labkit.workload.kernels.launch_timing import MlxLaunchQueue
from labkit.workload.workload_protocols import single_arm_context

HALF = (Precision.float16, Precision.bfloat16)
CASE = Case(name="mixed", decode=2, context=21, prefill=1, chunk=5)


def make(dtype, **changes):
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "warmup": 1}
    return Workload("t", "kernel", cases=[CASE], dtype=dtype, **shape, **changes)


@pytest.mark.parametrize("dtype", list(Precision))
def test_numbers_are_rounded_as_mlx_rounds_them(dtype):
    rng = np.random.default_rng(0)
    bits = np.float32(1).view(np.uint32) + np.arange(1 << 17, dtype=np.uint32)  # ties both ways
    numbers = np.concatenate([rng.standard_normal(4096, dtype=np.float32), bits.view(np.float32)])
    for signed in (numbers, -numbers):
        expected = mx.array(signed).astype(getattr(mx, dtype.value))
        stored = from_float32(signed, dtype.value)
        queue = MlxLaunchQueue(dtype)
        assert mx.array_equal(queue.put(stored), expected)
        np.testing.assert_array_equal(queue.read(expected), stored)
        single = expected.astype(mx.float32)
        np.testing.assert_array_equal(to_float32(stored), np.asarray(single))


def test_every_type_holds_the_same_numbers_rounded():
    single = kernel_cases.allocate(1 << 16, 512, seed=3)
    for dtype in HALF:
        half = kernel_cases.allocate(1 << 15, 512, seed=3, dtype=dtype)
        for name in ("q", "k_pool", "v_pool"):
            expected = from_float32(getattr(single, name), dtype.value)
            np.testing.assert_array_equal(getattr(half, name), expected)


def test_bytes_are_those_of_the_type():
    sizes = [kernel_cases.geometry(CASE, make(dtype), 16) for dtype in Precision]
    assert [size.pool_bytes for size in sizes] == [sizes[0].pool_bytes // n for n in (1, 2, 2)]
    least = [kernel_cases.work(sizes[0], make(dtype)).bytes for dtype in Precision]
    assert least == [least[0] // n for n in (1, 2, 2)]


class Echo(MlxBackend):
    """A backend on a device: a launch returns its queries."""

    name = "echo"

    def attend(self, layer, q, plan, out):
        self.types = {array.dtype for array in (q, *self.keys, *self.values)}
        return q * 1, LaunchReport(
            kernel="decode",
            grid=(1,),
            reason="",
            resolver="none",
            layer=0,
            kv_blocks_visited=0,
            bytes=0,
            map_us=0.0,
        )


@pytest.mark.parametrize("dtype", HALF)
def test_a_launch_runs_in_the_case_s_dtype_and_its_output_is_fingerprinted_in_it(dtype):
    backend = Echo()
    kernels = InterleavedKernels(
        [KernelArm("paged", lambda: backend, make(dtype), 16)],
        single_arm_context(1),
    )
    kernels.warm_up()
    (measured,) = kernels.measure(lambda text: None)
    (result,), (values,) = measured.cases, measured.values.values()
    assert backend.types == {getattr(mx, dtype.value)}
    assert result.outputs["dtype"] == dtype.value
    assert values.dtype == np.float32 and not np.isnan(values).any()
    # The template is repeated, and every memory begins with it.
    expected = kernel_cases.allocate(1 << 10, values.size, 1, dtype).q
    np.testing.assert_array_equal(from_float32(values.reshape(-1), dtype.value), expected)


def experiment(dtype, **engine):
    return kernel_stubs.experiment(make(dtype), **engine)


def test_arms_of_different_types_stay_apart():
    device = {"attention": {"device": "emulated"}}
    two = [experiment(dtype, **device) for dtype in HALF]
    assert "the arms differ in workload.dtype" in kind_of(two[0]).apart(two)
    assert kind_of(two[0]).apart(two[:1] * 2) is None


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs a C++ compiler")
@pytest.mark.parametrize("dtype", HALF)
def test_the_emulated_kernels_compute_the_cases_in_half_precision(dtype):
    outputs = {}
    for kind in (dtype, Precision.float32):
        one = experiment(kind, attention={"device": "emulated"})
        kernels = kind_of(one).load([one], single_arm_context(1))
        kernels.warm_up()
        (measured,) = kernels.measure(lambda text: None)
        (outputs[kind],) = measured.values.values()
        assert measured.cases[0].outputs["dtype"] == kind.value
        kernels.close()
    error = np.abs(outputs[dtype] - outputs[Precision.float32]).max()
    assert 0 < error < (4e-3 if dtype is Precision.float16 else 3e-2)
