"""labkit's engine against mlx_lm's own: tokens per second, same model, same machine.

Every run is a fresh process, and the arms of a scenario alternate. The table shows medians
over rounds, their ratio, the range of the rounds' ratios, and the target. mlx_lm runs on OpenBLAS
with the thread count that was fastest in one run of each count. Run as
``python benchmarks/compare_mlx_lm.py``. Options: ``--quick`` runs one round, ``--only TEXT``
selects the scenarios whose names contain TEXT, ``--json FILE`` writes every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

OURS, THEIRS = "paged", "mlx_lm"
TOKENS = "total_tok_s"
HOST_TARGET, OUTSIDE_TARGET = 0.15, 0.03


@dataclass(frozen=True)
class Scenario:
    """A workload on a model. ``target`` is the required ratio of the two sides' tokens per second.

    The sides are labkit and mlx_lm or, in ``CASES``, all requests at once and one after the other.
    """

    name: str
    overrides: tuple[str, ...]
    target: float


SCENARIOS = (
    Scenario("ragged, tiny", ("model=tiny", "workload=ragged"), 4.7),
    Scenario("ragged, small", ("model=small", "workload=ragged"), 3.4),
    Scenario("uniform, tiny", ("model=tiny", "workload=uniform"), 2.5),
    Scenario("uniform, small", ("model=small", "workload=uniform"), 2.5),
)
# Three requests of very different lengths, served all at once and one after the other.
CASES = tuple(
    Scenario(f"case study, {model}", (f"model={model}", "workload=case_study"), 1.0)
    for model in ("tiny", "small")
)
# The scenario with a target for the share of host time in a step.
HOST_SCENARIO = "ragged, small"


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose an experiment as ``python -m labkit`` does, and prepare its model and prompts."""
    from labkit import workload
    from labkit.cli import multirun_composition
    from labkit.config import to_plain
    from labkit.experiment.compose.cell_composer import compose_cell

    with multirun_composition.initialized():
        experiment = compose_cell([], list(overrides)).experiment
    workload.prepare(experiment)
    plain: dict[str, Any] = to_plain(experiment)
    return plain


