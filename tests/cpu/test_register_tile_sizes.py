"""Kernels for other CPUs: register tiles fit, intrinsics compile, results have the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.cpu.simd import register_tile_sizes
from labkit.cpu.simd.register_tile_sizes import AVX2, AVX512, LANES, NEON, SSE, registers_of
from labkit.machine import cache_entries

TEST_DIR = Path(__file__).parent
ALL = {"AVX512": AVX512, "AVX2": AVX2, "NEON": NEON, "SSE": SSE}


@pytest.mark.parametrize(
    ("triple", "features", "expected"),
    [
        ("x86_64-unknown-linux-gnu", "+avx2,+fma,+f16c,+avx512f", AVX512),
        ("x86_64-unknown-linux-gnu", "+avx2,+fma,+f16c,-avx512f", AVX2),
        ("x86_64-apple-darwin", "+avx,+sse4.2,-avx2,+f16c", SSE),
        ("aarch64-unknown-linux-gnu", "+neon,+fullfp16", NEON),
        ("arm64-apple-darwin24", "", NEON),
    ],
)
def test_registers_of_a_target(triple, features, expected):
    assert registers_of(triple, features) == expected


@pytest.mark.parametrize("cpu", ALL.values(), ids=ALL)
@pytest.mark.parametrize(("rows", "vectors"), [(8, 2), (4, 4)])
def test_a_tile_fits_the_registers(cpu, rows, vectors):
    height, width = cpu.tile(rows, vectors)
    in_registers = width * LANES // cpu.lanes
    assert 1 <= height <= rows and 1 <= width <= vectors
    assert height * in_registers + in_registers + 1 <= cpu.count
    # The tile has the maximum height, or one row more would not fit.
    assert height == rows or (height + 2) * in_registers + 1 > cpu.count


def compiled_facts(*target):
    done = subprocess.run(
        [sys.executable, TEST_DIR / "compile_intrinsics.py", *target],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "triple", "cpu"),
    [
        pytest.param("AVX512", "x86_64-unknown-linux-gnu", "x86-64-v4", marks=pytest.mark.slow),
        ("AVX2", "x86_64-unknown-linux-gnu", "haswell"),
        pytest.param("NEON", "aarch64-unknown-linux-gnu", "neoverse-n1", marks=pytest.mark.slow),
        ("NEON", "arm64-apple-macosx", "apple-m1"),
    ],
)
def test_every_intrinsic_compiles_for_another_cpu(name, triple, cpu):
    """Nothing is run: multiply-adds must be instructions, and sums must stay in registers."""
    facts_of = compiled_facts(name, triple, cpu)
    assert len(facts_of) > 30
    lookup, registers_per_vector = facts_of.pop("lookup_bytes"), LANES // ALL[name].lanes
    bytes_in = {"AVX512": "vpshufb", "AVX2": "vpshufb", "NEON": "tbl"}[name]
    assert not lookup["calls"] and lookup["mnemonics"].count(bytes_in) >= registers_per_vector
    for intrinsic, facts in facts_of.items():
        if not intrinsic.startswith("call_body"):
            assert not [call for call in facts["calls"] if "mem" not in call], intrinsic
    for intrinsic in ("gemm_tile", "scores_tile", "add_weighted_tile_wide", "dot_run:float32"):
        assert facts_of[intrinsic]["fma"] >= 4 * registers_per_vector, intrinsic
        assert facts_of[intrinsic]["on_stack"] == 0, intrinsic


@pytest.mark.parametrize(
    ("name", "triple", "cpu", "features", "instructions"),
    [
        pytest.param(
            *("AVX512", "x86_64-unknown-linux-gnu", "znver4", "+avx512vnni"),
            ("vpdpbusd", "vpdpbusd"),
            marks=pytest.mark.slow,
        ),
        ("AVX2", "x86_64-unknown-linux-gnu", "alderlake", "+avxvnni", ("vpdpbusd", "vpdpbusd")),
        (
            "AVX512",
            "x86_64-unknown-linux-gnu",
            "x86-64-v4",
            "+avx512bw",
            ("vpmaddubsw", "vpmaddwd"),
        ),
        ("AVX2", "x86_64-unknown-linux-gnu", "haswell", "+avx2", ("vpmaddubsw", "vpmaddwd")),
        ("NEON", "aarch64-unknown-linux-gnu", "neoverse-n1", "+dotprod", ("sdot", "sdot")),
        ("NEON", "arm64-apple-macosx", "apple-m1", "", ("sdot", "sdot")),
    ],
)
def test_integer_products_compile_for_another_cpu(name, triple, cpu, features, instructions):
    """Nothing is run. A dot product is one instruction, for each operand and register of a tile."""
    facts = compiled_facts(name, triple, cpu, features)
    registers, tile_rows = LANES // ALL[name].lanes, 8 if ALL[name].lanes == LANES else 4
    vectors = 2 if ALL[name].lanes == LANES else 1
    for bits, instruction in zip((4, 8), instructions, strict=True):
        operands = 32 // (2 if instruction == "vpmaddwd" else 4)
        for intrinsic, rows, columns in (("multiply_row", 1, 2), ("multiply_tile", tile_rows, 1)):
            counted = facts[f"{intrinsic}:{bits}"]
            expected = operands * rows * columns * vectors * registers
            assert counted[instruction] == expected, (intrinsic, bits)
            assert not counted.keys() & {"call", "callq", "bl", "blr"}


OTHERS = {
    "AVX2": ("haswell", "+avx,+avx2,+fma,+f16c,+sse4.2", 8),
    "SSE": ("nehalem", "+sse4.2", 4),
}


@pytest.mark.skipif(
    register_tile_sizes.HOST_REGISTERS not in (AVX512, AVX2), reason="needs an x86 CPU with AVX2"
)
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param("AVX2", ["gemm"], marks=pytest.mark.slow),
        pytest.param("AVX2", ["gemm", "attention"], marks=pytest.mark.slow),
        pytest.param("AVX2", ["elementwise", "low_precision"], marks=pytest.mark.slow),
        pytest.param("SSE", ["int8", "quantised_kv"], marks=pytest.mark.slow),
        pytest.param("SSE", ["gemm", "attention"], marks=pytest.mark.slow),
        pytest.param("SSE", ["low_precision"], marks=pytest.mark.slow),
    ],
)
def test_narrower_registers_give_the_same_bits(name, kernels):
    cpu, features, lanes = OTHERS[name]

    def run(**variables):
        environment = (
            os.environ | {"NUMBA_CACHE_DIR": str(cache_entries.numba_cache_dir())} | variables
        )
        done = subprocess.run(
            [sys.executable, TEST_DIR / "kernel_digests.py", *kernels],
            env=environment, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    narrow = run(NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features)
    host = run()
    assert (narrow[0], host[0]) == (str(lanes), str(register_tile_sizes.HOST_REGISTERS.lanes))
    results = {"gemm": 8, "attention": 2, "elementwise": 7, "low_precision": 7}
    results |= {"int8": 8, "quantised_kv": 4}
    assert len(host) == 1 + sum(results[name] for name in kernels) and narrow[1:] == host[1:]
