"""Metal kernels become CUDA sources that compile and compute the same (on the CPU, emulated)."""

import re
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from cuda_on_cpu import on_cpu
from metal_batches import RESOLVERS, attend, batch, check

from labkit.engine.attention.backends.metal_backend import MetalBackend
from labkit.engine.attention.kernel_dispatch import KernelSwitches
from labkit.metal import kernel_call
from labkit.metal.gpu_properties import EMULATED
from labkit.metal.kernel_call import KernelCall

CUDA_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int",
    mx.uint32: "unsigned int",
}
# What the text around the kernel needs of the headers that MLX includes before it.
INCLUDES = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
struct Shape { int lengths[10]; __device__ int operator[](int i) const { return lengths[i]; } };
"""


def calls(**options):
    """Return the kernel calls of an attention over a small batch, without running them."""
    captured = []

    def capture(call):
        captured.append(call)
        return [mx.zeros(shape, dtype) for _, shape, dtype in call.outputs]

    dtype, head_dim = options.pop("dtype", mx.float32), options.pop("head_dim", 64)
    b = batch([1, 0, 35, 6], [145, 9, 40, 90], dtype=dtype, head_dim=head_dim)
    attend(b, executor=capture, **options)
    return captured


def translation_unit(call):
    """Return the text that MLX compiles for a call, written after its documentation."""
    scalars = tuple(name for name, array in call.inputs if array.ndim == 0)
    parameters = []
    for name, array in call.inputs:
        suffix = "_pointer" if name in scalars else ""
        parameters.append(f"const {CUDA_TYPES[array.dtype]}* {name}{suffix}")
        if f"{name}_shape" in call.body:
            parameters.append(f"const __grid_constant__ Shape {name}_shape")
    parameters += [f"{CUDA_TYPES[dtype]}* {name}" for name, _, dtype in call.outputs]
    template = "".join(
        f"using {name} = {CUDA_TYPES[value]};\n"
        if isinstance(value, mx.Dtype)
        else f"constexpr {type(value).__name__} {name} = {str(value).lower()};\n"
        for name, value in call.template
    )
    return (
        f"{INCLUDES}{kernel_call.cuda_header(call.header)}\nnamespace kernels {{\n"
        f"__global__ void kernel({', '.join(parameters)}) {{\n{template}"
        f"{kernel_call.cuda_body(call.body, scalars)}}}\n}}\n"
    )


def compile_cuda(text, folder):
    """Compile for the GPU only, with functions for the device by default, as MLX does."""
    source = folder / "kernel.cu"
    # nvcc has no such option, so the functions of the headers are marked. Then `device` must not be
    # a macro, because nvcc's headers define __device__ by it.
    marked = text.replace("#define device\n", "").replace("\ninline ", "\n__device__ inline ")
    source.write_text(re.sub(r"\bdevice (?=T|uint|vec)", "", marked))
    command = ["nvcc", "-arch=sm_90", "-ptx", "-o", str(folder / "kernel.ptx"), str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler")
@pytest.mark.parametrize(
    "options",
    [
        {"kernel": "decode", "head_dim": 128},
        {"kernel": "tiled", "window": 33},
        {"kernel": "decode", "split_kv": 3, "softcap": 3.0, "sinks": np.ones(4, "f4")},
    ],
    ids=["decode", "tiled", "split"],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_the_sources_compile_as_cuda(dtype, options, tmp_path):
    for call in calls(dtype=dtype, **options):
        done = compile_cuda(translation_unit(call), tmp_path)
        assert done.returncode == 0, done.stderr


def test_no_word_of_metal_is_left_in_front_of_the_prelude():
    (call,) = calls(kernel="tiled")
    header = kernel_call.cuda_header(call.header)
    assert "#include <metal" in call.header and "#include <metal" not in header
    assert header.index("#define device") < header.index("inline void write_report(device uint*")


def test_a_call_reaches_mlx(monkeypatch):
    made, run = {}, {}

    def cuda_kernel(**definition):
        made.update(definition)
        return lambda **call: run.update(call) or ["outputs"]

    monkeypatch.setattr(kernel_call, "mx", SimpleNamespace(cuda_kernel=None, fast=None))
    monkeypatch.setattr(kernel_call.mx, "fast", SimpleNamespace(cuda_kernel=cuda_kernel))
    values, scale = mx.zeros(3), mx.array(2.0)
    call = KernelCall(
        name="double",
        header="#include <metal_stdlib>\nusing namespace metal;\n",
        body="out[0] = values[0] * scale;\n",
        inputs=(("values", values), ("scale", scale)),
        outputs=(("out", (3,), mx.float32),),
        template=(("N", 3),),
        groups=(2, 5, 7),
        threads=64,
    )
    assert kernel_call.on_cuda(call) == ["outputs"]
    assert made["input_names"] == ["values", "scale_pointer"]
    assert made["output_names"] == ["out"]
    assert made["source"] == "const auto scale = *scale_pointer;\n" + call.body
    assert run["inputs"] == [values, scale] and run["init_value"] is None
    assert run["grid"] == (128, 5, 7) and run["threadgroup"] == (64, 1, 1)
    assert run["template"] == [("N", 3)]
    assert run["output_shapes"] == [(3,)] and run["output_dtypes"] == [mx.float32]
    assert np.isnan(kernel_call.on_cuda(call, poison=True) and run["init_value"])


@pytest.mark.parametrize("kernel", ["decode", "tiled"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 33, "softcap": 3.0, "sinks": np.array([1, 2, -1, 0], np.float32)}],
    ids=["plain", "options"],
)
def test_the_cuda_text_equals_the_oracle_and_the_metal_text(kernel, options, compiler):
    b = batch([1, 0, 35, 6], [145, 9, 40, 90])
    out, evidence, _ = attend(b, kernel=kernel, executor=on_cpu, **options)
    check(b, out, **options)
    metal, expected, _ = attend(b, kernel=kernel, **options)
    np.testing.assert_allclose(out, metal, rtol=0, atol=1e-5)
    assert evidence.stamp == evidence.expected_stamp
    assert replace(evidence, stamp=0, expected_stamp=0) == replace(
        expected, stamp=0, expected_stamp=0
    )


@pytest.mark.parametrize("switches", [{"split_kv": 3}, {"unit": "token"}])
def test_the_cuda_text_splits_keys_and_shares_heads(switches, compiler):
    b = batch([1, 1], [200, 3])
    out, evidence, _ = attend(b, executor=on_cpu, **switches)
    check(b, out)
    assert evidence.stamp == evidence.expected_stamp


@pytest.mark.parametrize("resolver", RESOLVERS[1:])
def test_resolvers_are_bit_equal_in_the_cuda_text(resolver, compiler):
    b = batch([1, 1, 1], [37, 1, 30])
    expected, _, _ = attend(b, executor=on_cpu)
    out, _, _ = attend(b, executor=on_cpu, resolver=resolver)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("cores", "partitions"), [(14, 1), (132, 2)])
def test_a_gpu_of_more_cores_splits_the_keys_of_larger_batches(cores, partitions):
    b = batch([1] * 64, [1000] * 64)
    properties = replace(EMULATED, cores=cores)
    backend = MetalBackend(KernelSwitches(split_kv="auto"), "cuda", pytest.fail, properties)
    backend.adopt([b.k_pool], [b.v_pool])
    backend.bind(0, scale=1.0, heads=4)
    metadata = backend.plan(
        block_tables=b.block_tables, seq_lens=b.seq_lens, cu_seqlens_q=b.cu_seqlens_q
    )
    assert backend._choose_kernel(metadata, backend.bound_layer(0)).partitions == partitions
