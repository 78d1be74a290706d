"""The doctor's terminal output, 80 columns wide: one fact per line, then caveats with fixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.analysis.model.step_part_times import PART_NAMES, PartShare
from labkit.config import count_text
from labkit.config.package_extras import install_hint
from labkit.doctor.engine_profile import HALF_PCT, EngineProfile
from labkit.doctor.machine_caveats import MachineCaveat, MachineFacts
from labkit.doctor.memory_by_budget_policy import BudgetCeiling
from labkit.experiment.schedule.doctor_noise_cache import PilotNoise
from labkit.machine.facts.memory_capacity import GIB, MemoryProfile
from labkit.machine.facts.wired_advice import WiredAdvice

if TYPE_CHECKING:
    from rich.console import Console

LabelledLine = tuple[str, str]
MACOS_PRESSURE_LEVELS = {1: "normal", 2: "warning", 4: "critical"}


def machine_lines(facts: MachineFacts) -> list[LabelledLine]:
    """Return lines that describe this machine: chip, memory, MLX, BLAS, power and noise."""
    environment, measured = facts.environment, facts.measured
    mlx, bandwidth = measured["mlx"], measured["bandwidth"]
    read_gb_s = (mlx or {}).get("gpu_gb_s", bandwidth["gb_s"])
    return [
        ("chip", _chip(environment)),
        ("memory", _memory(environment, facts.machine)),
        *_mlx(mlx),
        ("bandwidth", f"{read_gb_s:.1f} GB/s (reading {bandwidth['mib']} MiB)"),
        *_scaling(measured["scaling"]),
        ("wired", _wired_text(facts.machine)),
        ("power", _power(facts)),
        ("noise", _noise(facts)),
    ]


def _scaling(scaling: Sequence[Mapping[str, float]]) -> list[LabelledLine]:
    """Return a line on how many times as fast more threads are, or none on a single core."""
    one, *more = scaling
    texts = [
        f"{each['threads']} threads: products {one['matmul_us'] / each['matmul_us']:.1f}, "
        f"reading {each['gb_s'] / one['gb_s']:.1f}"
        for each in more
    ]
    return [("scaling", "; ".join(texts) + " times one thread")] if more else []


def simulated_lines(machine: MemoryProfile) -> list[LabelledLine]:
    """Return lines that describe the memory limits of a simulated Mac."""
    return [
        ("memory", f"{_gib(machine.total)} RAM, {_gib(machine.available)} of it free (assumed)"),
        ("Metal", f"recommends a working set of {_gib(machine.working_set)}"),
        ("wired", _wired_text(machine)),
    ]


def _wired_text(machine: MemoryProfile) -> str:
    """Return a line on macOS's limit of wired memory and its wired collector."""
    wired = machine.wired
    if wired is None:
        return "not a Mac; --machine sim_m1_pro_32gb shows the limits and advice of one"
    limit = "unknown" if wired.limit_mb is None else f"{wired.limit_mb} MiB"
    limit = "0 (the default)" if wired.limit_mb == 0 else limit
    states = {True: "on", False: "off", None: "unknown"}
    return (
        f"iogpu.wired_limit_mb {limit}, collector {states[wired.collector]}, "
        f"dynamic low-water mark {states[wired.dynamic_lwm]}"
    )


def show(
    console: Console,
    title: str,
    lines: Iterable[LabelledLine],
    ceilings: Iterable[BudgetCeiling],
    machine: MemoryProfile,
) -> None:
    """Print the facts and the ceiling of every budget policy."""
    budgets = "\n".join(_ceiling_text(ceiling, machine) for ceiling in ceilings)
    _show_lines(console, title, [*lines, ("budgets", budgets)])


def show_profile(console: Console, title: str, profile: EngineProfile) -> None:
    """Print where an engine's time goes, its regime, and the largest gains."""
    _show_lines(console, title, _profile_lines(profile))


def _show_lines(console: Console, title: str, lines: Iterable[LabelledLine]) -> None:
    from rich.markup import escape

    table = _grid()
    for name, text in lines:
        table.add_row(f"[dim]{name}[/dim]", escape(text))
    console.print(f"[bold]labkit doctor[/bold]: {escape(title)}")
    console.print(table)


