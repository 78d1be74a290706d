"""The emulator computes as Metal does, and raises on what Metal does not allow."""

import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from metal_batches import prover

from labkit.metal.emulator import EmulatorUnavailable, KernelFault, cpp_compilation
from labkit.metal.emulator.cpp_translation import CapturedKernel, _parse, capture_kernel, translate
from labkit.metal.emulator.kernel_emulator import (
    PROOF_SCHEDULES,
    Emulator,
    FiberOrder,
    Schedule,
    run_kernel,
)
from labkit.metal.kernel_call import KernelCall, executor_for

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the emulator")

HEADER = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"


def call(body, inputs, outputs, *, threads=32, groups=(1, 1, 1), template=(), header=HEADER):
    return KernelCall(
        "emulator_test",
        header,
        body,
        tuple((name, mx.array(value)) for name, value in inputs.items()),
        tuple((name, shape, dtype) for name, (shape, dtype) in outputs.items()),
        tuple(template),
        groups,
        threads,
    )


def floats(*shape):
    return (shape, mx.float32)


# ------------------------------------------------------------------ source capture


def test_exported_tuple_has_the_known_form():
    body = "// a comment that ends with threadgroup\nfloat one = 1; "
    body += "out[thread_position_in_grid.x] = T(few[0]) + T(many[0]) + scalar + many_shape[0];"
    captured = capture_kernel(
        call(
            body,
            {"few": np.ones(7, np.float32), "many": np.ones(8, np.float32), "scalar": 1.5},
            {"out": floats(64)},
            groups=(2, 1, 1),
            template=[("T", mx.bfloat16), ("N", 3), ("FLAG", True)],
        )
    )
    assert captured.grid == (64, 1, 1)
    assert captured.threadgroup == (32, 1, 1)
    # MLX declares inputs of fewer than 8 elements `constant`, others `device`.
    assert "const constant float* few [[buffer(0)]]" in captured.text
    assert "const device float* many [[buffer(1)]]" in captured.text
    assert "const constant int* many_shape [[buffer(2)]]" in captured.text
    assert "const constant float& scalar [[buffer(3)]]" in captured.text
    assert "device float* out [[buffer(4)]]" in captured.text
    assert "uint3 thread_position_in_grid [[thread_position_in_grid]]" in captured.text
    assert "few_shape" not in captured.text
    names = [(b.name, b.written) for b in translate(captured).buffers]
    assert names == [
        ("few", False), ("many", False), ("many_shape", False), ("scalar", False), ("out", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [None, ("name", "text", 1, 1, 1), ("n", "no function", *[1] * 6), ("n", "void n(", *"123456")],
)
def test_a_tuple_of_another_form_is_refused(arguments):
    with pytest.raises(EmulatorUnavailable, match="in a form that this emulator does not know"):
        _parse(arguments)


@pytest.fixture
def search():
    """Return the function that looks for g++, which knows of none yet and forgets it afterwards."""
    cpp_compilation.find_compiler.cache_clear()
    yield cpp_compilation.find_compiler
    cpp_compilation.find_compiler.cache_clear()


@linux_only
def test_a_missing_compiler_is_reported_in_one_line(monkeypatch, search):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(
        EmulatorUnavailable, match=r"^device=emulated: there is no g\+\+ on PATH"
    ) as error:
        executor_for("emulated")
    assert "\n" not in str(error.value)


@linux_only
@pytest.mark.parametrize(
    ("machine", "version", "needed"),
    [
        ("x86_64", "11.4.0", "12"),
        ("x86_64", "12", None),
        ("aarch64", "12", "13"),
        ("aarch64", "13.2.0", None),
        ("x86_64", "", "12"),
    ],
)
def test_a_compiler_without_half_precision_is_refused(
    machine, version, needed, monkeypatch, search, tmp_path
):
    gxx = tmp_path / "g++"
    gxx.write_text(f"#!/bin/sh\n[ $1 = -dumpversion ] && echo {version} || echo 'g++ (Some 1)'\n")
    gxx.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cpp_compilation.platform, "machine", lambda: machine)
    if needed is None:
        assert search() == cpp_compilation.Compiler(str(gxx), "g++ (Some 1)")
        return
    with pytest.raises(EmulatorUnavailable, match=rf"g\+\+ \(Some 1\); install g\+\+ {needed} "):
        search()


