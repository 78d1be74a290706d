"""A GPU's cores, simdgroup width, threads and memory of a threadgroup (Metal, CUDA, emulated)."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from labkit.machine.facts import macos
from labkit.machine.facts.best_effort import command_output
from labkit.metal.kernel_call import Executor, KernelCall

# The kernels' own sizes: simdgroups of 32 lanes, 256 threads in the decode kernel.
NEEDED_LANES, NEEDED_THREADS = 32, 256
_CUDA_ATTRIBUTES = {"cores": 16, "lanes": 10, "threads": 1, "group_bytes": 8}  # CUdevice_attribute


@dataclass(frozen=True)
class GpuProperties:
    """Sizes of a GPU, in Metal's words. ``text`` shows them on one line."""

    cores: int | None  # CUDA: multiprocessors (None: the system does not report them)
    lanes: int  # threads of a simdgroup (CUDA: of a warp)
    threads: int  # at most, per threadgroup
    group_bytes: int  # memory of a threadgroup

    def __post_init__(self) -> None:
        """Refuse a GPU on which the kernels' layout of threads does not hold."""
        if self.lanes != NEEDED_LANES or self.threads < NEEDED_THREADS:
            raise ValueError(
                f"this GPU has simdgroups of {self.lanes} lanes and threadgroups of at most "
                f"{self.threads} threads; the kernels need {NEEDED_LANES} and {NEEDED_THREADS}"
            )

    @property
    def text(self) -> str:
        """The sizes, for a person to read."""
        return (
            f"{self.cores or 'unknown'} GPU cores, threadgroups of up to {self.threads:,} threads "
            f"and {self.group_bytes // 1024} KiB, simdgroups of {self.lanes}"
        )


# The emulator's simdgroups and threadgroups, and the cores of the article's M1 Pro.
EMULATED = GpuProperties(14, 32, 1024, 32768)


def gpu_properties(device: str, executor: Executor) -> GpuProperties:
    """Return the properties of ``metal``, ``cuda`` or ``emulated``.

    ``executor`` measures the lanes of a simdgroup on Metal, which only a kernel can tell. Raises
    ``ValueError`` if the kernels cannot run on the GPU.
    """
    if device == "emulated":
        return EMULATED
    return _cuda() if device == "cuda" else _metal(executor)


def _gpu_cores(ioreg: str) -> int | None:
    """Parse the number of GPU cores from ``ioreg -rc AGXAccelerator``; None if it has none."""
    match = re.search(r'"gpu-core-count"\s*=\s*(\d+)', ioreg)
    return int(match[1]) if match else None


def _lanes(executor: Executor) -> int:
    """Return the lanes of a simdgroup, as a kernel sees them."""
    call = KernelCall(
        name="labkit_lanes",
        header="",
        body="const uint last = metal::simd_max(thread_index_in_simdgroup);"
        "if (thread_index_in_threadgroup == 0) lanes[0] = last + 1;",
        inputs=(("unused", mx.zeros(1)),),
        outputs=(("lanes", (1,), mx.uint32),),
        template=(),
        groups=(1, 1, 1),
        threads=32,
    )
    count: Any = executor(call)[0].item()
    return int(count)


@cache
def _metal(executor: Executor) -> GpuProperties:
    try:
        cores = _gpu_cores(command_output("ioreg", "-r", "-d", "1", "-c", "AGXAccelerator"))
    except OSError:
        cores = None
    threads, group_bytes = macos.threadgroup_limits()
    return GpuProperties(cores, _lanes(executor), threads, group_bytes)


@cache
def _cuda() -> GpuProperties:
    driver = ctypes.CDLL("libcuda.so.1")
    device, values = ctypes.c_int(), {}
    driver.cuInit(0)
    if driver.cuDeviceGet(ctypes.byref(device), 0):
        raise ValueError("device=cuda: the driver has no device 0")
    for name, attribute in _CUDA_ATTRIBUTES.items():
        number = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        values[name] = number.value
    return GpuProperties(**values)