def show_pilots(console: Console, pilots: Mapping[str, PilotNoise | str]) -> None:
    """Print the smallest effect a one-minute study detects, by kind of workload and isolation."""
    from rich.table import Table
    from rich.text import Text

    known = {kind: pilot for kind, pilot in pilots.items() if isinstance(pilot, PilotNoise)}
    if known:
        console.print("[bold]The smallest effect one minute detects here[/bold] (estimated)")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("", justify="right")
        table.add_column("interleaved", justify="right")
        table.add_column("separate processes", justify="right")
        for kind, estimate in known.items():
            table.add_row(kind, _effect(estimate.interleaved_pct), _effect(estimate.separate_pct))
        console.print(table)
        console.print(pilots_text(known))
    for kind, pilot in pilots.items():
        if isinstance(pilot, str):
            console.print(Text(f"The smallest effect for {kind} is unknown: {pilot}"))


def pilots_text(estimates: Mapping[str, PilotNoise]) -> str:
    """Return a text that explains the smallest effects and names the pilot runs behind them."""
    sources = " and ".join(
        f"{estimate.processes} short processes of {kind} ({estimate.interleaved_s:.1f} s each)"
        for kind, estimate in estimates.items()
    )
    return (
        "A one-minute study of one row detects a difference this large with 80 % power. "
        f"Estimated from {sources}, two equal arms in each; accurate to about a factor of two."
    )


def _effect(pct: float | None) -> str:
    return "too few blocks" if pct is None else f"{pct:.1f} %"


def show_caveats(console: Console, caveats: list[MachineCaveat]) -> None:
    """Print the caveats, each with its fix."""
    if not caveats:
        console.print("[bold]No caveats: nothing here would weaken a study.[/bold]")
        return
    console.print("[bold]Caveats: what would weaken a study here[/bold], and how to fix it")
    _numbered(console, ((caveat.text, [f"> {caveat.fix}"]) for caveat in caveats))


def show_advice(console: Console, advice: tuple[WiredAdvice, ...]) -> None:
    """Print the commands that raise macOS's limits, and the risk of each."""
    if not advice:
        return
    console.print("[bold]Wired memory[/bold] (labkit changes no settings; run these yourself)")
    items = ((each.finding, [f"> {each.command}", f"risk: {each.risk}"]) for each in advice)
    _numbered(console, items)


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


def _ceiling_text(ceiling: BudgetCeiling, machine: MemoryProfile) -> str:
    if ceiling.bytes is None:
        return f"{ceiling.policy}: refused; {ceiling.advice}"
    percent = 100 * ceiling.bytes / machine.total
    return f"{ceiling.policy}: {_gib(ceiling.bytes)} before weights ({percent:.0f} % of RAM)"


def _chip(environment: Mapping[str, Any]) -> str:
    usable, cores = environment.get("cores_usable"), environment.get("cores")
    core_text = f"{cores} cores" if usable == cores else f"{usable} of {cores} cores usable"
    system = f"{environment.get('os', '')} {environment.get('os_release', '')}".strip()
    model = environment.get("cpu_model", environment.get("architecture", "unknown"))
    gpu = f"; {environment['accelerator']}" if environment.get("accelerator") else ""
    return f"{model}; {core_text}{gpu}; {system}"


def _memory(environment: Mapping[str, Any], machine: MemoryProfile) -> str:
    parts = [f"{_gib(machine.total)} RAM, {_gib(machine.available)} free"]
    if (environment.get("cgroup") or {}).get("memory_bytes"):
        parts[0] += " (the container's limit)"
    if machine.metal:
        parts.append(f"Metal recommends {_gib(machine.working_set)}")
    swapped = (environment.get("swap") or {}).get("used_bytes", 0)
    parts.append(f"{_gib(swapped)} swapped" if swapped else "nothing swapped")
    pressure = (environment.get("pressure") or {}).get("memory") or {}
    if "avg10" in pressure:
        parts.append(f"pressure {pressure['avg10']:g} %")
    if "level" in pressure:
        parts.append(f"pressure {MACOS_PRESSURE_LEVELS.get(pressure['level'], pressure['level'])}")
    if environment.get("compressed_bytes"):
        parts.append(f"{_gib(environment['compressed_bytes'])} compressed")
    return "; ".join(parts)


