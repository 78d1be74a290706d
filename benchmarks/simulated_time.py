"""Error rates of studies whose blocks and rounds follow from ``design.time``, by simulation.

Each study is run by the real runner: the pilot's costs and noise (estimated from simulated rounds)
give the first allocation, the noise of the rounds so far divides what is left before each block,
looks stop decided cases, and the analysis judges the records. Only the launches are drawn, and a
clock that they move on: a round's log ratio of two arms is the case's effect plus noise. ``python
benchmarks/simulated_time.py --studies 400`` prints a table for docs/statistical-methods.md, and
``--requests`` one of studies of requests, of which some take twice as long and are noisier in later
blocks, so that the last look comes earlier.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from planted_runs import OUTPUTS, PlantedRuns, kernel_fields  # noqa: E402

from labkit import config  # noqa: E402
from labkit.analysis.comparison.verdict import DECIDED_WORDS  # noqa: E402
from labkit.analysis.studies.study_analysis import AnalysisCache  # noqa: E402
from labkit.experiment.cell import ReadyCell  # noqa: E402
from labkit.experiment.compose.reachable_interim_looks import fewest_blocks  # noqa: E402
from labkit.experiment.permuted_blocks import Run  # noqa: E402
from labkit.experiment.schedule import (  # noqa: E402
    cell_runner,
    cell_time_limit,
    pilot_and_allocation,
    rounds_per_block,
)
from labkit.experiment.schedule.case_time_allocation import CellPilot  # noqa: E402
from labkit.experiment.schedule.cell_runner import run_cell  # noqa: E402
from labkit.experiment.schedule.requests_per_run import PILOT_BLOCK  # noqa: E402
from labkit.experiment.schedule.timing_lock import LOCK_DIR  # noqa: E402
from labkit.records import Arm, CaseRecord, Metric, Record  # noqa: E402
from labkit.workload.kernels.interleaved_kernels import round_sd  # noqa: E402
from labkit.workload.workload_protocols import CasePilot  # noqa: E402

# Of the older machine of the research note: seconds of a round, standard deviation of a round.
CASES = (
    (0.020, 0.074), (0.0875, 0.081), (0.35, 0.081), (0.33, 0.062), (1.03, 0.11), (0.63, 0.115),
    (0.0012, 0.153), (0.016, 0.07), (0.02, 0.078), (0.016, 0.091), (0.01, 0.03), (0.05, 0.15),
)  # fmt: skip
START_S, WARM_UP_ROUNDS = 1.5, 1.4
MARGIN = math.log(1.02)
FOLDERS = tempfile.gettempdir()


@dataclass(frozen=True)
class Noise:
    """Noise of rounds, and of a process: its sd as a share of a case's effect on all its rounds."""

    name: str
    tail: str = "normal"
    process_sd: float = 0.0

    def rounds(self, rng: np.random.Generator, sd: float, count: int) -> np.ndarray:
        """Return log ratios of ``count`` rounds, float64 [count], with the standard deviation."""
        if self.tail == "t3":
            return sd * rng.standard_t(3, count) / math.sqrt(3)
        if self.tail == "skewed":  # both arms' times are log-normal with a long tail to the right
            both = rng.exponential(1.0, (2, count)) + 0.3 * rng.standard_normal((2, count))
            return np.asarray(sd * (both[1] - both[0]) / math.sqrt(2 * 1.09))
        if self.tail == "modes":  # two speeds, 15 % apart, that last for tens of rounds
            length = 20
            flips = rng.random(1 + count // length) < 0.5
            fast = np.repeat(flips, length)[:count]
            slow_second = rng.random(count) < 1 / length
            return np.asarray(sd * rng.standard_normal(count) + 0.15 * (fast & slow_second))
        return sd * rng.standard_normal(count)


NOISES = (
    Noise("normal"), Noise("t3", "t3"), Noise("skewed", "skewed"), Noise("modes", "modes"),
    Noise("processes 20 %", process_sd=0.2), Noise("processes 96 %", process_sd=0.96),
)  # fmt: skip


class Clock:
    """The time of a simulated study, which replaces the module ``time`` of the runner."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Simulated(PlantedRuns):
    """Draws the records of one study. ``effects``: log ratio of each arm under test, by case."""

    def __init__(self, seed: int, noise: Noise, effects: Mapping[str, float], clock: Clock) -> None:
        super().__init__()
        self.rng, self.noise, self.effects = np.random.default_rng(seed), noise, effects
        self.clock = clock

    def pilot(self, cell: ReadyCell, seconds: float) -> Mapping[str, Any]:
        cases = []
        for name in cell.cases:
            round_s, sd = CASES[int(name)]
            count = min(200, max(3, int(seconds / len(cell.cases) / round_s)))
            logs = [np.zeros(count), *(self.noise.rounds(self.rng, sd, count) for _ in "ab")]
            cases.append(CasePilot(name, round_s, WARM_UP_ROUNDS * round_s, round_sd(logs), count))
        return asdict(CellPilot(START_S, tuple(cases)))

    def record(self, run: Run, cell: ReadyCell) -> Record:
        arm, cases = cell.arm(run.arm), []
        seconds = START_S
        for case in arm.config["workload"]["cases"]:
            round_s, sd = CASES[int(case["name"])]
            seconds += (WARM_UP_ROUNDS + case["factor"]) * round_s
            logs = np.zeros(case["factor"])
            if arm.role != "baseline":
                of_process = self.noise.process_sd * sd / math.sqrt(20) * self.rng.normal()
                logs = self.noise.rounds(self.rng, sd, case["factor"]) + of_process
            if arm.role == "arm":
                logs = logs + self.effects[case["name"]]
            times = tuple(100 * np.exp(logs))
            metric = Metric("dispatch_us", "us", "lower", True, times)
            notes = {"over_rounds": "middle_half"}
            cases.append(CaseRecord(case["name"], None, (metric,), OUTPUTS, notes))
        self.clock.now += seconds / len(cell.arms)
        record = super().record(run, cell)
        return replace(record, cases=tuple(cases), counters=kernel_fields(1.0)["counters"])


def cell_of(folder: Path, rows: int, arms: int, time_s: float) -> ReadyCell:
    """Return a cell of ``rows`` kernel cases, named by their numbers in ``CASES``."""
    cases = [config.Case(name=str(i), decode=1, context=16) for i in range(rows)]
    workload = config.Workload(name="simulated", kind="kernel", repeats=None, cases=cases)
    plain = {
        "engine": config.to_plain(config.Engine()),
        "model": config.to_plain(config.Model(shape=config.ModelShape())),
        "workload": config.to_plain(workload),
        "seed": 7,
    }
    names = [("base", "baseline"), *((f"arm{i}", "arm") for i in range(arms)), ("a_a", "control")]
    made = tuple(Arm(name, role, {"i": i}, plain) for i, (name, role) in enumerate(names))
    design = config.Design(time=time_s, blocks=0, isolation=config.Isolation.in_process)
    design = replace(design, blocks=fewest_blocks(design, arms))
    return ReadyCell(folder, "cell", made, design, 7, "?", blocks_from_time=True)


def study(
    number: int, noise: Noise, rows: int, arms: int, time_s: float, effect: str
) -> Counter[str]:
    """Run one study and count its words, coverage and what was forecast."""
    rng = np.random.default_rng([number, 1])
    logs = {
        "none": lambda: 0.0,
        "margin": lambda: MARGIN,
        "small": lambda: float(rng.choice([0.0, 0.01, -0.01, 0.03])),
    }[effect]
    effects = {str(i): logs() for i in range(rows)}
    counts: Counter[str] = Counter(studies=1)
    folder = Path(tempfile.mkdtemp(prefix="labkit-simulated-", dir=FOLDERS))
    os.environ[LOCK_DIR] = str(folder)  # the lock of a host that is timing is not theirs
    try:
        cell = cell_of(folder / "cell", rows, arms, time_s)
        cache = AnalysisCache()
        clock = Clock()
        for module in (pilot_and_allocation, cell_runner, rounds_per_block):
            vars(module)["time"] = clock
        launcher = Simulated(number, noise, effects, clock)
        with contextlib.redirect_stderr(None):
            run_cell(cell, launcher, analysis=cache)
        analysis = AnalysisCache().cell(cell.dir).cell
        shares = json.loads((cell.dir / "allocation.json").read_text())["cases"]
        counts["forecast_milli"] = round(1000 * sum(share["p_decided"] for share in shares))
        counts["seconds"] = round(clock.now)
        covered, false_word, false_equal = True, False, False
        for row in analysis.rows:
            for arm in cell.arms[1:-1]:
                one = row.comparison(arm.name)
                assert one is not None
                true = 100 * math.expm1(effects[row.case])
                if one.ci_pct is not None:
                    inside = one.ci_pct[0] <= true <= one.ci_pct[1]
                    if one.verdict == "estimate_only":  # an interval of its own
                        counts["estimates"] += 1
                        counts["estimates_covered"] += inside
                    else:
                        covered &= inside
                if one.verdict in ("better", "worse"):
                    false_word |= true == 0 or (true > 0) != (one.verdict == "worse")
                if one.verdict == "trivial":
                    false_word |= true == 0
                if one.verdict in ("equivalent", "trivial"):
                    false_equal |= abs(true) >= 2 - 1e-9
                counts["decided"] += one.verdict in DECIDED_WORDS
                counts["comparisons"] += 1
        counts["covered"] += covered
        counts["false_word"] += false_word
        counts["false_equal"] += false_equal
    finally:
        shutil.rmtree(folder)
    return counts


class SimulatedRequests(PlantedRuns):
    """Draws the records of one study of requests, and moves its clock.

    A run's speed is that of its process (sd 1 %) and of its waves of 16 requests (sd 3 % each).
    """

    def __init__(self, seed: int, effect: float, slow: float) -> None:
        super().__init__()
        self.rng, self.effect, self.slow, self.now = np.random.default_rng(seed), effect, slow, 0.0
        self.late = int(self.rng.integers(1, 6))  # the first slow block

    def monotonic(self) -> float:
        return self.now

    def record(self, run: Run, cell: ReadyCell) -> Record:
        count = cell.arm(run.arm).config["workload"]["num_requests"]
        slow = self.slow if self.late <= run.block < PILOT_BLOCK else 1.0
        measure = 0.05 * count * slow * math.exp(0.05 * self.rng.normal())
        self.now += 1.0 + measure
        noise = slow * math.hypot(0.01, 0.03 / math.sqrt(count / 16)) * self.rng.standard_t(5)
        log = noise + self.effect * (cell.arm(run.arm).role == "arm")
        each = 100 * np.exp(0.03 * self.rng.normal() + 0.01 * self.rng.normal(size=count))
        notes = {"requests": [{"id": str(i), "e2e_ms": ms} for i, ms in enumerate(each.tolist())]}
        metric = Metric("total_tok_s", "tok/s", "higher", True, (1000 * math.exp(log),))
        seconds = {"process": 1.0 + measure, "measure": measure}
        case = CaseRecord("all", None, (metric,), notes=notes)
        record = super().record(run, cell)
        return replace(record, cases=(case,), counters={"engine.paged": 1.0}, seconds=seconds)


def request_study(number: int, effect: float, slow: float) -> Counter[str]:
    """Run one study of requests in 120 s and count its words, coverage and seconds."""
    folder = Path(tempfile.mkdtemp(prefix="labkit-simulated-", dir=FOLDERS))
    os.environ[LOCK_DIR] = str(folder)
    launcher = SimulatedRequests(number, effect, slow)
    clock = SimpleNamespace(monotonic=launcher.monotonic)
    pilot_and_allocation.time = cell_time_limit.time = clock  # type: ignore[assignment]
    try:
        cell = cell_of(folder / "cell", 1, 1, 120.0)
        served = config.to_plain(config.Workload(num_requests=0))
        arms = (replace(arm, config={**arm.config, "workload": served}) for arm in cell.arms)
        cell = replace(cell, arms=tuple(arms), units_from_time=True)
        with contextlib.redirect_stderr(None):
            run_cell(cell, launcher, analysis=AnalysisCache())
        analysis = AnalysisCache().cell(cell.dir)
        one = next(r for r in analysis.cell.rows if r.primary).comparison(cell.arms[1].name)
        assert one is not None and one.ci_pct is not None
        true = 100 * math.expm1(effect)
        return Counter(
            studies=1,
            covered=one.ci_pct[0] <= true <= one.ci_pct[1],
            false_word=one.verdict in ("better", "worse", "trivial") and effect == 0,
            false_equal=one.verdict in ("equivalent", "trivial") and abs(true) >= 2 - 1e-9,
            decided=one.verdict in DECIDED_WORDS,
            over=launcher.now > 1.2 * 120,
        )
    finally:
        shutil.rmtree(folder)


def print_request_studies(studies: int) -> None:
    print("| later blocks | effect | false words | false equivalent | coverage | over 1.2 times |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    with ProcessPoolExecutor(2) as pool:
        for slow, effect in ((1.0, 0.0), (2.0, 0.0), (2.0, MARGIN)):
            one = partial(request_study, effect=effect, slow=slow)
            total: Counter[str] = sum(pool.map(one, range(studies), chunksize=5), Counter())
            keys = ("false_word", "false_equal", "covered", "over")
            shares = (total[key] / studies for key in keys)
            print(f"| x {slow:g} | {effect:.3f} | {' | '.join(f'{s:.1%}' for s in shares)} |")


def settings() -> Iterator[tuple[Noise, int, int, float, str]]:
    """Yield what is simulated: noise, rows, arms, seconds, effects."""
    for noise in NOISES:
        for effect in ("none", "margin", "small"):
            yield noise, 10, 1, 120.0, effect
    for rows, arms in ((1, 1), (4, 1), (12, 1), (4, 3), (4, 16)):
        yield NOISES[0], rows, arms, 120.0, "none"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--studies", type=int, default=200)
    parser.add_argument("--only", default="", help="a noise's name")
    parser.add_argument("--requests", action="store_true", help="studies of requests")
    options = parser.parse_args(argv)
    if options.requests:
        print_request_studies(options.studies)
        return
    columns = (
        "false words | false equivalent | coverage | of an estimate | decided | forecast | seconds"
    )
    print(f"| noise | rows x arms | effects | {columns} |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with ProcessPoolExecutor(2) as pool:
        for noise, rows, arms, time_s, effect in settings():
            if options.only and noise.name != options.only:
                continue
            total: Counter[str] = Counter()
            one = partial(study, noise=noise, rows=rows, arms=arms, time_s=time_s, effect=effect)
            for counts in pool.map(one, range(options.studies), chunksize=5):
                total += counts
            n, per = total["studies"], total["comparisons"]
            forecast = total["forecast_milli"] / 1000 / n / rows
            estimates = total["estimates_covered"] / max(1, total["estimates"])
            print(
                f"| {noise.name} | {rows} x {arms} | {effect} | {total['false_word'] / n:.1%} "
                f"| {total['false_equal'] / n:.1%} | {total['covered'] / n:.1%} | {estimates:.1%} "
                f"| {total['decided'] / per:.1%} | {forecast:.1%} | {total['seconds'] / n:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
