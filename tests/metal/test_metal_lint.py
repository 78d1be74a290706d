"""Address spaces and double precision, checked by clang where there is one.

g++ accepts `device` where Metal wants `constant`; clang's OpenCL C++ mode does not.
"""

import re
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from metal_batches import RESOLVERS, attend, batch

from labkit.metal.emulator.source_capture import capture_kernel

CLANG = next((p for p in ("clang", "clang-19", "clang-18", "clang-17") if shutil.which(p)), None)
OFF = ("generic_address_space", "pipes", "device_enqueue", "fp64")
FLAGS = (
    "-x", "cl", "-cl-std=clc++2021", "-fsyntax-only", "-Wno-unused-value",
    "-Xclang", "-cl-ext=" + ",".join([*(f"-__opencl_c_{name}" for name in OFF), "-cl_khr_fp64"]),
)  # fmt: skip

pytestmark = pytest.mark.skipif(CLANG is None, reason="no clang (17 or later) on PATH")


class Linted(Exception):
    """Ends the launch: its text has been seen."""


def lint(call, edit=lambda text: text):
    """The errors of a kernel's text, its template arguments written in."""
    text = edit(capture_kernel(call).text)
    text = re.sub(r"^#include.*$|^using namespace metal;", "", text, flags=re.MULTILINE)
    arguments = re.search(r"decltype\(\w+<(.*)>\)", text).group(1).split(", ")
    header, rest = text.split("template <typename T, ", 1)
    names, kernel = rest.split(">\n[[kernel]] ", 1)
    kernel = kernel.split("\ntemplate ")[0]
    names = ["typename T", *names.split(", ")]
    fixed = "".join(
        f"typedef {value} {name.split()[1]};\n"
        if name.startswith("typename")
        else f"__constant constexpr {name} = {value};\n"
        for name, value in zip(names, arguments, strict=True)
    )
    # A kernel of a template, and arrays of one, are Metal's; a plain function is both's.
    kernel = re.sub(r"\bthreadgroup (\w+) (\w+)\[([^;]*)\];", r"threadgroup \1* \2 = 0;", kernel)
    # Metal's vector constructors convert.
    kernel = kernel.replace("float4(*(", "convert_float4(*(")
    code = re.sub(r"\[\[[^\]]*\]\]", "", header + fixed + kernel)
    included = f'#include "{Path(__file__).with_name("metal_lint.h")}"\nusing namespace metal;\n'
    done = subprocess.run(
        [CLANG, *FLAGS, "-"], input=included + code, capture_output=True, text=True, check=False
    )
    return [line for line in done.stderr.splitlines() if "error:" in line]


def errors_of(b, edit=lambda text: text, **how):
    found = []

    def executor(call):
        found.extend(lint(call, edit))
        raise Linted

    with pytest.raises(Linted):
        attend(b, executor=executor, **how)
    return found


@pytest.mark.parametrize("kernel", ["decode", "tiled"])
@pytest.mark.parametrize("sequences", [1, 9])  # fewer than 8 elements are `constant`
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_kernels_pass(kernel, sequences, dtype):
    b = batch([2] * sequences, [20] * sequences, dtype=dtype, heads=2)
    sinks = np.zeros(2, np.float32)
    for resolver in RESOLVERS:
        if resolver != "identity":
            assert errors_of(b, kernel=kernel, resolver=resolver) == []
    assert errors_of(b, kernel=kernel, window=3, softcap=2.0, sinks=sinks) == []


DTYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "how",
    [
        {"resolver": "identity"},
        {"split_kv": 2},
        {"split_kv": 2, "gqa_sharing": True, "resolver": "padded_grid"},
        {"gqa_sharing": True},
        {"window": 3, "window_skip": False},
        {"window": 3, "window_skip": False, "kernel": "tiled"},
    ],
    ids="+".join,
)
def test_switches_pass(how, dtype):
    assert errors_of(batch([1], [20], dtype=dtype), **how) == []


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_head_and_block_sizes_pass(head_dim, block_size):
    b = batch([2], [20], dtype=mx.float16, heads=2, head_dim=head_dim, block_size=block_size)
    for kernel in ("decode", "tiled"):
        assert errors_of(b, kernel=kernel) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_passes(dtype):
    found = []

    def executor(call):
        if not call.name.endswith("reduce"):
            return [mx.zeros(shape, kind) for _, shape, kind in call.outputs]
        found.extend(lint(call))
        raise Linted

    for sinks in (None, np.zeros(4, np.float32)):
        with pytest.raises(Linted):
            attend(batch([1], [20], dtype=dtype), executor=executor, split_kv=2, sinks=sinks)
    assert found == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("const device T* key", "const constant T* key"),
        ("const device T* key", "const T* key"),
        ("const device T* value", "const threadgroup T* value"),
        ("uint blocks = 0;", "double blocks = 0;"),
        ("template <typename Prefix>\ninline int find_seq_idx(Prefix cu",
         "inline int find_seq_idx(const device int* cu"),
    ],
)  # fmt: skip
def test_mistakes_show(old, new):
    def edit(text):
        assert old in text
        return text.replace(old, new)

    assert errors_of(batch([2], [20], heads=2), edit, kernel="decode") != []
