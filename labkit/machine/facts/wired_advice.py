"""Advice on macOS's wired memory limit and wired collector for a given memory budget.

GPU buffers are wired, that is pinned in RAM. ``iogpu.wired_limit_mb`` limits them. Under memory
pressure the wired collector evicts them, which shows as a silent slowdown or a crash. labkit
changes no setting: the commands are for the user to run.

Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026), The
Wired Collector.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.machine.facts.memory_capacity import GIB, MIB, MemoryProfile

COLLECTOR_OFF = "sudo sysctl iogpu.disable_wired_collector=1"
COLLECTOR_ON = "sudo sysctl iogpu.disable_wired_collector=0"
RESET_NOTE = "a reboot resets it"


@dataclass(frozen=True)
class WiredAdvice:
    """A finding, the command by which the user could change the setting, and the command's risk."""

    finding: str
    command: str
    risk: str


def advise(machine: MemoryProfile, needed_bytes: int) -> tuple[WiredAdvice, ...]:
    """Return advice for an engine that needs ``needed_bytes`` for weights, activations and KV.

    The result is empty outside macOS, if the settings need no change, and if the engine needs more
    than the machine has.
    """
    if machine.wired is None or needed_bytes > machine.total:
        return ()
    advice = []
    if needed_bytes > machine.working_set:
        advice.append(_limit_advice(machine, needed_bytes))
    if machine.wired.collector:
        advice.append(
            WiredAdvice(
                "the wired collector is on: under memory pressure macOS evicts GPU buffers",
                COLLECTOR_OFF,
                f"with little memory left the Mac may freeze instead of slowing down; {RESET_NOTE}",
            )
        )
    return tuple(advice)


def collector_mismatch(machine: MemoryProfile, enabled: bool) -> str | None:
    """Return why the wired collector is not known to be in the demanded state, or None if it is.

    ``enabled``: the demanded state. On macOS the message includes the command that sets it. On
    other systems there is always a message, because only macOS has a collector.
    """
    state = "enabled" if enabled else "disabled"
    if machine.wired is None:
        return f"{machine.name} has no wired collector that could be {state}: only macOS has one"
    if machine.wired.collector is enabled:
        return None
    actual = {True: "enabled", False: "disabled", None: "not reported by this macOS"}
    command = COLLECTOR_ON if enabled else COLLECTOR_OFF
    risk = "" if enabled else "; with little memory left the Mac may freeze"
    return (
        f"the wired collector of {machine.name} is {actual[machine.wired.collector]}; "
        f"run: {command} ({RESET_NOTE}{risk})"
    )


def _limit_advice(machine: MemoryProfile, needed_bytes: int) -> WiredAdvice:
    wired = machine.wired
    set_by = "the default" if wired is None or not wired.limit_mb else f"{wired.limit_mb} MiB"
    rest = machine.total - needed_bytes
    return WiredAdvice(
        f"{_format_gib(needed_bytes)} are needed, but Metal wires only "
        f"{_format_gib(machine.working_set)} "
        f"(wired limit: {set_by})",
        f"sudo sysctl iogpu.wired_limit_mb={-(-needed_bytes // MIB)}",
        f"macOS and all programs get the other {_format_gib(rest)}; {RESET_NOTE}",
    )


def _format_gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
