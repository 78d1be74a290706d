"""Caveats of this machine: facts that would weaken a study here, each with its fix.

``MachineFacts`` holds everything that the doctor read and measured. Each rule checks these facts
and yields caveats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.experiment.schedule.doctor_noise_cache import PilotNoise
from labkit.machine.facts.memory_capacity import GIB, MemoryProfile

MAX_NOISE_PCT = 2.0  # the default margin; more noise would hide effects larger than the margin
MAX_OTHERS_PCT = 5.0
MAX_STEAL_PCT = 1.0
MIN_THREADS_GAIN = 1.1  # of the products or of reading, by the last threads that are added
MIN_FREE_BYTES = 2 * GIB
NOTABLE_SWAP_BYTES = GIB // 4


@dataclass(frozen=True)
class MachineFacts:
    """Everything the doctor read and measured."""

    environment: Mapping[str, Any]  # the machine's fingerprint
    machine: MemoryProfile
    # The result of labkit.doctor.measurement_worker, and the percentages of the cores that other
    # programs (others_pct) and other virtual machines (steal_pct) took meanwhile; None if unknown.
    measured: Mapping[str, Any]
    # By kind of workload, the pilot's estimate or the reason that there is none.
    pilots: Mapping[str, PilotNoise | str] = field(default_factory=dict)
    on_battery: bool | None = None  # None on a machine without a battery

    @property
    def settings(self) -> Mapping[str, Any]:
        """Kernel settings that change timings, such as the CPU frequency governor."""
        return dict(self.environment.get("settings") or {})


@dataclass(frozen=True)
class MachineCaveat:
    """A fact that would weaken a study, and its fix."""

    text: str
    fix: str


def find_caveats(facts: MachineFacts) -> list[MachineCaveat]:
    """Return all caveats, sorted by severity: the most severe first."""
    rules = (_noise, _scaling, _memory, _blas, _power, _clock, _container, _metal)
    return [caveat for rule in rules for caveat in rule(facts)]


def _noise(facts: MachineFacts) -> Iterator[MachineCaveat]:
    noise = facts.measured["noise"]
    worst = max(noise["matmul_cv_pct"], noise["bandwidth_cv_pct"])
    if worst > MAX_NOISE_PCT:
        yield MachineCaveat(
            f"equal work varies by {worst:.1f} %, more than the {MAX_NOISE_PCT:g} % margin",
            "fix the causes below, or use more blocks: design=strict",
        )
    others, steal = facts.measured["others_pct"], facts.measured["steal_pct"]
    if others is not None and others > MAX_OTHERS_PCT:
        yield MachineCaveat(
            f"other programs took {others:.0f} % of the cores while the doctor measured",
            "stop them (top lists them), or wait",
        )
    if steal is not None and steal > MAX_STEAL_PCT:
        yield MachineCaveat(
            f"other virtual machines took {steal:.0f} % of the cores",
            "use a dedicated host, or more blocks: design=strict",
        )


def _scaling(facts: MachineFacts) -> Iterator[MachineCaveat]:
    if len(facts.measured["scaling"]) < 2:
        return
    fewer, most = facts.measured["scaling"][-2:]
    products, reads = fewer["matmul_us"] / most["matmul_us"], most["gb_s"] / fewer["gb_s"]
    if max(products, reads) < MIN_THREADS_GAIN:
        yield MachineCaveat(
            f"{most['threads']} threads are hardly faster than {fewer['threads']} (products "
            f"{products:.2f} times, reading {reads:.2f}): the others may be slower cores, share "
            "cores with these, or be taken by other programs",
            f"engine.threads={fewer['threads']}, or choose cores: taskset -c LIST (lscpu -e)",
        )


def _memory(facts: MachineFacts) -> Iterator[MachineCaveat]:
    free = facts.machine.available
    if free < MIN_FREE_BYTES:
        yield MachineCaveat(f"only {free / GIB:.1f} GiB of memory are free", "close programs")
    swapped = (facts.environment.get("swap") or {}).get("used_bytes", 0)
    if swapped >= NOTABLE_SWAP_BYTES:
        yield MachineCaveat(f"{swapped / GIB:.1f} GiB are swapped out", "close programs, or reboot")


def _blas(facts: MachineFacts) -> Iterator[MachineCaveat]:
    mlx = facts.measured["mlx"]
    reason = mlx and mlx["blas_reason"]
    if reason:
        text = "MLX uses the reference BLAS: its matrix products are 30 to 60 times slower"
        yield MachineCaveat(text, str(reason))


def _power(facts: MachineFacts) -> Iterator[MachineCaveat]:
    if facts.on_battery:
        yield MachineCaveat("the machine runs on battery", "plug it in")
    if facts.environment.get("low_power_mode"):
        yield MachineCaveat(
            "low power mode is on", "System Settings, Battery: Low Power Mode: Never"
        )
    thermal = facts.environment.get("thermal")
    if isinstance(thermal, str) and thermal != "nominal":
        yield MachineCaveat(f"the thermal state is {thermal}", "let it cool down for a few minutes")


def _clock(facts: MachineFacts) -> Iterator[MachineCaveat]:
    governor = facts.settings.get("governor")
    if governor not in (None, "performance"):
        yield MachineCaveat(
            f"the CPU frequency governor is {governor}",
            "sudo cpupower frequency-set -g performance",
        )
    turbo = "turbo is on: the clock rate depends on temperature and load"
    if facts.settings.get("boost") == "1":
        yield MachineCaveat(turbo, "echo 0 | sudo tee /sys/devices/system/cpu/cpufreq/boost")
    elif facts.settings.get("no_turbo") == "0":
        yield MachineCaveat(
            turbo, "echo 1 | sudo tee /sys/devices/system/cpu/intel_pstate/no_turbo"
        )


def _container(facts: MachineFacts) -> Iterator[MachineCaveat]:
    """Yield caveats about limits and hidden settings of a container or virtual machine."""
    cores = (facts.environment.get("cgroup") or {}).get("cores")
    if cores is not None:
        yield MachineCaveat(
            f"a CPU quota of {cores:g} cores pauses a process that has used it up",
            "assign whole cores (a cpuset) instead of a quota",
        )
    nodes = str(facts.settings.get("numa_nodes", "0")).strip()
    if nodes != "0":
        yield MachineCaveat(
            f"memory is spread over NUMA nodes {nodes}",
            "numactl --cpunodebind=0 --membind=0 python -m labkit ...",
        )
    if facts.environment.get("os") == "Linux" and "governor" not in facts.settings:
        yield MachineCaveat(
            "the CPU frequency governor cannot be read (a virtual machine or container)",
            "nothing can be set; the A/A control shows the noise that it causes",
        )


def _metal(facts: MachineFacts) -> Iterator[MachineCaveat]:
    mlx = facts.measured["mlx"]
    if not (mlx and mlx["metal"]):
        yield MachineCaveat(
            "there is no Metal here: timings of CPU kernels say nothing about a Mac's GPU",
            "run the same command on a Mac to publish Metal numbers",
        )
