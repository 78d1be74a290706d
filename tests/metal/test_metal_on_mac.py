"""On a Mac, the device equals the oracle and the emulator."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from metal_batches import RESOLVERS, attend, batch, check

pytestmark = [
    pytest.mark.metal,
    pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Mac with Metal"),
]


def poisoned(call):
    """Run a call on the Mac's GPU, into outputs filled with NaN."""
    return call(call.operands(), poison=True)


OPTIONS = [{}, {"window": 33, "softcap": 3.0, "sinks": np.array([1, 2, -1, 0], np.float32)}]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_device_matches_the_oracle(dtype, head_dim, block_size):
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
def test_resolvers_are_bit_equal_on_the_device(kernel):
    metal = poisoned
    b = batch([1, 0, 35, 66], [100, 9, 77, 90], dtype=mx.float16)
    expected, _, _ = attend(b, kernel=kernel, executor=metal)
    for resolver in RESOLVERS[1:]:
        if resolver != "identity":
            out, _, _ = attend(b, kernel=kernel, executor=metal, resolver=resolver)
            assert out.tobytes() == expected.tobytes(), resolver


@pytest.mark.parametrize("switches", [{"split_kv": 3}, {"gqa_sharing": True}, {"window": 20}])
def test_device_and_emulator_agree(switches, compiler):
    b = batch([1, 1], [200, 3])
    metal, on_device, _ = attend(b, executor=poisoned, **switches)
    emulated, on_cpu, _ = attend(b, **switches)
    np.testing.assert_allclose(metal, emulated, rtol=0, atol=1e-5)
    assert replace(on_device, device=None, stamp=0, expected_stamp=0) == replace(
        on_cpu, device=None, stamp=0, expected_stamp=0
    )