def run(overrides: Sequence[str]) -> dict[str, float]:
    """Serve once in a fresh process, with the environment of labkit's workers."""
    from labkit.machine.worker_environment import core_count, worker_environment

    experiment = compose(overrides)
    threads = experiment["engine"]["threads"] or core_count()
    environment, _ = worker_environment(os.environ, threads=threads, cores=core_count())
    command = [sys.executable, str(Path(__file__).resolve()), "--child"]
    done = subprocess.run(
        command,
        env=environment,
        input=json.dumps(experiment),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def child() -> None:
    """Serve the experiment given on standard input and print its figures as JSON."""
    from labkit import workload
    from labkit.config import Experiment, from_plain
    from labkit.cpu.runtime import thread_pool
    from labkit.experiment.worker import worker_setup
    from labkit.machine import openblas_for_mlx, worker_environment

    thread_pool.install()
    experiment = from_plain(Experiment, json.load(sys.stdin))
    engine = experiment.engine
    openblas_for_mlx.activate(
        engine.blas.value, worker_environment.blas_threads(engine.name, engine.threads)
    )
    worker_setup.apply_thread_budget(worker_setup.thread_budget(experiment))
    measurement = workload.measure(experiment)
    served = measurement.cases[0]
    metrics = {m.name: m.repeats[0] for m in served.metrics}
    # From the first request to the last token, without the reporting afterwards.
    wall_ms = 1e3 * len(served.notes["requests"]) / metrics["request_s"]
    counters = measurement.counters
    print(
        json.dumps(
            {
                **metrics,
                "tokens_padded": counters["tokens.padded"],
                "host_share": counters["host_ms"] / counters["step_ms"],
                "outside_share": 1 - counters["device_ms"] / wall_ms,
            }
        ),
        flush=True,
    )
    os._exit(0)


def thread_counts() -> list[int]:
    """Return the powers of two up to the number of cores, and the number of cores."""
    from labkit.machine.worker_environment import core_count

    cores = core_count()
    return sorted({1 << i for i in range(cores.bit_length()) if 1 << i <= cores} | {cores})


def best_threads(overrides: Sequence[str]) -> tuple[int, dict[int, float]]:
    """Return mlx_lm's best thread count for a workload, and tokens per second by thread count."""
    speeds = {
        threads: run([*overrides, f"engine={THEIRS}", f"engine.threads={threads}"])[TOKENS]
        for threads in thread_counts()
    }
    return max(speeds, key=lambda threads: speeds[threads]), speeds


def alternate(arms: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Run every arm once per round. The order is reversed in every other round."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in list(arms)[:: 1 if number % 2 == 0 else -1]:
            results[name].append(run(arms[name]))
    return results


def compare(
    ours: list[dict[str, float]], theirs: list[dict[str, float]], target: float | None
) -> dict[str, Any]:
    """Compare the tokens per second of two sides, given the figures of each round.

    Return the medians, their ratio, each round's ratio, and whether the target was met (None
    without a target).
    """
    ratios = [a[TOKENS] / b[TOKENS] for a, b in zip(ours, theirs, strict=True)]
    medians = [statistics.median(entry[TOKENS] for entry in side) for side in (ours, theirs)]
    ratio = medians[0] / medians[1]
    met = None if target is None else ratio >= target if target > 1 else ratio > target
    return {"medians": medians, "ratio": ratio, "ratios": ratios, "target": target, "met": met}


def share(entries: list[dict[str, float]], name: str, target: float | None) -> dict[str, Any]:
    """Return the median of figure ``name``, a share of time, and whether it is below ``target``.

    The second is None without a target.
    """
    value = statistics.median(entry[name] for entry in entries)
    return {"share": value, "target": target, "met": None if target is None else value < target}


def against_mlx_lm(scenario: Scenario, rounds: int) -> dict[str, Any]:
    """Measure a scenario: labkit with all cores, mlx_lm with its best thread count."""
    threads, speeds = best_threads(scenario.overrides)
    arms = {
        OURS: (*scenario.overrides, f"engine={OURS}"),
        THEIRS: (*scenario.overrides, f"engine={THEIRS}", f"engine.threads={threads}"),
    }
    results = alternate(arms, rounds)
    judged = scenario.name == HOST_SCENARIO
    return {
        **compare(results[OURS], results[THEIRS], scenario.target),
        "threads": threads,
        "speed_by_threads": speeds,
        "host": share(results[OURS], "host_share", HOST_TARGET if judged else None),
        "outside": share(results[THEIRS], "outside_share", OUTSIDE_TARGET),
        "runs": results,
    }


def together(scenario: Scenario, rounds: int) -> dict[str, Any]:
    """Measure each engine serving all requests at once, and serving one request at a time."""
    threads, _ = best_threads(scenario.overrides)
    engines = {OURS: (f"engine={OURS}",), THEIRS: (f"engine={THEIRS}", f"engine.threads={threads}")}
    arms = {
        f"{engine} {name}": (*scenario.overrides, *chosen, f"workload.concurrency={concurrency}")
        for engine, chosen in engines.items()
        for name, concurrency in (("together", 3), ("one by one", 1))
    }
    results = alternate(arms, rounds)
    return {
        engine: compare(
            results[f"{engine} together"],
            results[f"{engine} one by one"],
            scenario.target if engine == OURS else None,
        )
        for engine in engines
    } | {"threads": threads, "runs": results}


def head(first: str, second: str) -> None:
    """Print the table's header line; ``first`` and ``second`` name the compared sides."""
    print(f"\n{'scenario':28}{first:>10}{second:>10}{'ratio':>8}   {'rounds':16}target")


def row(name: str, result: dict[str, Any]) -> str:
    """Return the table's line of one result of ``compare``."""
    first, second = result["medians"]
    spread = f"{min(result['ratios']):.2f} to {max(result['ratios']):.2f}"
    target = result["target"]
    wanted = "" if target is None else f"{'>' if target == 1 else '>='} {target:g}"
    return (
        f"{name:28}{first:10,.0f}{second:10,.0f}{result['ratio']:8.2f}   "
        f"{spread:16}{wanted:8}{verdict(result['met'])}"
    )


def verdict(met: bool | None) -> str:
    """Return ``met`` or ``missed``, or an empty string without a target."""
    return "" if met is None else "met" if met else "missed"


def show_shares(name: str, result: dict[str, Any]) -> None:
    """Print the share of time that each engine spends outside the model."""
    host, outside = result["host"], result["outside"]
    wanted = "" if host["target"] is None else f" (under {host['target']:.0%}: "
    wanted += verdict(host["met"]) + ")" if wanted else ""
    print(f"{name:28}{OURS}: {host['share']:.1%} of step time is host time{wanted}")
    print(
        f"{'':28}{THEIRS} ({result['threads']} threads): {outside['share']:.2%} of wall time is "
        f"outside its generator (under {outside['target']:.0%}: {verdict(outside['met'])})"
    )


def main() -> None:
    """Measure the selected scenarios and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--only", default="", help="part of a scenario's name")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
    rounds = 1 if options.quick else options.rounds
    measure(rounds, options.only, options.json)


def measure(rounds: int, only: str, target: Path | None) -> None:
    """Measure and print the scenarios whose names contain ``only``, under the timing lock.

    ``target``: the file for all figures, or None.
    """
    from labkit.cli import multirun_composition
    from labkit.experiment.schedule.timing_lock import timing_lock

    multirun_composition.register()
    results: dict[str, Any] = {"load_average": os.getloadavg(), "rounds": rounds}
    scenarios = [s for s in SCENARIOS if only in s.name]
    cases = [s for s in CASES if only in s.name]
    with timing_lock("benchmarks/compare_mlx_lm.py", on_wait=print):
        print(f"{TOKENS}, medians of {rounds} rounds; load average {os.getloadavg()[0]:.1f}")
        if scenarios:
            head(OURS, THEIRS)
        for scenario in scenarios:
            results[scenario.name] = against_mlx_lm(scenario, rounds)
            print(row(scenario.name, results[scenario.name]), flush=True)
        if cases:
            head("together", "one by 1")
        for scenario in cases:
            results[scenario.name] = together(scenario, rounds)
            for engine in (OURS, THEIRS):
                name = f"{scenario.name}, {engine}"
                print(row(name, results[scenario.name][engine]), flush=True)
    print()
    for scenario in scenarios:
        show_shares(scenario.name, results[scenario.name])
    if target is not None:
        target.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
