"""On a GPU (Metal or CUDA), the kernels equal the oracle and the emulator."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from metal_batches import RESOLVERS, attend, batch, check

from labkit.metal.kernel_call import on_cuda


def on_metal(call, poison):
    return call(call.operands(), poison=poison)


EXECUTOR = on_metal if mx.metal.is_available() else on_cuda
pytestmark = [
    pytest.mark.metal,
    pytest.mark.skipif(
        not (mx.metal.is_available() or mx.cuda.is_available()),
        reason="needs a Mac with Metal or an NVIDIA GPU",
    ),
]


def poisoned(call):
    """Run a call on the GPU, into outputs filled with NaN."""
    return EXECUTOR(call, poison=True)


OPTIONS = [{}, {"window": 33, "softcap": 3.0, "sinks": np.array([1, 2, -1, 0], np.float32)}]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_the_gpu_matches_the_oracle(dtype, head_dim, block_size):
    pool_format = {"dtype": dtype, "head_dim": head_dim, "block_size": block_size}
    b = batch([1, 0, 35, 6], [145, 9, 40, 90], **pool_format)
    for kernel in ("decode", "tiled"):
        if kernel == "tiled" and dtype == mx.float32 and head_dim > 128:
            continue
        for options in OPTIONS:
            out, evidence, _ = attend(b, kernel=kernel, executor=poisoned, **options)
            check(b, out, **options)
            assert evidence.stamp == evidence.expected_stamp


@pytest.mark.parametrize("kernel", ["decode", "tiled"])
def test_resolvers_are_bit_equal_on_the_gpu(kernel):
    b = batch([1, 0, 35, 66], [100, 9, 77, 90], dtype=mx.float16)
    expected, _, _ = attend(b, kernel=kernel, executor=poisoned)
    for resolver in RESOLVERS[1:]:
        if resolver != "identity":
            out, _, _ = attend(b, kernel=kernel, executor=poisoned, resolver=resolver)
            assert out.tobytes() == expected.tobytes(), resolver


@pytest.mark.parametrize(
    "switches", [{"split_kv": 3}, {"unit": "auto"}, {"unit": "token"}, {"window": 20}]
)
def test_gpu_and_emulator_agree(switches, compiler):
    b = batch([1, 1], [200, 3])
    result, on_gpu, _ = attend(b, executor=poisoned, **switches)
    emulated, on_cpu, _ = attend(b, **switches)
    np.testing.assert_allclose(result, emulated, rtol=0, atol=1e-5)
    assert replace(on_gpu, device=None, stamp=0, expected_stamp=0) == replace(
        on_cpu, device=None, stamp=0, expected_stamp=0
    )


@pytest.mark.parametrize("kernel", ["decode", "tiled"])
def test_a_batch_gives_the_same_bits_every_time(kernel):
    """A race between simdgroups would show as differences between runs."""
    b = batch([1] * 64 + [70], [300] * 64 + [500], dtype=mx.float16, head_dim=128)
    first, _, _ = attend(b, kernel=kernel, executor=poisoned)
    check(b, first)
    for _ in range(20):
        assert attend(b, kernel=kernel, executor=poisoned)[0].tobytes() == first.tobytes()
