"""The doctor's command line.

Exit codes: 0 if the machine was measured, 1 if it could not be, 2 for a mistake in the command.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import config
from labkit.cli.program_base import Program
from labkit.doctor import engine_profile, noise_pilots, terminal_screen
from labkit.doctor.machine_caveats import MachineFacts, find_caveats
from labkit.doctor.measurement_launcher import MeasurementError, measure
from labkit.doctor.memory_by_budget_policy import budget_ceilings
from labkit.engine.user_classes import UserClassError
from labkit.experiment import StudyError
from labkit.experiment.schedule import doctor_noise_cache
from labkit.experiment.schedule.doctor_noise_cache import PilotNoise
from labkit.experiment.schedule.timing_lock import timing_lock
from labkit.machine import worker_environment
from labkit.machine.cache_entries import CacheError
from labkit.machine.facts import machine_snapshot, memory_capacity, wired_advice
from labkit.machine.facts.best_effort import collect
from labkit.machine.facts.operating_system_protocol import operating_system
from labkit.machine.facts.simulated_macs import simulated_mac

if TYPE_CHECKING:
    from rich.console import Console

PROG = "python -m labkit.doctor"
MAX_WIDTH = 80
LOCK_TIMEOUT_S = 60.0  # maximum wait for a study that is timing on this host
PROGRESS_TEXT = (
    "measuring: about 40 s on an idle machine, 80 s the first time (it also compiles), and up to "
    "several minutes beside other work"
)

Measurements = tuple[dict[str, Any], dict[str, PilotNoise | str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""

    def body(options: argparse.Namespace) -> None:
        console = _console(sys.stdout)
        if options.engine is not None:
            if options.machine is not None or options.fraction is not None:
                parser.error("--machine and --fraction are not for --engine")
            _show_engine(console, options.engine, options.overrides)
        elif options.overrides:
            parser.error(f"{options.overrides[0]}: overrides need --engine NAME")
        elif options.machine is not None:
            _show_simulated(console, options.machine, options.fraction)
        else:
            _show_this_machine(console, options.fraction)

    parser = _parser()
    refused = (config.ConfigError, CacheError, UserClassError)
    return parser.run(argv, body, refused=refused, failed=(MeasurementError, StudyError))


def _parser() -> Program:
    parser = Program(
        prog=PROG, description="Describe this machine and the caveats for studies on it."
    )
    parser.add_argument(
        "--machine",
        choices=config.SIMULATED_MAC_NAMES,
        metavar="NAME",
        help="show limits, budgets and advice for a simulated Mac, without measuring: "
        + ", ".join(config.SIMULATED_MAC_NAMES),
    )
    parser.add_argument(
        "--fraction",
        type=_fraction,
        metavar="F",
        help=f"engine.budget.fraction to show budgets and advice for "
        f"(default {config.DEFAULT_FRACTION})",
    )
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help="in a minute, measure where the time of an engine's steps goes, and what overlap, "
        "buckets, less padding or faster attention can bring at most",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="with --engine: model=, workload=, engine.scheduler.max_num_seqs=, ...",
    )
    return parser


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and at most 1")
    return value


def _console(stream: Any) -> Console:
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    return Console(file=stream, highlight=False, width=min(MAX_WIDTH, console.width))


def _show_simulated(console: Console, name: str, fraction: float | None) -> None:
    machine = simulated_mac(name)
    lines, ceilings = terminal_screen.simulated_lines(machine), budget_ceilings(machine, fraction)
    terminal_screen.show(console, f"{name} (simulated)", lines, ceilings, machine)
    _show_advice(console, machine, fraction)


def _show_this_machine(console: Console, fraction: float | None) -> None:
    facts = _measure_facts()
    estimates = {k: pilot for k, pilot in facts.pilots.items() if isinstance(pilot, PilotNoise)}
    doctor_noise_cache.save(facts.environment, facts.measured["noise"], estimates)
    machine = facts.machine
    lines = terminal_screen.machine_lines(facts)
    terminal_screen.show(console, machine.name, lines, budget_ceilings(machine, fraction), machine)
    terminal_screen.show_pilots(console, facts.pilots)
    terminal_screen.show_caveats(console, find_caveats(facts))
    _show_advice(console, machine, fraction)


def _show_engine(console: Console, engine: str, overrides: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, _lock(console.print):
        records = engine_profile.measure([f"engine={engine}", *overrides], Path(folder, "cell"))
    title = " ".join([f"engine={engine}", *overrides])
    terminal_screen.show_profile(console, title, engine_profile.profile(records))


def _show_advice(
    console: Console, machine: memory_capacity.MemoryProfile, fraction: float | None
) -> None:
    needed = int(machine.total * (config.DEFAULT_FRACTION if fraction is None else fraction))
    terminal_screen.show_advice(console, wired_advice.advise(machine, needed))


def _measure_facts() -> MachineFacts:
    """Return the facts about this machine, read and measured, and show the progress."""
    import psutil

    machine = memory_capacity.this_machine()
    measured, pilots = _measure_with_progress()
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return MachineFacts(
        environment=machine_snapshot.take(),
        machine=machine,
        measured=measured,
        pilots=pilots,
        on_battery=None if battery is None else not battery.power_plugged,
    )


def _measure_with_progress() -> Measurements:
    """Measure under the host's timing lock, so that no study is disturbed, and show progress."""
    console = _console(sys.stderr)
    if not console.is_terminal:
        print(f"labkit doctor: {PROGRESS_TEXT}", file=sys.stderr, flush=True)
        return _measure_locked(lambda _step: None, lambda line: print(line, file=sys.stderr))
    with console.status(PROGRESS_TEXT) as status:
        update: Callable[[str], None] = status.update
        return _measure_locked(update, update)