def _mlx(mlx: Mapping[str, Any] | None) -> list[LabelledLine]:
    if mlx is None:
        return [("MLX", f"not installed; {install_hint('mlx')}")]
    device = _gpu(mlx) or "the CPU; no Metal: its kernels run in the emulator"
    return [
        ("MLX", f"{mlx['version']} on {device}"),
        *([("GPU", mlx["gpu"])] if "gpu" in mlx else []),
        ("matmul", f"{_blas(mlx)}: {mlx['gflop_s']:,.0f} GFLOP/s (float32, {mlx['side']} wide)"),
    ]


def _gpu(mlx: Mapping[str, Any]) -> str:
    return "Metal" if mlx["metal"] else "CUDA" if mlx["cuda"] else ""


def _blas(mlx: Mapping[str, Any]) -> str:
    if _gpu(mlx):
        return _gpu(mlx)
    library = mlx["blas"]
    version = " ".join(filter(None, (library["version"], library["core"])))
    threads = f", {count_text(library['threads'], 'thread')}" if library["threads"] else ""
    return f"{version or library['name']}{threads}"


def _power(facts: MachineFacts) -> str:
    environment = facts.environment
    battery = {True: "on battery", False: "on mains", None: "no battery"}[facts.on_battery]
    parts = [battery, f"governor {facts.settings.get('governor', 'unknown')}"]
    for name in ("boost", "no_turbo"):
        if name in facts.settings:
            parts.append(f"{name} {facts.settings[name]}")
    thermal = environment.get("thermal")
    if isinstance(thermal, Mapping):
        thermal = f"throttled {count_text(thermal['throttled'], 'time')} since boot"
    parts.append(f"thermal: {thermal or 'unknown'}")
    if environment.get("mhz"):
        parts.append(f"{environment['mhz']:,.0f} MHz")
    return "; ".join(parts)


def _noise(facts: MachineFacts) -> str:
    noise, others = facts.measured["noise"], facts.measured["others_pct"]
    return (
        f"matmul {noise['matmul_cv_pct']:.1f} %, reading {noise['bandwidth_cv_pct']:.1f} % "
        f"(variation over {noise['windows']} equal windows in {noise['seconds']:.0f} s)"
        + ("" if others is None else f"; other programs took {others:.0f} % of the cores")
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def _profile_lines(profile: EngineProfile) -> list[LabelledLine]:
    """Return the lines of an engine's profile: label and text."""
    bounds = {
        "host": "host-bound: most of a step is the host's work",
        "model": "not host-bound: most of a step is the model's work",
        "neither": "neither the host nor the model clearly takes half of a step",
    }
    bound, source = bounds[profile.bound], f"{profile.processes} short processes"
    if profile.processes == 1:  # a busy machine has time for no more
        bound = "not decided: one process gives no interval; try again on an idle machine"
        source = "1 short process"
    shares = {name: _range_text(share) for name, share in profile.shares.items()}
    regime = "prefill" if profile.shares["prefill"].pct > HALF_PCT else "decode"
    shapes = "no decode steps"
    if profile.reused_pct is not None and profile.repeated_pct is not None:
        shapes = (
            f"{profile.reused_pct:.0f} % of decode steps have a shape seen before, "
            f"{profile.repeated_pct:.0f} % that of the step before"
        )
    return [
        ("bound", f"{bound} (host {shares.get('host', '0 %')}, "
                  f"model {shares.get('model', '0 %')})"),
        *((PART_NAMES[name], text) for name, text in shares.items()
          if name in PART_NAMES and name != "model"),
        ("regime", f"{regime}: {shares['prefill']} of the time in steps with prompt tokens, "
                   f"{profile.tokens_per_step:.1f} tokens per step"),
        ("shapes", shapes),
        ("padding", f"{profile.padded_pct:.1f} % of rows"),
        *((f"{name} at most", f"+{_range_text(gain)} tok/s")
          for name, gain in profile.gains.items()),
        ("from", f"{source}; 95 % intervals over processes"),
    ]  # fmt: skip


def _range_text(share: PartShare) -> str:
    if share.low_pct is None or share.high_pct is None:
        return f"{share.pct:.1f} %"
    return f"{share.pct:.1f} % ({share.low_pct:.1f} to {share.high_pct:.1f})"
