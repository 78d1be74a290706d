"""Detection rates: how often studies detect a planted delay, and an effect that is not there.

    python benchmarks/sensitivity.py kernels 20 outputs/mine
    python benchmarks/sensitivity.py requests 20 outputs/mine --busy
    python benchmarks/sensitivity.py requests 20 outputs/mine --time 60

Every study has three arms: the baseline, a planted one (slower by 1 % inside the launch for
kernels, by 3 % inside the engine's step for requests) and the control, a copy of the baseline. A
detection is a row of the report in which the planted arm is slower (the interval, which has the
level of the row's last look, excludes 0). A false claim is a row in which the copy differs.
``--busy`` runs a busy process beside the studies. Engines then use one core less
(``engine.threads``), because a step waits for all of its threads, and servers of labkit and their
clients a single one.
``--processes`` sets the number of processes of each study. ``--time 60`` leaves it to labkit, as a
user's study does: ``design.time=60``, a pilot, and looks at which a row stops.

The arms of the kinds ``live-...`` have processes of their own that live at the same time and take
turns (a live set). ``live-kernels`` and ``live-requests`` could share a process; these cannot:

- ``live-overlap``: engines with ``engine.pipeline=overlap``
- ``live-servers``: servers of labkit; the delay is planted into the steps of the server's engine
- ``live-llamacpp``: servers of llama.cpp (xllamacpp); the planted one is stopped for 3 % of a turn
- ``live-revisions``: revisions of labkit: HEAD, and a commit on it whose engine steps are slower

``planted_worker.py`` says where each delay is planted.

``agreement-kernels`` plants 10 % into two kernel cases, ``agreement-requests`` into ``ragged``.
Both measure the delay twice: with both arms interleaved in the same process, and with the given
number of pairs of separate processes. They compare the two results, and resume if interrupted. In
``agreement-beside-...``, the two processes of a pair live at the same time and alternate (a round
of a kernel or a slice of steps each), so that the machine affects both alike.
``agreement-live-...`` measures the delay with every isolation that the arms allow: interleaved in
one process, in live sets, and in separate processes. The number is that of live sets and of pairs
of separate processes, ``--processes`` that of interleaved processes. With ``--first 1``, the
studies have another seed and another name.

``table`` writes the finished studies as ``docs/sensitivity.md`` shows them. ``summary`` prints what
``table`` needs of them, with the value of every run, as JSON that ``table`` reads too:

    python benchmarks/sensitivity.py agreement-kernels 80 outputs/mine
    python benchmarks/sensitivity.py agreement-requests 30 outputs/mine
    python benchmarks/sensitivity.py agreement-beside-kernels 40 outputs/mine
    python benchmarks/sensitivity.py agreement-live-kernels 30 outputs/mine
    python benchmarks/sensitivity.py table outputs/mine
    python benchmarks/sensitivity.py table outputs/reference/sensitivity.zip
    python benchmarks/sensitivity.py summary outputs/mine > summaries.json
    xz summaries.json  # if it is large; `table` reads summaries.json.xz too
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import lzma
import multiprocessing
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.analysis.model.result_row import Comparison
    from labkit.experiment.cell import ReadyCell
    from labkit.experiment.compose.cell_composer import ComposedCell
    from labkit.experiment.launch.run_launcher import ProcessLauncher
    from labkit.experiment.permuted_blocks import Run
    from labkit.records import Record, StudyPath

HERE = Path(__file__).resolve().parent
CHAT = ["workload=chat", "model=tiny"]
REQUESTS = [*CHAT, "workload.num_requests=24"]
LIVE = ["design.isolation=live"]
LIVE_REQUESTS = [*REQUESTS, *LIVE]
# Requests of equal lengths, so that every study takes as long. The outputs of servers may differ,
# because they batch requests as they arrive.
UNIFORM = ["workload=uniform", "model=tiny", "workload.concurrency=1", "workload.warmup=1"]
SERVERS = [*UNIFORM, "engine=openai", "ablation.claims.identity=none"]
# With an engine's thread on each core, the server's other thread and the client would wait.
LABKIT_SERVER = ["engine.server.preset=labkit", "engine.threads=1"]
# The name of the planted arm, and the overrides of the study.
ASKED = {
    "kernels": ("planted_1pct", ["workload=kernel_sensitivity", "design.time=60"]),
    "requests": ("planted_3pct", REQUESTS),
    "live-kernels": ("planted_1pct", ["workload=kernel_sensitivity", *LIVE]),
    "live-requests": ("planted_3pct", LIVE_REQUESTS),
    "live-overlap": ("planted_3pct", [*LIVE_REQUESTS, "engine.pipeline=overlap"]),
    # A server of llama.cpp takes requests that arrive together in a random order, which decides how
    # long it runs with few requests at the end. So servers get one request after the other.
    "live-servers": (
        "planted_3pct",
        [*SERVERS, *LIVE, *LABKIT_SERVER, "workload.prompts.requests=7"],
    ),
    "live-llamacpp": (
        "planted_3pct",
        [
            *SERVERS,
            *LIVE,
            "engine.server.preset=xllamacpp",
            "workload.prompts.requests=6",
            "workload.prompts.input.tokens=256",
            "workload.prompts.output.tokens=48",
        ],
    ),
    "live-revisions": (
        "planted_3pct",
        [*LIVE_REQUESTS, "+ablation.arms.base.environment.revision=HEAD"],
    ),
    "agreement-kernels": ("planted_10pct", ["workload=kernel_sensitivity", "workload.repeats=5"]),
    "agreement-requests": ("planted_10pct", ["workload=ragged", "model=small"]),
    # Both processes of a pair must have equally many turns.
    "agreement-beside-kernels": (
        "planted_10pct",
        ["workload=kernel_sensitivity", "workload.repeats=5"],
    ),
    "agreement-beside-requests": ("planted_10pct", ["workload=ragged", "model=small"]),
    "agreement-live-kernels": ("planted_10pct", ["workload=kernel_sensitivity"]),
    "agreement-live-requests": ("planted_10pct", ["workload=ragged", "model=small"]),
    "agreement-live-video": ("planted_10pct", ["workload=video", "workload.repeats=8"]),
    "agreement-live-servers": (
        "planted_10pct",
        [*SERVERS, *LABKIT_SERVER, "workload.prompts.requests=7"],
    ),
}
# Pairs of processes one after the other, and pairs that live at the same time.
AGREEMENTS = (
    ("agreement-requests", "agreement-kernels"),
    ("agreement-beside-requests", "agreement-beside-kernels"),
)
# The isolations whose effects are compared, and what ends the name of their studies.
ISOLATIONS = ("in_process", "live", "process")
# Number of processes that fit into a minute, or of live sets that fit into two minutes: alone, and
# beside a busy process.
PROCESSES = {
    "kernels": (15, 9),
    "requests": (8, 8),
    "live-kernels": (12, 8),
    "live-requests": (7, 7),
    "live-overlap": (7, 7),
    "live-servers": (7, 6),
    "live-llamacpp": (8, 6),
    "live-revisions": (8, 6),
}
# Packages that a kind needs and labkit does not: the package, and the extra that installs it.
NEEDED = {"live-llamacpp": ("xllamacpp", "llamacpp")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("kind", choices=[*ASKED, "table", "summary"])
    parser.add_argument("studies", type=int, nargs="?", default=20)
    parser.add_argument("out", type=Path)
    parser.add_argument("--busy", action="store_true", help="beside one busy process")
    parser.add_argument("--first", type=int, default=0, help="number of the first study")
    design = parser.add_mutually_exclusive_group()
    design.add_argument("--processes", type=int, help="processes or live sets of each study")
    design.add_argument("--time", type=int, metavar="SECONDS", help="design.time of each study")
    options = parser.parse_args()
    if options.time and options.kind.startswith("agreement"):
        parser.error("--time: the studies of an agreement have fixed numbers of processes")
    if options.kind in ("table", "summary"):
        from labkit.records import RecordError, open_study

        try:
            out = options.out if is_summary(options.out) else open_study(options.out)
            studies = summaries(out)
            if options.kind == "summary":
                print(json.dumps(studies))
                return 0
            print(table(studies))
            if any(map(is_of_isolation, studies)):
                print(f"\n{isolations_agreed(studies)}")
            for kinds in [kinds for kinds in AGREEMENTS if (out / kinds[0]).is_dir()]:
                print(f"\n{agreed(out, kinds)}")
        except (RecordError, OSError, ValueError, EOFError, lzma.LZMAError) as error:
            sys.exit(str(error))
        return 0
    if options.kind.startswith("agreement-live"):
        in_process = PROCESSES["kernels" if options.kind.endswith("kernels") else "requests"]
        shared = options.processes or in_process[0]
        studies = live_agreement(options.kind, options.out, options.studies, shared, options.first)
        print(isolations_agreed(studies))
        return 0
    if options.kind.startswith("agreement"):
        print(agreement(options.kind, options.out / options.kind, options.studies))
        return 0
    package, extra = NEEDED.get(options.kind, (None, None))
    if package is not None and importlib.util.find_spec(package) is None:
        sys.exit(
            f"{options.kind}: not installed: {package}; run: pip install 'mlx-labkit[{extra}]'"
        )
    results = []
    with beside(options.busy):
        if options.busy and options.kind == "live-servers":
            use_one_core()
        timed = f"-{options.time}s" if options.time else ""
        for number in range(options.first, options.first + options.studies):
            name = f"{options.kind}{timed}{'-busy' if options.busy else ''}-{number:02d}"
            processes = options.processes or PROCESSES[options.kind][options.busy]
            # Within its margin, a delay of 1 % would be no difference.
            margin = ["design.margin_pct=1"] if planted_pct(options.kind) == 1 else []
            timed_design = [f"design.time={options.time}", *margin]
            overrides = timed_design if timed else fixed_blocks(processes)
            if "kernels" not in options.kind and options.busy:
                overrides += threads_left()
            overrides.append(f"seed={1000 + number}")
            results.append(study(options.kind, options.out / name, overrides))
            print(json.dumps(results[-1]), flush=True)
    named = sum(r["named"] for r in results)
    false = sum(r["false"] for r in results)
    print(
        f"of {len(results)} studies, the planted delay was detected in {named}, and the copy was "
        f"claimed to differ in {false}"
    )
    return 0


def planted_pct(kind: str) -> int:
    """Return the planted delay, in percent."""
    return int(ASKED[kind][0].removeprefix("planted_").removesuffix("pct"))


def fixed_blocks(blocks: int) -> list[str]:
    """Return the overrides of a design without interim looks, so that all studies are alike."""
    return [f"design.blocks={blocks}", "design.looks=[]"]


def threads_left() -> list[str]:
    """Return the override that leaves one core free."""
    from labkit.machine.worker_environment import core_count

    return [f"engine.threads={max(1, core_count() - 1)}"]


def use_one_core() -> None:
    """Run this process and those that it starts on one core, away from the busy process.

    The thread that writes a server's responses and its client run for a moment per token. Beside
    the busy process, they would wait for it.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def study(kind: str, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Make the missing runs of a study, and return its result and the wall seconds of this call."""
    from labkit.experiment.compose.cell_composer import to_cell

    composed = with_planted(kind, overrides)
    began = time.monotonic()
    cell = run(to_cell(replace(composed, name=folder.name), folder))
    seconds = time.monotonic() - began
    return {"study": folder.name, "seconds": round(seconds, 1), **study_result(cell)}


def agreement(kind: str, folder: Path, pairs: int) -> str:
    """Return a line on whether interleaved runs and separate processes measure the same effects.

    The missing runs of both kinds are made first. ``pairs`` is the number of pairs of processes.
    """
    from labkit.analysis.robustness.isolation_agreement import isolation_sentence
    from labkit.analysis.studies.study_analysis import AnalysisCache
    from labkit.config import Isolation
    from labkit.experiment.compose.cell_composer import to_cells

    blocks = PROCESSES["requests" if kind.endswith("requests") else "kernels"][0]
    design = [*fixed_blocks(blocks), f"design.confirm={pairs}", "seed=10"]
    composed = with_planted(kind, design)
    cells = to_cells(replace(composed, arms=composed.arms[:2], name=folder.name), folder)
    for cell in cells:
        alone = cell.design.isolation is Isolation.process
        run(cell, beside=kind.startswith("agreement-beside") and alone)
    return str(isolation_sentence(AnalysisCache().cell(folder)))


def live_agreement(
    kind: str, out: Path, blocks: int, shared: int, number: int = 0
) -> list[dict[str, Any]]:
    """Make the missing runs of a study of every isolation and return the studies' summaries.

    ``blocks`` is the number of live sets, and of pairs of separate processes; ``shared`` that of
    processes that both arms share, as servers cannot. ``number`` changes the seed and the name.
    """
    from labkit.experiment.compose.cell_composer import to_cell

    folders = []
    for isolation in ISOLATIONS:
        if isolation == "in_process" and kind.endswith("servers"):
            continue
        processes = shared if isolation == "in_process" else blocks
        design = [f"design.isolation={isolation}", *fixed_blocks(processes)]
        composed = with_planted(kind, [*design, f"seed={10 + number}"])
        folders.append(out / f"{kind}{f'-{number + 1}' if number else ''}-{isolation}")
        run(to_cell(replace(composed, arms=composed.arms[:2], name=folders[-1].name), folders[-1]))
    return [summary(folder) for folder in folders]


def with_planted(kind: str, more: Sequence[str]) -> ComposedCell:
    """Compose a study with three arms: the baseline, the planted one, and the control."""
    from labkit import workload
    from labkit.cli import multirun_composition
    from labkit.experiment.compose.cell_composer import compose_cell

    name, overrides = ASKED[kind]
    multirun_composition.register()
    with multirun_composition.initialized():
        design = ["design.runs_per_block=1", "ablation=none"]
        composed = compose_cell([], [*overrides, *design, *more])
    base, control = composed.arms
    planted = replace(base, name=name, role="arm")
    if base.environment:
        from planted_revision import slower_revision
        from planted_worker import planted_share

        environment = slower_revision(base.environment["revision"], planted_share(name))
        planted = replace(planted, environment=environment)
    workload.prepare(composed.experiment)
    return replace(composed, arms=(base, planted, control))


def run(cell: ReadyCell, beside: bool = False) -> dict[str, Any]:
    """Run a cell's missing runs with planted delays and return its analysis.

    ``beside``: the two processes of a block live at the same time (``SideBySide``).
    """
    from labkit import analysis
    from labkit.analysis.studies.study_analysis import AnalysisCache
    from labkit.experiment.launch.run_launcher import ProcessLauncher, WorkerLauncher
    from labkit.experiment.schedule.cell_runner import run_cell

    command = (sys.executable, str(HERE / "planted_worker.py"))
    launcher = SideBySide(ProcessLauncher(command)) if beside else WorkerLauncher(command)
    run_cell(cell, launcher, analysis=AnalysisCache())
    shutil.rmtree(cell.dir / "runs" / "pending", ignore_errors=True)
    return analysis.write_cell(cell.dir)


class SideBySide:
    """Launches both runs of a block at once, in processes that take turns (``planted_worker``)."""

    def __init__(self, launcher: ProcessLauncher) -> None:
        self._launcher = launcher
        self._done: dict[str, Record] = {}  # by run name, until the second call

    def prepare(self, cell: ReadyCell) -> None:
        """Prepare the cell's arms, as for single runs."""
        self._launcher.prepare(cell)

    def launch(self, runs: Sequence[Run], cell: ReadyCell) -> list[Record]:
        """Launch both runs of a block at the first call; at the second, return the other record."""
        (run,) = runs
        if run.name in self._done:
            return [self._done.pop(run.name)]
        both = [one for one in cell.schedule() if one.block == run.block]
        spawn = multiprocessing.get_context("spawn")
        with TemporaryDirectory() as folder, ProcessPoolExecutor(1, spawn) as other:
            for arm, pipe in itertools.product([one.arm for one in both], ("there", "turn")):
                os.mkfifo(Path(folder, f"{arm}.{pipe}"))
            command = (*self._launcher.command, "--beside", folder)
            pending = [other.submit(launch, command, one, cell) for one in both if one != run]
            mine = launch(command, run, cell)
            for future in pending:
                record = future.result()
                self._done[record.run] = record
        return [mine]


def launch(command: Sequence[str], run: Run, cell: ReadyCell) -> Record:
    from labkit.experiment.launch.run_launcher import ProcessLauncher

    (record,) = ProcessLauncher(command).launch([run], cell)
    return record


def study_result(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one study from its analysis ``cell``.

    ``named`` is whether the planted delay was detected, ``false`` whether the copy of the baseline
    was claimed to differ. ``rows`` are the cases in which the delay was detected.
    """
    planted = next(arm["name"] for arm in cell["arms"] if arm["name"].startswith("planted"))
    rows = [row for row in cell["rows"] if row["primary"]]
    hits, false = [], []
    for row in rows:
        slower = 1 if row["better"] == "lower" else -1
        for c in row["comparisons"]:
            low, high = c["ci_low_pct"], c["ci_high_pct"]
            claimed = None not in (c["p_adjusted"], low, high) and not low <= 0 <= high
            if claimed and c["arm"] == planted and c["effect_pct"] * slower > 0:
                hits.append(row["case"])
            if claimed and c["arm"] == "control":
                false.append(row["case"])
    effects = {
        c["arm"]: [
            round(x["effect_pct"], 2)
            for r in rows
            for x in r["comparisons"]
            if x["arm"] == c["arm"] and x["p_adjusted"] is not None  # not of rows in a few rounds
        ]
        for c in rows[0]["comparisons"]
    }
    return {
        "named": bool(hits),
        "false": bool(false),
        "rows": hits,
        "effects": effects,
        "gates": {name: gate["status"] for name, gate in cell["gates"].items()},
    }


def summaries(out: StudyPath) -> list[dict[str, Any]]:
    """Return the summaries of the finished studies of a folder or archive, or those in a file."""
    from labkit.analysis.studies.study_discovery import cell_dirs

    if isinstance(out, Path) and is_summary(out):
        read = lzma.open if out.suffix == ".xz" else open
        with read(out, "rt", encoding="utf-8") as file:
            return list(json.load(file))
    folders = sorted(cell_dirs(out), key=lambda folder: folder.name)
    pattern = rf"(?!agreement).*-\d+|agreement-live-.*-({'|'.join(ISOLATIONS)})"
    studies = [summary(one) for one in folders if re.fullmatch(pattern, one.name)]
    return [one for one in studies if one["rows"]]  # others have not finished


def is_summary(path: Path) -> bool:
    """Return whether a path is a file that ``summary`` wrote, compressed or not."""
    return path.name.endswith((".json", ".json.xz"))


def summary(folder: StudyPath) -> dict[str, Any]:
    """Return a study's design and gates, the value of every run, and the result of each row.

    It holds what a reader needs to compute the result again, without the whole records. The values
    of an arm are in the order of the blocks; ``design.order`` has the order of the arms in each.
    """
    cell = json.loads((folder / "cell.json").read_text("utf-8"))
    arms = {
        arm["name"]: json.loads((folder / "arms" / f"{arm['name']}.json").read_text("utf-8"))
        for arm in cell["arms"]
    }
    environment, design = cell["environment"], cell["design"]
    baseline = next(iter(arms.values()))
    result = ("arm", "effect_pct", "ci_low_pct", "ci_high_pct", "p", "p_adjusted", "verdict")
    return {
        "study": folder.name,
        "seconds": round(measured_s(folder), 1),
        "threads": baseline["config"].get("engine", {}).get("threads"),
        "environment": {key: environment.get(key) for key in ("cpu_model", "cores", "taken")},
        "overrides": cell.get("overrides", []),
        "design": {key: design[key] for key in ("seed", "blocks", "isolation", "alpha", "order")},
        "gates": {name: {"status": gate["status"]} for name, gate in cell["gates"].items()},
        "arms": [
            {"name": name, "role": arm["role"], "environment": arm.get("environment")}
            for name, arm in arms.items()
        ],
        "rows": [
            {
                **{key: row[key] for key in ("case", "metric", "unit", "better", "primary")},
                "values": {
                    arm: [run["value"] for run in values["runs"]]
                    for arm, values in row["arms"].items()
                },
                "comparisons": [{key: one[key] for key in result} for one in row["comparisons"]],
            }
            for row in cell["rows"]
            if row["primary"]
        ],
    }


def table(studies: Sequence[dict[str, Any]]) -> str:
    """Return the summaries of studies as a Markdown table, one line per kind of study.

    A study's name without its number is the kind, for example ``kernels-busy`` for
    ``kernels-busy-03``.
    """
    lines = [
        "| studies | rows | processes per study | planted delay detected | false claims | "
        "effect of the delay: median (range) | effect of the copy: median (range) | "
        "seconds per study |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- | ---: |",
    ]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for one in [one for one in studies if not is_of_isolation(one)]:
        kinds.setdefault(one["study"].rpartition("-")[0], []).append(one)
    return "\n".join([*lines, *(_table_line(kind, group) for kind, group in kinds.items())])


def _table_line(kind: str, studies: Sequence[dict[str, Any]]) -> str:
    results = [study_result(one) for one in studies]
    named, false = (sum(result[word] for result in results) for word in ("named", "false"))
    first, n = studies[0], len(studies)
    ranges = []
    for arm in [arm["name"] for arm in first["arms"][1:]]:
        effects = [effect for result in results for effect in result["effects"][arm]]
        ranges.append(
            f"{statistics.median(effects):+.2f} % ({min(effects):+.2f} to {max(effects):+.2f})"
        )
    label = re.sub(r"-(\d.*|busy)$", "", kind)
    timed = re.search(r"-(\d+)s\b", kind)
    design = f", `design.time={timed[1]}s`" if timed else ""
    design += ", beside a busy process" if kind.endswith("-busy") else ""
    design += f", {first['threads']} thread" if first["threads"] else ""
    counts = sorted({_process_count(one) for one in studies})
    processes = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f"| {n} of {label}{design} | {len(first['rows'])} | "
        f"{processes} | {named} of {n} | {false} of {n} | "
        f"{' | '.join(ranges)} | {statistics.median(one['seconds'] for one in studies):.0f} |"
    )


def _process_count(study: dict[str, Any]) -> int:
    """Return how many processes of an arm a study has, which its looks may have ended early."""
    return max(len(runs) for row in study["rows"] for runs in row["values"].values())


def is_of_isolation(study: dict[str, Any]) -> bool:
    """Return whether a summary is that of a study of ``agreement-live-...``."""
    return bool(study["study"].startswith("agreement-live-"))


def isolations_agreed(studies: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the effects with every isolation, from the studies' summaries."""
    lines = [
        "| | blocks: one process, live sets, pairs | one process | live | separate | "
        "live against one process (detectable from) | live against separate (detectable from) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    by_name = {one["study"]: one for one in studies}
    for kind in [name.removesuffix("-live") for name in by_name if name.endswith("-live")]:
        found = [by_name.get(f"{kind}-{isolation}") for isolation in ISOLATIONS]
        blocks = ", ".join(str(one["design"]["blocks"]) if one else "-" for one in found)
        for index, row in enumerate(by_name[f"{kind}-live"]["rows"]):
            case = kind.removeprefix("agreement-live-") if row["case"] == "all" else row["case"]
            effects = [planted_effect(one, index) if one else None for one in found]
            shown = [f"{one.effect_pct:+.1f} %" if one else "-" for one in effects]
            alone, live, apart = effects
            shown += [_difference(live, alone), _difference(live, apart)]
            lines.append(f"| {case} | {blocks} | {' | '.join(shown)} |")
    return "\n".join(lines)


def planted_effect(study: dict[str, Any], row: int) -> Comparison:
    """Return the planted arm's effect and interval in a row of a study's summary."""
    from labkit.analysis.model.result_row import Comparison

    (one,) = study["rows"][row]["comparisons"]
    numbers = (one[name] for name in ("effect_pct", "ci_low_pct", "ci_high_pct"))
    return Comparison(one["arm"], "base", *numbers)


def _difference(live: Comparison | None, other: Comparison | None) -> str:
    from labkit.analysis.robustness.isolation_agreement import compare_effects

    agreement = compare_effects("", "planted", live, other)
    if agreement is None or agreement.difference_pct is None:
        return "-"
    return f"{abs(agreement.difference_pct):.1f} % ({agreement.undetected_pct:.1f} %)"


def agreed(out: StudyPath, kinds: Sequence[str]) -> str:
    """Return a Markdown table of the effects in interleaved runs and in separate processes."""
    from labkit.analysis.robustness.isolation_agreement import isolation_agreements
    from labkit.analysis.studies.study_analysis import AnalysisCache

    lines = [
        "| | interleaved processes, pairs | interleaved | pairs | difference | detectable from |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind in [kind for kind in kinds if (out / f"{kind}~processes" / "cell.json").is_file()]:
        blocks = [
            json.loads((out / f"{kind}{end}" / "cell.json").read_text("utf-8"))["design"]["blocks"]
            for end in ("", "~processes")
        ]
        for agreement in isolation_agreements(AnalysisCache().cell(out / kind)) or []:
            row = "`ragged` on model=small" if agreement.row == "total_tok_s" else agreement.row
            lines.append(
                f"| {row} | {blocks[0]}, {blocks[1]} | {agreement.interleaved_pct:+.1f} % | "
                f"{agreement.separate_pct:+.1f} % | {abs(agreement.difference_pct or 0):.1f} % | "
                f"{agreement.undetected_pct:.1f} % |"
            )
    return "\n".join(lines)


def measured_s(folder: StudyPath) -> float:
    """Return the total wall seconds of a study's processes."""
    records = (folder / "runs").glob("b*.json")
    seconds = [json.loads(r.read_text(encoding="utf-8"))["seconds"] for r in records]
    return float(sum(each["process"] for each in seconds))


@contextmanager
def beside(busy: bool) -> Iterator[None]:
    """If ``busy``, run one busy process during the ``with`` block."""
    other = multiprocessing.Process(target=spin, daemon=True)
    if busy:
        other.start()
    try:
        yield
    finally:
        if busy:
            other.terminate()


def spin() -> None:
    while True:
        sum(range(10_000))


if __name__ == "__main__":
    sys.exit(main())
