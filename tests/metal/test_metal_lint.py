"""Address spaces and double precision, checked by clang if it is installed.

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

from labkit.metal.emulator.cpp_translation import capture_kernel

CLANG = next((p for p in ("clang", "clang-19", "clang-18", "clang-17") if shutil.which(p)), None)
DISABLED = ("generic_address_space", "pipes", "device_enqueue", "fp64")
FLAGS = (
    "-x", "cl", "-cl-std=clc++2021", "-fsyntax-only", "-Wno-unused-value",
    "-Xclang", "-cl-ext=" + ",".join([*(f"-__opencl_c_{x}" for x in DISABLED), "-cl_khr_fp64"]),
)  # fmt: skip

pytestmark = pytest.mark.skipif(CLANG is None, reason="no clang (17 or later) on PATH")


class LintDone(Exception):
    """Ends a launch after its text has been checked."""


def lint(call, edit=lambda text: text):
    """Return clang's errors on a kernel's text, with its template arguments substituted."""
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
    # Template kernels with threadgroup arrays are Metal only; make it a plain function.
    kernel = re.sub(r"\bthreadgroup (\w+) (\w+)\[([^;]*)\];", r"threadgroup \1* \2 = 0;", kernel)
    # Metal's vector constructors convert.
    kernel = kernel.replace("float4(*(", "convert_float4(*(")
    code = re.sub(r"\[\[[^\]]*\]\]", "", header + fixed + kernel)
    included = f'#include "{Path(__file__).with_name("metal_lint.h")}"\nusing namespace metal;\n'
    completed = subprocess.run(
        [CLANG, *FLAGS, "-"], input=included + code, capture_output=True, text=True, check=False
    )
    return [line for line in completed.stderr.splitlines() if "error:" in line]


def clang_errors(b, edit=lambda text: text, **switches):
    errors = []

    def executor(call):
        errors.extend(lint(call, edit))
        raise LintDone

    with pytest.raises(LintDone):
        attend(b, executor=executor, **switches)
    return errors


@pytest.mark.parametrize("kernel", ["decode", "tiled"])
@pytest.mark.parametrize("sequences", [1, 9])  # fewer than 8 elements are `constant`
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_kernels_pass(kernel, sequences, dtype):
    b = batch([2] * sequences, [20] * sequences, dtype=dtype, heads=2)
    sinks = np.zeros(2, np.float32)
    for resolver in RESOLVERS:
        if resolver != "identity":
            assert clang_errors(b, kernel=kernel, resolver=resolver) == []
    assert clang_errors(b, kernel=kernel, window=3, softcap=2.0, sinks=sinks) == []


DTYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "switches",
    [
        {"resolver": "identity"},
        {"split_kv": 2},
        {"split_kv": 2, "unit": "auto", "resolver": "padded_grid"},
        {"unit": "token"},
        {"window": 3, "window_skip": False},
        {"window": 3, "window_skip": False, "kernel": "tiled"},
    ],
    ids="+".join,
)
def test_switches_pass(switches, dtype):
    assert clang_errors(batch([1], [20], dtype=dtype), **switches) == []


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_head_and_block_sizes_pass(head_dim, block_size):
    b = batch([2], [20], dtype=mx.float16, heads=2, head_dim=head_dim, block_size=block_size)
    for kernel in ("decode", "tiled"):
        assert clang_errors(b, kernel=kernel) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_passes(dtype):
    errors = []

    def executor(call):
        if not call.name.endswith("reduce"):
            return [mx.zeros(shape, kind) for _, shape, kind in call.outputs]
        errors.extend(lint(call))
        raise LintDone

    for sinks in (None, np.zeros(4, np.float32)):
        with pytest.raises(LintDone):
            attend(batch([1], [20], dtype=dtype), executor=executor, split_kv=2, sinks=sinks)
    assert errors == []


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
def test_errors_are_detected(old, new):
    def edit(text):
        assert old in text
        return text.replace(old, new)

    assert clang_errors(batch([2], [20], heads=2), edit, kernel="decode") != []
