"""Error rates of ``labkit.replicate``, simulated: pairs of an author's study and a reader's.

    python benchmarks/replication_error_rates.py 400

Both studies have one run per arm and block, with lognormal noise; a process's noise is part of it.
The reader's truth is the author's effect (*copy*), half of it (*half*), none (*none*) or its
opposite (*opposite*). Rows whose author's interval claims nothing are left out, as in the program,
so the author's estimates that remain are too large (the winner's curse). A column is the share of
studies with such a word in any row; the share of rows that are decided comes last.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.analysis.statistics.difference_in_differences import (
    StudyEffect,
    effect_change,
    estimate_effect,
)
from labkit.analysis.statistics.hodges_lehmann import breakpoints
from labkit.analysis.statistics.permutation_test import relabellings
from labkit.analysis.statistics.replication_test import (
    Interval,
    ReplicationRow,
    ReplicationWord,
    decide_replication,
)

ALPHA, MARGIN = 0.05, (math.log1p(-0.02), math.log1p(0.02))
TRUTHS = {"copy": 1.0, "half": 0.5, "none": 0.0, "opposite": -1.0}
WORDS = ("replicated", "same direction, other size", "not replicated")


@dataclass(frozen=True)
class Pair:
    """The design of two studies: rows, blocks of each, noise of each (log sd) and the effect."""

    rows: int
    blocks: tuple[int, int]
    noise: tuple[float, float]
    effect: float


PAIRS = (
    Pair(4, (8, 8), (0.01, 0.01), 0.1),
    Pair(4, (8, 8), (0.01, 0.03), 0.1),  # the reader's machine is under load
    Pair(4, (8, 8), (0.03, 0.03), 0.1),
    Pair(4, (8, 8), (0.01, 0.01), 0.025),  # just beyond the margin
    Pair(4, (8, 8), (0.01, 0.01), -0.7),  # half the time
    Pair(4, (8, 8), (0.01, 0.01), 0.0),
    Pair(2, (7, 7), (0.02, 0.02), 0.06),
    Pair(1, (6, 6), (0.02, 0.02), 0.06),
)


def measured(
    rng: np.random.Generator, effect: float, noise: float, blocks: int, rows: int
) -> tuple[StudyEffect, Interval | None]:
    """Return one row of a study: its effect, and its interval adjusted over the rows."""
    values = rng.normal(0.0, noise, (2, blocks, 1)) + np.array([0.0, effect])[:, None, None]
    study = estimate_effect(values[0], values[1], None)
    points = breakpoints(study.null_distribution, relabellings(blocks, 1).label_correlation)
    return study, points.interval(ALPHA / rows)


def words(rng: np.random.Generator, pair: Pair, truth: float) -> list[ReplicationWord]:
    """Return the decisions on the rows of one author's and one reader's study."""
    found = []
    for _ in range(pair.rows):
        studies, intervals = zip(
            *(
                measured(rng, effect, noise, blocks, pair.rows)
                for effect, noise, blocks in zip(
                    (pair.effect, truth * pair.effect), pair.noise, pair.blocks, strict=True
                )
            ),
            strict=True,
        )
        author, reader = intervals
        if author is None:
            continue
        row = ReplicationRow(studies, effect_change(*studies), author, reader, MARGIN)
        if row.claims_none or not author[0] <= 0 <= author[1]:
            found.append(row)
    return [decision.word for decision in decide_replication(found, ALPHA)]


def shares(pair: Pair, truth: float, studies: int, seed: Sequence[int]) -> dict[str, float]:
    """Return the share of studies with each word in any row, and of rows that are decided."""
    rng = np.random.default_rng(seed)
    found = [words(rng, pair, truth) for _ in range(studies)]
    every = [word for one in found for word in one]
    decided = sum(word is not ReplicationWord.not_decided for word in every)
    return {
        **{name: float(np.mean([ReplicationWord(name) in one for one in found])) for name in WORDS},
        "decided": decided / max(1, len(every)),
    }


def table(studies: int) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| rows | blocks | noise | effect | truth | {' | '.join(WORDS)} | decided rows |"
    yield "| ---: | --- | --- | ---: | --- | ---: | ---: | ---: | ---: |"
    for number, pair in enumerate(PAIRS):
        for index, (name, truth) in enumerate(TRUTHS.items()):
            if pair.effect == 0.0 and name != "copy":
                continue
            found = shares(pair, truth, studies, (number, index))
            blocks = f"{pair.blocks[0]}, {pair.blocks[1]}"
            noise = ", ".join(f"{100 * one:g} %" for one in pair.noise)
            figures = " | ".join(f"{100 * share:.1f} %" for share in found.values())
            effect = f"{100 * math.expm1(pair.effect):+.1f} %"
            yield f"| {pair.rows} | {blocks} | {noise} | {effect} | {name} | {figures} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", type=int, nargs="?", default=400, help="of each kind")
    for line in table(parser.parse_args().studies):
        print(line, flush=True)


if __name__ == "__main__":
    main()
