"""The doctor's screen: 80 columns, a fact per line, then what to fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from labkit.doctor.budget_table import Ceiling
from labkit.doctor.machine_caveats import Facts, Weakness
from labkit.experiment.doctor_noise import PilotNoise
from labkit.machine.memory_profile import GIB, MemoryProfile
from labkit.machine.wired_advice import WiredAdvice

if TYPE_CHECKING:
    from rich.console import Console

Line = tuple[str, str]
PRESSURE = {1: "normal", 2: "warning", 4: "critical"}  # macOS's levels


def machine_lines(facts: Facts) -> list[Line]:
    """Describe this machine: the chip, memory, MLX, BLAS, power and noise."""
    here, measured = facts.environment, facts.measured
    mlx, bandwidth = measured["mlx"], measured["bandwidth"]
    where = "Metal" if mlx["metal"] else "the CPU; no Metal: its kernels run in the emulator"
    read = mlx.get("gpu_gb_s", bandwidth["gb_s"])
    return [
        ("chip", _chip(here)),
        ("memory", _memory(here, facts.machine)),
        ("MLX", f"{mlx['version']} on {where}"),
        ("matmul", f"{_blas(mlx)}: {mlx['gflop_s']:,.0f} GFLOP/s (float32, {mlx['side']} wide)"),
        ("bandwidth", f"{read:.1f} GB/s (reading {bandwidth['mib']} MiB)"),
        ("wired", wired_text(facts.machine)),
        ("power", _power(facts)),
        ("noise", _noise(facts)),
    ]


def simulated_lines(machine: MemoryProfile) -> list[Line]:
    """Describe a simulated Mac."""
    return [
        ("memory", f"{_gib(machine.total)} RAM, {_gib(machine.available)} of it free (assumed)"),
        ("Metal", f"recommends a working set of {_gib(machine.working_set)}"),
        ("wired", wired_text(machine)),
    ]


def wired_text(machine: MemoryProfile) -> str:
    """Say what the wired limit and the collector are."""
    wired = machine.wired
    if wired is None:
        return "not a Mac; --machine sim_m1_pro_32gb shows one's limits and advice"
    limit = "not told" if wired.limit_mb is None else f"{wired.limit_mb} MiB"
    limit = "0 (the default)" if wired.limit_mb == 0 else limit
    words = {True: "on", False: "off", None: "not told"}
    return (
        f"iogpu.wired_limit_mb {limit}, collector {words[wired.collector]}, "
        f"dynamic low-water mark {words[wired.dynamic_lwm]}"
    )


def show(
    console: Console,
    title: str,
    lines: Iterable[Line],
    ceilings: Iterable[Ceiling],
    machine: MemoryProfile,
) -> None:
    """Print the facts and the policies' ceilings."""
    from rich.markup import escape

    table = _grid()
    for name, text in lines:
        table.add_row(f"[dim]{name}[/dim]", escape(text))
    shares = [_ceiling(one, machine) for one in ceilings]
    table.add_row("[dim]budgets[/dim]", escape("\n".join(shares)))
    console.print(f"[bold]labkit doctor[/bold]: {escape(title)}")
    console.print(table)


def show_sights(console: Console, sights: Mapping[str, PilotNoise | str]) -> None:
    """Print the smallest effect that a minute sees, for each kind of workload and each way."""
    from rich.table import Table
    from rich.text import Text

    known = {kind: one for kind, one in sights.items() if isinstance(one, PilotNoise)}
    if known:
        console.print("[bold]The smallest effect that one minute sees here[/bold] (estimated)")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("", justify="right")
        table.add_column("in turns", justify="right")
        table.add_column("in processes", justify="right")
        for kind, sight in known.items():
            table.add_row(kind, _effect(sight.interleaved_pct), _effect(sight.separate_pct))
        console.print(table)
        console.print(sights_text(known))
    for kind, reason in sights.items():
        if isinstance(reason, str):
            console.print(Text(f"What one minute sees of {kind} is not known: {reason}"))


def sights_text(known: Mapping[str, PilotNoise]) -> str:
    """Say in a sentence what the effects mean and what they are estimated from."""
    made = " and ".join(
        f"{sight.processes} short processes of {kind} ({sight.interleaved_s:.1f} s each)"
        for kind, sight in known.items()
    )
    return (
        "A difference this large gets its verdict in 80 of 100 one-minute studies of one row. "
        f"From {made}, two equal arms in each: right to about a factor of two."
    )


