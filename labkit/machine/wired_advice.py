"""What macOS's wired limit and wired collector mean for a budget, and how to change them.

GPU buffers are wired: pinned in RAM. ``iogpu.wired_limit_mb`` bounds them; under memory
pressure the wired collector takes them back, which shows as silent slowness or a crash.
Nothing here changes a setting: the commands are for the user to run.

Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026), The
Wired Collector.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.machine.memory_profile import GIB, MIB, MemoryProfile

COLLECTOR_OFF = "sudo sysctl iogpu.disable_wired_collector=1"
COLLECTOR_ON = "sudo sysctl iogpu.disable_wired_collector=0"
RESET_NOTE = "a reboot resets it"


@dataclass(frozen=True)
class WiredAdvice:
    """What is, the command that would change it (for the user to run), what it risks."""

    finding: str
    command: str
    risk: str


def advise(machine: MemoryProfile, asked: int) -> tuple[WiredAdvice, ...]:
    """Say what stands between a machine and ``asked`` bytes of weights, step and pool.

    Empty where there is no wired collector (not a Mac) or nothing is in the way.
    """
    if machine.wired is None:
        return ()
    found = []
    if asked > machine.working_set:
        found.append(_limit_advice(machine, asked))
    if machine.wired.collector:
        found.append(
            WiredAdvice(
                "the wired collector is on: under memory pressure macOS evicts GPU buffers",
                COLLECTOR_OFF,
                f"with little memory left the Mac may freeze instead of slowing down; {RESET_NOTE}",
            )
        )
    return tuple(found)


def collector_mismatch(machine: MemoryProfile, enabled: bool) -> str | None:
    """Say why the wired collector is not as demanded, and the command that makes it so.

    Returns None where it is.
    """
    word = "enabled" if enabled else "disabled"
    if machine.wired is None:
        return f"{machine.name} has no wired collector to be {word}: it is macOS's"
    if machine.wired.collector is enabled:
        return None
    now = {True: "enabled", False: "disabled", None: "not told by this macOS"}
    command = COLLECTOR_ON if enabled else COLLECTOR_OFF
    risk = "" if enabled else "; with little memory left the Mac may freeze"
    return (
        f"the wired collector of {machine.name} is {now[machine.wired.collector]}; run: {command} "
        f"({RESET_NOTE}{risk})"
    )


def _limit_advice(machine: MemoryProfile, asked: int) -> WiredAdvice:
    wired = machine.wired
    set_by = "the default" if wired is None or not wired.limit_mb else f"{wired.limit_mb} MiB"
    left = machine.total - asked
    return WiredAdvice(
        f"{_format_gib(asked)} asked, but Metal wires {_format_gib(machine.working_set)} "
        f"(wired limit: {set_by})",
        f"sudo sysctl iogpu.wired_limit_mb={-(-asked // MIB)}",
        f"macOS and all programs get the other {_format_gib(left)}; {RESET_NOTE}",
    )


def _format_gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