def test_a_mac_s_compiler_is_not_tried(monkeypatch, search):
    monkeypatch.setattr(cpp_compilation.sys, "platform", "darwin")
    with pytest.raises(EmulatorUnavailable, match=r"^device=emulated needs Linux; set device="):
        search()


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match="device=tpu: must be one of: metal, emulated, cuda"):
        executor_for("tpu")


# ------------------------------------------------------------------ results


def test_simd_operations(compiler):
    body = """
    uint i = thread_index_in_simdgroup;
    float x = a[thread_position_in_grid.x];
    out[4 * thread_position_in_grid.x] = simd_sum(x);
    out[4 * thread_position_in_grid.x + 1] = simd_max(x) - simd_min(x);
    out[4 * thread_position_in_grid.x + 2] = simd_shuffle_xor(x, ushort(5));
    float next = simd_shuffle(x, ushort((i + 3) % 32));
    out[4 * thread_position_in_grid.x + 3] = next + simd_broadcast(x, 7);
    """
    a = np.random.default_rng(0).integers(-9, 9, 64).astype(np.float32)
    (out,) = Emulator(PROOF_SCHEDULES, cpp_compilation.BuildKind.proof, 60.0)(
        call(body, {"a": a}, {"out": floats(64, 4)}, threads=64)
    )
    lanes = np.arange(32)
    for group, results in zip(a.reshape(2, 32), np.array(out).reshape(2, 32, 4), strict=True):
        assert (results[:, 0] == group.sum()).all()
        assert (results[:, 1] == group.max() - group.min()).all()
        assert (results[:, 2] == group[lanes ^ 5]).all()
        assert (results[:, 3] == group[(lanes + 3) % 32] + group[7]).all()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_matrices(dtype, compiler):
    body = """
    simdgroup_matrix<T, 8, 8> x, y, z;
    simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    simdgroup_load(x, a, 8);
    simdgroup_load(y, b, 16, ulong2(3, 2), true);
    simdgroup_multiply_accumulate(sum, x, y, sum);
    uint lane = thread_index_in_simdgroup;
    uint row = (lane / 4 & 4) + lane / 2 % 4, col = (lane / 4 & 2) * 2 + lane % 2 * 2;
    out[row * 8 + col] = sum.thread_elements()[0];
    out[row * 8 + col + 1] = sum.thread_elements()[1];
    """
    rng = np.random.default_rng(1)
    a, b = (
        mx.array(rng.standard_normal(s).astype(np.float32)).astype(dtype)
        for s in ((8, 8), (16, 16))
    )
    kernel_call = call(body, {"a": a, "b": b}, {"out": floats(8, 8)}, template=[("T", dtype)])
    (out,) = prover()(kernel_call)
    x, y = (np.array(m.astype(mx.float32)).astype(np.float64) for m in (a, b))
    # Origin (3, 2): column 3, row 2; then transposed.
    np.testing.assert_allclose(np.array(out), x @ y[2:10, 3:11].T + 1, rtol=0, atol=4e-6)


def test_half_types_round_as_mlx_does(compiler):
    rng = np.random.default_rng(2)
    values = (rng.standard_normal(256) * 10.0 ** rng.integers(-9, 9, 256)).astype(np.float32)
    values[:6] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 3.3e38]
    body = "uint i = thread_position_in_grid.x; h[i] = half(a[i]); b[i] = bfloat(a[i]);"
    outputs = {"h": ((256,), mx.float16), "b": ((256,), mx.bfloat16)}
    h, b = Emulator()(call(body, {"a": values}, outputs, threads=256))
    for out, dtype in ((h, mx.float16), (b, mx.bfloat16)):
        expected = np.array(mx.array(values).astype(dtype).astype(mx.float32))
        np.testing.assert_array_equal(np.array(out.astype(mx.float32)), expected)