def _effect(pct: float | None) -> str:
    return "too few blocks" if pct is None else f"{pct:.1f} %"


def show_weaknesses(console: Console, weaknesses: list[Weakness]) -> None:
    """Print what would weaken a study, each with its fix."""
    if not weaknesses:
        console.print("[bold]Nothing found that would weaken a study here.[/bold]")
        return
    console.print("[bold]What would weaken a study here[/bold], and how to fix it")
    _numbered(console, ((one.what, [f"> {one.fix}"]) for one in weaknesses))


def show_advice(console: Console, advice: tuple[WiredAdvice, ...]) -> None:
    """Print the commands that lift macOS's limits, and what each risks."""
    if not advice:
        return
    console.print("[bold]Wired memory[/bold] (labkit changes no setting; run these yourself)")
    _numbered(console, ((one.finding, [f"> {one.command}", f"risk: {one.risk}"]) for one in advice))


def _numbered(console: Console, items: Iterable[tuple[str, list[str]]]) -> None:
    from rich.text import Text

    table = _grid()
    for number, (finding, remedies) in enumerate(items, start=1):
        text = Text(finding)
        for remedy in remedies:
            text.append(f"\n{remedy}", style="green")
        table.add_row(f"{number}.", text)
    console.print(table)


def _grid() -> Any:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _ceiling(one: Ceiling, machine: MemoryProfile) -> str:
    if one.bytes is None:
        return f"{one.policy}: refused; {one.advice}"
    percent = 100 * one.bytes / machine.total
    return f"{one.policy}: {_gib(one.bytes)} before weights ({percent:.0f} % of RAM)"


def _chip(here: Mapping[str, Any]) -> str:
    usable, cores = here.get("cores_usable"), here.get("cores")
    count = f"{cores} cores" if usable == cores else f"{usable} of {cores} cores usable"
    system = f"{here.get('os', '')} {here.get('os_release', '')}".strip()
    model = here.get("cpu_model", here.get("architecture", "unknown"))
    gpu = f"; {here['accelerator']}" if here.get("accelerator") else ""
    return f"{model}; {count}{gpu}; {system}"


def _memory(here: Mapping[str, Any], machine: MemoryProfile) -> str:
    parts = [f"{_gib(machine.total)} RAM, {_gib(machine.available)} free"]
    if (here.get("cgroup") or {}).get("memory_bytes"):
        parts[0] += " (the container's limit)"
    if machine.metal:
        parts.append(f"Metal recommends {_gib(machine.working_set)}")
    used = (here.get("swap") or {}).get("used_bytes", 0)
    parts.append(f"{_gib(used)} swapped" if used else "nothing swapped")
    pressure = (here.get("pressure") or {}).get("memory") or {}
    if "avg10" in pressure:
        parts.append(f"pressure {pressure['avg10']:g} %")
    if "level" in pressure:
        parts.append(f"pressure {PRESSURE.get(pressure['level'], pressure['level'])}")
    if here.get("compressed_bytes"):
        parts.append(f"{_gib(here['compressed_bytes'])} compressed")
    return "; ".join(parts)


def _blas(mlx: Mapping[str, Any]) -> str:
    if mlx["metal"]:
        return "Metal"
    library = mlx["blas"]
    version = " ".join(filter(None, (library["version"], library["core"])))
    threads = f", {library['threads']} threads" if library["threads"] else ""
    return f"{version or library['name']}{threads}"


def _power(facts: Facts) -> str:
    here = facts.environment
    battery = {True: "on battery", False: "on mains", None: "no battery"}[facts.on_battery]
    parts = [battery, f"governor {facts.settings.get('governor', 'not told')}"]
    for name in ("boost", "no_turbo"):
        if name in facts.settings:
            parts.append(f"{name} {facts.settings[name]}")
    thermal = here.get("thermal")
    if isinstance(thermal, Mapping):
        thermal = f"throttled {thermal['throttled']} times since boot"
    parts.append(f"thermal: {thermal or 'not told'}")
    if here.get("mhz"):
        parts.append(f"{here['mhz']:,.0f} MHz")
    return "; ".join(parts)


def _noise(facts: Facts) -> str:
    noise = facts.measured["noise"]
    return (
        f"matmul {noise['matmul_cv_pct']:.1f} %, reading {noise['bandwidth_cv_pct']:.1f} % "
        f"(variation of {noise['windows']} equal windows in {noise['seconds']:.0f} s)"
        f"; other programs took {facts.measured['others_pct']:.0f} % of the cores"
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