def _measure_locked(
    on_step: Callable[[str], None], report_wait: Callable[[str], None]
) -> Measurements:
    with _lock(report_wait):
        before, start = _cpu_s(), time.monotonic()
        measured = measure(on_step)
        shares = _shares(before, _cpu_s(), time.monotonic() - start)
        pilots = noise_pilots.run_pilots(on_step)
    return {**measured, **shares}, pilots


def _lock(report_wait: Callable[[str], None]) -> AbstractContextManager[None]:
    """Return the host's timing lock, which is waited for at most ``LOCK_TIMEOUT_S``."""
    waits: list[str] = []
    start = time.monotonic()

    def on_wait(line: str) -> None:
        waits.append(line)
        report_wait(line)

    def give_up() -> None:
        if waits and time.monotonic() - start > LOCK_TIMEOUT_S:
            holder = waits[-1].removeprefix("waiting: ")
            raise MeasurementError(f"{holder}; measuring would disturb it, try again later")

    return timing_lock("labkit doctor", on_wait=on_wait, check=give_up)


def _cpu_s() -> dict[str, float]:
    """Return the CPU seconds used since boot, summed over cores; missing if they cannot be read.

    ``busy``: of all processes. ``own``: of this process and its children. ``stolen``: taken by the
    hypervisor for other virtual machines.
    """
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in used)
    this_os = operating_system()
    return collect({"busy": this_os.busy_s, "own": lambda: own, "stolen": this_os.stolen_s})


def _shares(
    before: Mapping[str, float], after: Mapping[str, float], wall_s: float
) -> dict[str, float | None]:
    """Return the percentages of the cores that other programs and virtual machines took.

    ``before`` and ``after`` are results of :func:`_cpu_s`, ``wall_s`` seconds apart.
    """
    percent = (os.cpu_count() or worker_environment.core_count()) * wall_s / 100
    spent = {name: (after[name] - before[name]) / percent for name in before.keys() & after.keys()}
    others = max(0.0, spent["busy"] - spent["own"]) if "busy" in spent else None
    return {"others_pct": others, "steal_pct": spent.get("stolen")}


if __name__ == "__main__":
    raise SystemExit(main())
