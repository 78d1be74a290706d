"""The CPU's kernels on an emulated ARM (``make test-aarch64``): NEON's forms, and the fallbacks.

QEMU shows wrong instructions and wrong bits. It shows neither speed nor, on x86, what a weaker
order of memory accesses does to the threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from emulated_python import PYTHON, ROOT, command, environment

pytestmark = [
    pytest.mark.aarch64,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs python tests/aarch64/emulated_python.py"),
]
FORMS = {"max": "sdot", "cortex-a57": "generic"}  # the second has no dot product
# The number of results of each; the last bits of norms differ between CPUs.
DIGESTS = {
    "gemm": 8, "attention": 2, "elementwise": 7, "low_precision": 7, "int8": 8, "quantised_kv": 4,
}  # fmt: skip
FILES = (
    "tests/cpu/test_int8_matmul.py",
    "tests/cpu/test_quantized_matmul.py",
    "tests/cpu/test_packed_linear.py",
    "tests/cpu/test_elementwise_kernels.py",
    "tests/cpu/test_top_two_logits.py",
    "tests/cpu/test_graph_op_kernels.py",
    "tests/engine/attention/test_attention_half_precision.py",
    "tests/engine/attention/test_attention_quantized_kv.py",
)
SECONDS = 3600  # of a busy machine


def emulate(cpu, *words, **variables):
    return subprocess.run(
        [*command(cpu), *words],
        cwd=ROOT, env=environment() | variables, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip


def lines(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("cpu", FORMS)
def test_the_dot_product_is_used_where_the_cpu_has_it(cpu):
    code = "from labkit.cpu.matmul.int8_dot import *; print(*(host_form(b).name for b in BITS))"
    assert lines(emulate(cpu, "-c", code)) == [" ".join(2 * [FORMS[cpu]])]


def test_its_instruction_is_executed():
    """A CPU without the instruction ends the process, so it is what the other CPU runs."""
    code = "from labkit.cpu.matmul import int8_matmul_self_test as t; t.verify('float16', 4, 32)"
    done = emulate("cortex-a57", "-c", code, NUMBA_CPU_FEATURES="+dotprod")
    assert done.returncode and "Illegal instruction" in done.stderr
    assert not lines(emulate("max", "-c", code))


@pytest.mark.parametrize("cpu", FORMS)
@pytest.mark.parametrize("kernels", DIGESTS)
def test_results_have_the_bits_of_this_machine(cpu, kernels):
    words = "tests/cpu/kernel_digests.py", kernels
    own = {"PYTHONPATH": str(ROOT)}
    here = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT, env=os.environ | own, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    lanes, *emulated = lines(emulate(cpu, *words))
    expected = here.communicate(timeout=SECONDS)[0].splitlines()[1:]
    assert lanes == "4" and len(emulated) == DIGESTS[kernels] and emulated == expected


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("cpu", FORMS)
def test_the_kernels_tests_pass(cpu, file):
    options = ("-p", "no:cacheprovider", "-n", "0", "-m", "not slow and not metal", file)
    assert "passed" in lines(emulate(cpu, "-m", "pytest", *options))[-1]
