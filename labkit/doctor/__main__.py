"""The doctor's command line: 0 whenever it could measure, 1 where not, 2 for a mistake."""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit import config
from labkit.cli_errors import OneLineParser, error_line
from labkit.doctor import detectable_effect, terminal_screen
from labkit.doctor.budget_table import ceilings
from labkit.doctor.machine_caveats import Facts, find
from labkit.doctor.measurement_process import CannotMeasure, measure
from labkit.experiment import StudyError, doctor_noise
from labkit.experiment.doctor_noise import PilotNoise
from labkit.experiment.file_locks import timing_lock
from labkit.machine import fingerprint, memory_profile, wired_advice, worker_environment
from labkit.machine.best_effort import collect
from labkit.machine.operating_system import operating_system

if TYPE_CHECKING:
    from rich.console import Console

PROG = "python -m labkit.doctor"
WIDTH = 80
PATIENCE_S = 60.0  # for a study that is timing on this host
TAKES = "measuring for about 40 s, and the first time as long again to compile"

Measured = tuple[dict[str, Any], dict[str, PilotNoise | str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parser().parse_args(argv)
    console = _console(sys.stdout)
    try:
        if options.machine is not None:
            _show_simulated(console, options.machine, options.fraction)
        else:
            _show_this(console, options.fraction)
    except (CannotMeasure, StudyError) as error:
        print(error_line(PROG, error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog=PROG, description="What is this machine, and what would weaken a study?"
    )
    parser.add_argument(
        "--machine",
        choices=config.MACHINES,
        metavar="NAME",
        help="show the limits, budgets and advice of a simulated Mac (nothing is measured): "
        + ", ".join(config.MACHINES),
    )
    parser.add_argument(
        "--fraction",
        type=_fraction,
        metavar="F",
        help=f"engine.budget.fraction to judge (default {config.DEFAULT_FRACTION})",
    )
    return parser


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed are above 0, at most 1")
    return value


def _console(stream: Any) -> Console:
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    return Console(file=stream, highlight=False, width=min(WIDTH, console.width))


def _show_simulated(console: Console, name: str, fraction: float | None) -> None:
    machine = memory_profile.simulated_mac(name)
    lines = terminal_screen.simulated_lines(machine)
    terminal_screen.show(
        console, f"{name} (simulated)", lines, ceilings(machine, fraction), machine
    )
    terminal_screen.show_advice(console, wired_advice.advise(machine, _asked(machine, fraction)))


def _show_this(console: Console, fraction: float | None) -> None:
    facts = _examine()
    seen = {kind: one for kind, one in facts.sights.items() if isinstance(one, PilotNoise)}
    doctor_noise.save(facts.environment, facts.measured["noise"], seen)
    machine = facts.machine
    lines = terminal_screen.machine_lines(facts)
    terminal_screen.show(console, machine.name, lines, ceilings(machine, fraction), machine)
    terminal_screen.show_sights(console, facts.sights)
    terminal_screen.show_weaknesses(console, find(facts))
    terminal_screen.show_advice(console, wired_advice.advise(machine, _asked(machine, fraction)))


def _asked(machine: memory_profile.MemoryProfile, fraction: float | None) -> int:
    return int(machine.total * (config.DEFAULT_FRACTION if fraction is None else fraction))


def _examine() -> Facts:
    """Read the machine, and measure it with a line that says what goes on."""
    import psutil

    machine = memory_profile.this_machine()
    measured, sights = _measure_with_progress()
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return Facts(
        environment=fingerprint.take(),
        machine=machine,
        measured=measured,
        sights=sights,
        on_battery=None if battery is None else not battery.power_plugged,
    )


def _measure_with_progress() -> Measured:
    """Measure with the host's timing lock held, so that no study is disturbed."""
    console = _console(sys.stderr)
    if not console.is_terminal:
        print(f"labkit doctor: {TAKES}", file=sys.stderr, flush=True)
        return _measure_locked(lambda _step: None, lambda line: print(line, file=sys.stderr))
    with console.status(TAKES) as status:
        update: Callable[[str], None] = status.update
        return _measure_locked(update, update)


def _measure_locked(on_step: Callable[[str], None], tell: Callable[[str], None]) -> Measured:
    waited: list[str] = []
    start = time.monotonic()

    def on_wait(line: str) -> None:
        waited.append(line)
        tell(line)

    def give_up() -> None:
        if waited and time.monotonic() - start > PATIENCE_S:
            said = waited[-1].removeprefix("waiting: ")
            raise CannotMeasure(f"{said}; measuring would disturb it, try again later")

    with timing_lock("labkit doctor", on_wait=on_wait, check=give_up):
        before, start = _cpu_s(), time.monotonic()
        measured = measure(on_step)
        shares = _shares(before, _cpu_s(), time.monotonic() - start)
        sights = detectable_effect.look(on_step)
    return {**measured, **shares}, sights


def _cpu_s() -> dict[str, float]:
    """Return CPU seconds so far: all cores', our own, and what the hypervisor gave to others."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(one.ru_utime + one.ru_stime for one in used)
    here = operating_system()
    return collect({"busy": here.busy_s, "own": lambda: own, "stolen": here.stolen_s})


def _shares(
    before: Mapping[str, float], after: Mapping[str, float], wall_s: float
) -> dict[str, float | None]:
    """Return what other programs and other virtual machines took, percent of the cores."""
    percent = (os.cpu_count() or worker_environment.core_count()) * wall_s / 100
    spent = {name: (after[name] - before[name]) / percent for name in before}
    others = max(0.0, spent["busy"] - spent["own"])
    return {"others_pct": others, "steal_pct": spent.get("stolen")}


if __name__ == "__main__":
    raise SystemExit(main())
