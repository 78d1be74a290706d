"""What would weaken a study on this machine, and how to fix each.

``Facts`` is what was read and measured; every rule yields the weaknesses that it sees in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.experiment.doctor_noise import PilotNoise
from labkit.machine.memory_profile import GIB, MemoryProfile

NOISY_PCT = 2.0  # the default margin: noise above it hides what is not trivial
OTHERS_PCT = 5.0
STEAL_PCT = 1.0
LITTLE = 2 * GIB


@dataclass(frozen=True)
class Facts:
    """What was read and measured.

    Parameters
    ----------
    environment
        The fingerprint (labkit.machine.fingerprint).
    machine
        The memory of this machine.
    measured
        What ``labkit.doctor.measurement_worker`` gave, and meanwhile the shares of the cores that
        other programs (``others_pct``) and other virtual machines (``steal_pct``, None
        where it is not told) took, in percent.
    sights
        What a minute sees, by kind of workload; a text says why it is not known.
    on_battery
        None where there is no battery to ask.
    """

    environment: Mapping[str, Any]
    machine: MemoryProfile
    measured: Mapping[str, Any]
    sights: Mapping[str, PilotNoise | str] = field(default_factory=dict)
    on_battery: bool | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The kernel's settings that change timings."""
        return dict(self.environment.get("settings") or {})


@dataclass(frozen=True)
class Weakness:
    """What is wrong, and what to do about it."""

    what: str
    fix: str


def find(facts: Facts) -> list[Weakness]:
    """Return what there is, the gravest first."""
    rules = (_noise, _memory, _blas, _power, _clock, _container, _metal)
    return [weakness for rule in rules for weakness in rule(facts)]


def _noise(facts: Facts) -> Iterator[Weakness]:
    """Judge what was measured."""
    noise = facts.measured["noise"]
    worst = max(noise["matmul_cv_pct"], noise["bandwidth_cv_pct"])
    if worst > NOISY_PCT:
        yield Weakness(
            f"equal work varies by {worst:.1f} %, more than the {NOISY_PCT:g} % margin",
            "fix the causes below, or design=strict (8 blocks)",
        )
    others, steal = facts.measured["others_pct"], facts.measured["steal_pct"]
    if others > OTHERS_PCT:
        yield Weakness(
            f"other programs took {others:.0f} % of the cores meanwhile",
            "end them (top shows which), or wait",
        )
    if steal is not None and steal > STEAL_PCT:
        yield Weakness(
            f"other virtual machines took {steal:.0f} % of the cores",
            "use a dedicated host, or more blocks: design=strict",
        )


def _memory(facts: Facts) -> Iterator[Weakness]:
    free = facts.machine.available
    if free < LITTLE:
        yield Weakness(f"only {free / GIB:.1f} GiB of memory are free", "close programs")
    used = (facts.environment.get("swap") or {}).get("used_bytes", 0)
    if used >= GIB // 4:
        yield Weakness(f"{used / GIB:.1f} GiB are swapped out", "close programs, or reboot")


def _blas(facts: Facts) -> Iterator[Weakness]:
    reason = facts.measured["mlx"]["blas_reason"]
    if reason is not None:
        what = "MLX multiplies with the reference BLAS, 30 to 60 times slower"
        yield Weakness(what, str(reason))


def _power(facts: Facts) -> Iterator[Weakness]:
    if facts.on_battery:
        yield Weakness("the machine runs on its battery", "plug it in")
    if facts.environment.get("low_power_mode"):
        yield Weakness("low power mode is on", "System Settings, Battery: Low Power Mode: Never")
    thermal = facts.environment.get("thermal")
    if isinstance(thermal, str) and thermal != "nominal":
        yield Weakness(f"the thermal state is {thermal}", "let it cool down for some minutes")


def _clock(facts: Facts) -> Iterator[Weakness]:
    governor = facts.settings.get("governor")
    if governor not in (None, "performance"):
        yield Weakness(
            f"the clock's governor is {governor}", "sudo cpupower frequency-set -g performance"
        )
    turbo = "turbo is on: the clock follows temperature and load"
    if facts.settings.get("boost") == "1":
        yield Weakness(turbo, "echo 0 | sudo tee /sys/devices/system/cpu/cpufreq/boost")
    elif facts.settings.get("no_turbo") == "0":
        yield Weakness(turbo, "echo 1 | sudo tee /sys/devices/system/cpu/intel_pstate/no_turbo")


def _container(facts: Facts) -> Iterator[Weakness]:
    """Judge what a container or a virtual machine is given, and hides."""
    cores = (facts.environment.get("cgroup") or {}).get("cores")
    if cores is not None:
        yield Weakness(
            f"a CPU quota of {cores:g} cores stops the process when it is spent",
            "ask for whole cores (a cpuset) instead of a quota",
        )
    nodes = str(facts.settings.get("numa_nodes", "0")).strip()
    if nodes != "0":
        yield Weakness(
            f"memory is spread over NUMA nodes {nodes}",
            "numactl --cpunodebind=0 --membind=0 python -m labkit ...",
        )
    if facts.environment.get("os") == "Linux" and "governor" not in facts.settings:
        yield Weakness(
            "the clock's governor cannot be read (a virtual machine or container)",
            "nothing to set: the A/A control shows what it does",
        )


def _metal(facts: Facts) -> Iterator[Weakness]:
    if not facts.measured["mlx"]["metal"]:
        yield Weakness(
            "no Metal here: timings are of CPU kernels and say nothing about a Mac's GPU",
            "run the same command on a Mac to publish Metal numbers",
        )
