"""What would weaken a study on this machine, and how to fix each.

``Facts`` is what was read and measured; every rule is a function from it to at most one
``Weakness``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.experiment.doctor_noise import Sight
from labkit.machine.memory import GIB, Machine

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
        What ``labkit.doctor.measure`` gave, and meanwhile the shares of the cores that
        other programs (``others_pct``) and other virtual machines (``steal_pct``, None
        where it is not told) took, in percent.
    sights
        What a minute sees, by kind of workload; a text says why it is not known.
    on_battery
        None where there is no battery to ask.
    """

    environment: Mapping[str, Any]
    machine: Machine
    measured: Mapping[str, Any]
    sights: Mapping[str, Sight | str] = field(default_factory=dict)
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
    """Apply every rule, the gravest first."""
    found = (rule(facts) for rule in RULES)
    return [weakness for weakness in found if weakness is not None]


def _noise(facts: Facts) -> Weakness | None:
    noise = facts.measured["noise"]
    worst = max(noise["matmul_cv_pct"], noise["bandwidth_cv_pct"])
    if worst <= NOISY_PCT:
        return None
    return Weakness(
        f"equal work varies by {worst:.1f} %, more than the {NOISY_PCT:g} % margin",
        "fix the causes below, or design=strict (8 blocks)",
    )


def _others(facts: Facts) -> Weakness | None:
    share = facts.measured["others_pct"]
    if share <= OTHERS_PCT:
        return None
    return Weakness(
        f"other programs took {share:.0f} % of the cores meanwhile",
        "end them (top shows which), or wait",
    )


def _steal(facts: Facts) -> Weakness | None:
    share = facts.measured["steal_pct"]
    if share is None or share <= STEAL_PCT:
        return None
    return Weakness(
        f"other virtual machines took {share:.0f} % of the cores",
        "use a dedicated host, or more blocks: design=strict",
    )


def _no_metal(facts: Facts) -> Weakness | None:
    if facts.measured["mlx"]["metal"]:
        return None
    return Weakness(
        "no Metal here: timings are of CPU kernels and say nothing about a Mac's GPU",
        "run the same command on a Mac to publish Metal numbers",
    )


def _blas(facts: Facts) -> Weakness | None:
    reason = facts.measured["mlx"]["blas_reason"]
    if reason is None:
        return None
    return Weakness("MLX multiplies with the reference BLAS, 30 to 60 times slower", str(reason))


def _battery(facts: Facts) -> Weakness | None:
    if not facts.on_battery:
        return None
    return Weakness("the machine runs on its battery", "plug it in")


def _low_power(facts: Facts) -> Weakness | None:
    if not facts.environment.get("low_power_mode"):
        return None
    return Weakness("low power mode is on", "System Settings, Battery: Low Power Mode: Never")


def _thermal(facts: Facts) -> Weakness | None:
    thermal = facts.environment.get("thermal")
    if isinstance(thermal, str) and thermal != "nominal":
        return Weakness(f"the thermal state is {thermal}", "let it cool down for some minutes")
    return None


def _governor(facts: Facts) -> Weakness | None:
    governor = facts.settings.get("governor")
    if governor in (None, "performance"):
        return None
    return Weakness(
        f"the clock's governor is {governor}", "sudo cpupower frequency-set -g performance"
    )


def _boost(facts: Facts) -> Weakness | None:
    if facts.settings.get("boost") == "1":
        command = "echo 0 | sudo tee /sys/devices/system/cpu/cpufreq/boost"
    elif facts.settings.get("no_turbo") == "0":
        command = "echo 1 | sudo tee /sys/devices/system/cpu/intel_pstate/no_turbo"
    else:
        return None
    return Weakness("turbo is on: the clock follows temperature and load", command)


def _hidden_clock(facts: Facts) -> Weakness | None:
    if facts.environment.get("os") != "Linux" or "governor" in facts.settings:
        return None
    return Weakness(
        "the clock's governor cannot be read (a virtual machine or container)",
        "nothing to set: the A/A control shows what it does",
    )


def _quota(facts: Facts) -> Weakness | None:
    cores = (facts.environment.get("cgroup") or {}).get("cores")
    if cores is None:
        return None
    return Weakness(
        f"a CPU quota of {cores:g} cores stops the process when it is spent",
        "ask for whole cores (a cpuset) instead of a quota",
    )


def _numa(facts: Facts) -> Weakness | None:
    nodes = str(facts.settings.get("numa_nodes", "0"))
    if nodes.strip() == "0":
        return None
    return Weakness(
        f"memory is spread over NUMA nodes {nodes}",
        "numactl --cpunodebind=0 --membind=0 python -m labkit ...",
    )


def _swap(facts: Facts) -> Weakness | None:
    used = (facts.environment.get("swap") or {}).get("used_bytes", 0)
    if used < GIB // 4:
        return None
    return Weakness(f"{used / GIB:.1f} GiB are swapped out", "close programs, or reboot")


def _memory(facts: Facts) -> Weakness | None:
    free = facts.machine.available
    if free >= LITTLE:
        return None
    return Weakness(f"only {free / GIB:.1f} GiB of memory are free", "close programs")


RULES: tuple[Callable[[Facts], Weakness | None], ...] = (
    _noise,
    _others,
    _steal,
    _memory,
    _swap,
    _blas,
    _battery,
    _low_power,
    _thermal,
    _governor,
    _boost,
    _quota,
    _numa,
    _hidden_clock,
    _no_metal,
)