def test_threadgroups_positions_and_shapes(compiler):
    body = """
    uint i = (threadgroup_position_in_grid.z * 3 + threadgroup_position_in_grid.y) * 64
           + thread_index_in_threadgroup;
    out[i] = a_shape[1] * 1000 + thread_position_in_grid.y * 100 + threadgroups_per_grid.z * 10
           + simdgroup_index_in_threadgroup;
    """
    a = np.ones((2, 5), np.float32)
    kernel_call = call(body, {"a": a}, {"out": floats(2, 3, 64)}, threads=64, groups=(1, 3, 2))
    (out,) = prover()(kernel_call)
    y, i = np.arange(3)[:, None], np.arange(64)
    np.testing.assert_array_equal(np.array(out), np.stack([5020 + y * 100 + i // 32] * 2))


# ------------------------------------------------------------------ faults

SHARE = """
threadgroup float shared[64];
uint i = thread_index_in_threadgroup;
shared[i] = a[i];
BARRIER
out[i] = shared[63 - i];
"""
A64 = {"a": np.arange(64, dtype=np.float32)}


def faulty(body, inputs=A64, outputs=None, threads=64, **switches):
    with pytest.raises(KernelFault) as error:
        prover(2.0)(call(body, inputs, outputs or {"out": floats(64)}, threads=threads, **switches))
    assert "\n" not in str(error.value)
    return error.value


def test_missing_threadgroup_barrier(compiler):
    good = SHARE.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_threadgroup);")
    (out,) = Emulator(PROOF_SCHEDULES, cpp_compilation.BuildKind.proof, 60.0)(
        call(good, A64, {"out": floats(64)}, threads=64)
    )
    np.testing.assert_array_equal(np.array(out), np.arange(64)[::-1])
    assert faulty(SHARE.replace("BARRIER", "")).kind == "disagree"
    weak = SHARE.replace("BARRIER", "simdgroup_barrier(mem_flags::mem_threadgroup);")
    assert faulty(weak).kind == "disagree"


def test_diverging_barriers(compiler):
    half = "if (i < 40) { threadgroup_barrier(mem_flags::mem_threadgroup); }"
    assert faulty(SHARE.replace("BARRIER", half)).kind == "divergence"
    early = "if (i >= 32) { return; } threadgroup_barrier(mem_flags::mem_threadgroup);"
    fault = faulty(SHARE.replace("BARRIER", early))
    assert fault.kind == "divergence"
    assert "has returned" in fault.detail


def test_diverging_simd_operation(compiler):
    body = """
    uint i = thread_position_in_grid.x;
    float x = a[i];
    if (i % 2) {
      x = simd_sum(x);
    }
    out[i] = simd_max(x);
    """
    fault = faulty(body)
    assert fault.kind == "divergence"
    assert "simd_sum" in fault.detail
    assert "simd_max" in fault.detail


@pytest.mark.parametrize("index", ["i + 1", "i - 1", "i + 100000"])
@pytest.mark.parametrize("access", ["out[i] = a[INDEX];", "out[INDEX] = a[i];"])
def test_access_outside_a_buffer(access, index, compiler):
    body = "int i = int(thread_position_in_grid.x); " + access.replace("INDEX", index)
    assert faulty(body).kind in ("bounds", "disagree", "crash")


def test_fault_names_buffer_byte_and_thread(compiler):
    body = "int i = int(thread_position_in_grid.x); out[i] = a[i == 37 ? 64 : i];"
    fault = faulty(body)
    assert fault.detail.startswith("access outside a, at byte 256 of 256, by threadgroup (0, 0, 0)")
    assert "simdgroup 1, lane 5" in fault.detail


def test_write_to_an_input(compiler):
    body = "((device float*)a)[thread_position_in_grid.x] = 1; out[thread_position_in_grid.x] = 1;"
    assert faulty(body).detail.startswith("write to read-only a")


def test_a_matrix_behind_its_array(compiler):
    body = """
    simdgroup_matrix<float, 8, 8> m[2];
    for (int i = 0; i <= 2; ++i) {
      m[i].thread_elements()[0] = 1;
    }
    out[thread_position_in_grid.x] = m[0].thread_elements()[0];
    """
    fault = faulty(body)
    assert fault.kind == "bounds" and fault.detail.startswith("a matrix behind its array, line")


def test_overrun_of_a_threadgroup_array_through_a_pointer(compiler):
    body = """
    threadgroup float x[64];
    threadgroup float* p = x;
    p[thread_index_in_threadgroup + 1] = 1;
    out[thread_index_in_threadgroup] = 1;
    """
    assert faulty(body).kind in ("bounds", "undefined")


def test_threads_that_store_components_of_a_shared_vector(compiler):
    body = """
    threadgroup float4 shared[16];
    uint i = thread_index_in_threadgroup;
    STORE
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = shared[15 - i / 4][3 - i % 4];
    """
    whole = "if (i < 16) { shared[i] = *(const device vec<float, 4>*)(a + 4 * i); }"
    (out,) = prover()(call(body.replace("STORE", whole), A64, {"out": floats(64)}, threads=64))
    np.testing.assert_array_equal(np.array(out), np.arange(64)[::-1])
    fault = faulty(body.replace("STORE", "shared[i / 4][i % 4] = a[i];"))
    assert fault.kind == "compile" and "read-only" in fault.detail


def test_uninitialised_memory(compiler):
    assert (
        faulty("if (thread_position_in_grid.x != 9) { out[thread_position_in_grid.x] = 1; }").kind
        == "disagree"
    )
    assert faulty("float x; out[thread_position_in_grid.x] = x * a[1];").kind == "disagree"
    shared = "uint i = thread_index_in_threadgroup; threadgroup float x[64]; out[i] = x[i];"
    assert faulty(shared).kind == "disagree"


def test_two_threadgroups_write_one_element(compiler):
    body = "out[thread_index_in_threadgroup] = a[0] + threadgroup_position_in_grid.y;"
    assert faulty(body, groups=(1, 2, 1)).kind == "disagree"


@pytest.mark.parametrize(
    "expression",
    ["int(a[0]) << 40", "2147483647 + int(a[1])", "int(a[1] * 1e30f)", "table[int(a[4])]",
     "int((*(const device vec<float, 4>*)(a + 1))[0])"],
)  # fmt: skip
def test_undefined_behaviour(expression, compiler):
    body = (
        f"int table[3] = {{1, 2, 3}}; out[thread_position_in_grid.x] = table[0] + ({expression});"
    )
    assert faulty(body).kind == "undefined"


@pytest.mark.parametrize("value", ["-INFINITY", "NAN", "a[0] / a[0]"])
def test_fast_maths_takes_finite_values_only(value, compiler):
    fault = faulty(f"out[thread_position_in_grid.x] = fast::exp2({value});")
    assert fault.kind == "fast-math"
    precise = call(
        f"out[thread_position_in_grid.x] = precise::exp2({value});",
        A64,
        {"out": floats(64)},
        threads=64,
    )
    prover()(precise)


def test_a_program_finds_its_compiler_s_libraries(monkeypatch, tmp_path):
    program = tmp_path / "kernel"
    program.write_text('#!/bin/sh\necho "$LD_LIBRARY_PATH" >&2; exit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/gcc-13/lib64")
    captured = CapturedKernel("name", "", (1, 1, 1), (1, 1, 1))
    with pytest.raises(KernelFault, match="/opt/gcc-13/lib64"):
        run_kernel(program, captured, [], [], PROOF_SCHEDULES, cpu_seconds=1.0)


def test_a_warning_of_the_library_loader_is_no_fault(tmp_path):
    program = tmp_path / "kernel"
    program.write_text("#!/bin/sh\necho no version information >&2; printf ab\n")
    program.chmod(0o755)
    captured = CapturedKernel("name", "", (1, 1, 1), (1, 1, 1))
    outputs = run_kernel(program, captured, [None], [2], PROOF_SCHEDULES, cpu_seconds=1.0)
    assert outputs == [[b"ab"]]


def test_a_cache_folder_from_which_no_program_runs_is_reported_in_one_line(tmp_path):
    program = tmp_path / "kernel"
    program.touch(mode=0o644)  # as on a file system mounted noexec
    captured = CapturedKernel("name", "", (1, 1, 1), (1, 1, 1))
    with pytest.raises(
        EmulatorUnavailable, match=r"^device=emulated: .* set LABKIT_CACHE"
    ) as error:
        run_kernel(program, captured, [], [], PROOF_SCHEDULES, cpu_seconds=1.0)
    assert "\n" not in str(error.value)


def test_launch_limits(compiler):
    assert faulty("threadgroup float x[8193]; x[0] = 1; out[0] = x[0];").kind == "launch"
    assert faulty("out[0] = a[0];", threads=1025).kind == "launch"


def test_endless_loop(compiler):
    body = "volatile int go = 1; while (go) {} out[0] = a[0];"
    with pytest.raises(KernelFault, match="timeout"):
        prover(0.2)(call(body, A64, {"out": floats(64)}))


def test_text_that_does_not_compile(compiler):
    assert faulty("out[0] = undeclared;").kind == "compile"
    assert faulty("threadgroup float x; out[0] = 1;").kind == "compile"
    assert faulty("threadgroup float x[2], y[2]; out[0] = 1;").kind == "compile"


# ------------------------------------------------------------------ schedules and cache


def test_every_schedule_alone_gives_the_same_bits(compiler):
    body = SHARE.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_threadgroup);")
    kernel_call = call(body, A64, {"out": floats(64)}, threads=64)
    outs = [
        Emulator((s,))(kernel_call)[0]
        for s in (*PROOF_SCHEDULES, Schedule(FiberOrder.random, 0, 99))
    ]
    assert all(mx.array_equal(out, outs[0]) for out in outs)


def test_memory_is_guarded_with_pages_of_64_kib(compiler, tmp_path):
    source = """
    #include <stdio.h>
    #include <unistd.h>
    #define sysconf(name) 65536
    #include "memory.h"
    void emulator::fault(const char* kind, const char*, ...) { puts(kind), _exit(1); }
    int main() {
      emulator::Region region("a", 100, emulator::Place::end, 0);
      region.check();
      printf("%zu", emulator::kPage);
    }
    """
    (tmp_path / "guard.cpp").write_text(source)
    cpp_compilation._compile(
        compiler, ["-std=c++17", str(tmp_path / "guard.cpp")], tmp_path / "guard"
    )
    done = subprocess.run([tmp_path / "guard"], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 65536


def test_hosts_of_two_architectures_share_no_program(monkeypatch):
    gxx = cpp_compilation.Compiler("/usr/bin/g++", "g++ (Debian 12.2.0-14) 12.2.0")
    digests = set()
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr(cpp_compilation.platform, "machine", lambda machine=machine: machine)
        digests.add(cpp_compilation._digest(gxx, cpp_compilation.FLAGS, "source"))
    assert len(digests) == 2


def test_program_is_compiled_once(compiler, no_cache):
    kernel_call = call(
        "out[thread_position_in_grid.x] = a[0];", A64, {"out": floats(64)}, threads=64
    )
    prover()(kernel_call)
    before = {p: p.stat().st_mtime_ns for p in (no_cache / "emulator").iterdir()}
    assert len(before) == 2  # the runtime and the kernel
    other = replace(kernel_call, inputs=(("a", mx.array(A64["a"]) + 1),))
    (out,) = prover()(other)
    assert out[0].item() == 1
    assert {p: p.stat().st_mtime_ns for p in (no_cache / "emulator").iterdir()} == before
