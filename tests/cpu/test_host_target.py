"""The dot product of ARM's CPUs, of which LLVM says nothing on Linux."""

import ctypes
import platform
import sys
from types import SimpleNamespace

import numba
import pytest

from labkit.cpu.matmul.int8_dot import form_of
from labkit.cpu.runtime import host_target

NEON = (1 << 1) | (1 << 4)  # HWCAP_ASIMD, HWCAP_AES


@pytest.mark.parametrize(
    ("system", "words", "chosen", "form"),
    [
        ("linux", NEON | 1 << 20, None, "sdot"),
        ("linux", NEON, None, "generic"),
        ("linux", NEON | 1 << 20, "+neon", "generic"),  # NUMBA_CPU_FEATURES of a user
        ("darwin", NEON | 1 << 20, None, "generic"),
    ],
)
def test_the_dot_product_is_used_where_linux_reports_it(monkeypatch, system, words, chosen, form):
    def read(kind):
        return words if kind == 16 else 0

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(getauxval=read))
    monkeypatch.setattr(host_target, "get_host_cpu_features", lambda: "+neon,-sve")
    monkeypatch.setattr(numba.config, "CPU_FEATURES", chosen)
    host_target.install()
    host_target.install()
    features = numba.config.CPU_FEATURES or "+neon,-sve"
    assert form_of(4, "aarch64-unknown-linux-gnu", "generic", features).name == form
    assert features.count("+neon") == 1


def test_another_cpu_keeps_what_llvm_found(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(numba.config, "CPU_FEATURES", None)
    host_target.install()
    assert numba.config.CPU_FEATURES is None
    triple, cpu, _ = host_target.host_target()
    assert triple and cpu
