"""Two studies of one machine and one config: what changed from the old to the new?

Their runs were not interleaved, so a change of the machine looks like a change of the
code. Therefore: another machine or another config is refused; and where the arm-blind
probe moved by more than the margin, neither faster nor slower is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from labkit.analysis.cell import CellAnalysis
from labkit.analysis.comparison import Comparison, Levels
from labkit.analysis.effect import breakpoints, percent
from labkit.analysis.equivalence import equivalence
from labkit.analysis.multiplicity import holm
from labkit.analysis.numbers import signed
from labkit.analysis.permutation import Floats
from labkit.analysis.power import detectable_pct
from labkit.analysis.two_sample import (
    Splits,
    hodges_lehmann_shift,
    pooled_sd,
    splits,
    two_sided_p,
)
from labkit.analysis.values import Row
from labkit.analysis.verdict import Verdict, judge

MACHINE_FIELDS = ("cpu_model", "cores", "memory_bytes", "os", "accelerator")
MEMORY_STEP = 1 << 28  # kernels reserve a little
NAMES = ("old", "new")


class Refused(ValueError):
    """Two studies that cannot be compared, and why, in one line."""


@dataclass(frozen=True)
class Change:
    """One row and arm in both studies: its medians, the comparison and the verdict."""

    cell: str
    row: Row
    arm: str
    old: float | None
    new: float | None
    found: Comparison
    verdict: Verdict


@dataclass(frozen=True)
class Comparisons:
    """All changes of the primary rows, and what to say above them."""

    changes: tuple[Change, ...]
    weaknesses: tuple[str, ...]


@dataclass(frozen=True)
class _Pair:
    """One cell in both studies, checked to be comparable."""

    old: CellAnalysis
    new: CellAnalysis
    levels: Levels
    shift_pct: float | None

    @property
    def name(self) -> str:
        return self.old.name


@dataclass(frozen=True)
class _Compared:
    """One row and arm of a pair: its runs' values in both studies, and what they say."""

    pair: _Pair
    row: Row
    arm: str
    old: Floats
    new: Floats
    found: Comparison


def compare_studies(
    old: Sequence[CellAnalysis], new: Sequence[CellAnalysis], margin_pct: float
) -> Comparisons:
    """Compare two studies row by row, arm by arm.

    p-values are adjusted over all rows and arms by S. Holm (1979).

    Raises
    ------
    Refused
        Other machines, other configs, or no cell or row in common.
    """
    cells, weak = _cells(old, new)
    pairs = [_pair(one, other, margin_pct) for one, other in cells]
    for pair in pairs:
        if pair.shift_pct is None:
            weak.append(f"{pair.name}: no probe; a change of the machine would not be seen")
        elif _moved(pair):
            weak.append(f"{pair.name}: {_moved_reason(pair)}")
        weak += _rows_alone(pair)
    compared = [item for pair in pairs for item in _compare(pair)]
    if not compared:
        raise Refused("the studies have no row in common that both measured")
    known = [i for i, item in enumerate(compared) if item.found.p is not None]
    adjusted = dict(zip(known, holm([compared[i].found.p or 0.0 for i in known]), strict=True))
    changes = []
    for i, item in enumerate(compared):
        found = replace(item.found, p_adjusted=adjusted.get(i))
        changes.append(
            Change(
                cell=item.pair.name,
                row=item.row,
                arm=item.arm,
                old=_median(item.old),
                new=_median(item.new),
                found=found,
                verdict=_judge(item.pair, item.row, item.arm, found),
            )
        )
    return Comparisons(tuple(changes), tuple(weak))


def _median(values: Floats) -> float | None:
    return float(np.median(values)) if len(values) else None


def _judge(pair: _Pair, row: Row, arm: str, found: Comparison) -> Verdict:
    causes = [
        f"{name}: {cause}"
        for name, analysis in zip(NAMES, (pair.old, pair.new), strict=True)
        for gate in analysis.gates.values()
        if (cause := gate.cause(arm)) is not None
    ]
    verdict = judge(found, row.better, pair.levels, causes, None)
    if verdict.word in ("faster", "slower") and _moved(pair):
        return Verdict("inconclusive", _moved_reason(pair))
    return verdict


def _pair(old: CellAnalysis, new: CellAnalysis, margin_pct: float) -> _Pair:
    _refuse_machine(old, new)
    _refuse_config(old, new)
    alpha = min(float(a.data.design["alpha"]) for a in (old, new))
    levels = Levels(old.data.levels.runs, alpha, margin_pct)
    return _Pair(old, new, levels, probe_shift_pct(old, new))


def _moved(pair: _Pair) -> bool:
    return pair.shift_pct is not None and abs(pair.shift_pct) > pair.levels.margin_pct


def _moved_reason(pair: _Pair) -> str:
    return (
        f"the machine itself changed: its arm-blind probe takes {signed(pair.shift_pct or 0.0)} % "
        f"(margin ±{pair.levels.margin_pct:g} %)"
    )


def _cells(
    old: Sequence[CellAnalysis], new: Sequence[CellAnalysis]
) -> tuple[list[tuple[CellAnalysis, CellAnalysis]], list[str]]:
    if len(old) == len(new) == 1:
        return [(old[0], new[0])], []
    before, after = ({a.name: a for a in study} for study in (old, new))
    shared = [name for name in before if name in after]
    if not shared:
        raise Refused("the studies have no cell in common")
    alone = [f"{name}: only in {NAMES[0]}" for name in before if name not in after]
    alone += [f"{name}: only in {NAMES[1]}" for name in after if name not in before]
    return [(before[name], after[name]) for name in shared], alone


def _refuse_machine(one: CellAnalysis, other: CellAnalysis) -> None:
    machines = [analysis.environment for analysis in (one, other)]
    for field in MACHINE_FIELDS:
        values = [m.get(field) for m in machines]
        if field == "memory_bytes":
            same = len({round(v / MEMORY_STEP) if v else None for v in values}) == 1
        else:
            same = values[0] == values[1]
        if not same:
            raise Refused(f"other machines: {field} is {values[0]} and {values[1]}")


def _refuse_config(one: CellAnalysis, other: CellAnalysis) -> None:
    kinds = [analysis.data.design.get("isolation", "process") for analysis in (one, other)]
    if kinds[0] != kinds[1]:
        raise Refused(f"{one.name}: other designs: isolation was {kinds[0]}, now {kinds[1]}")
    arms = [{a.name: a for a in analysis.data.arms} for analysis in (one, other)]
    if set(arms[0]) != set(arms[1]):
        alone = sorted(set(arms[0]) ^ set(arms[1]))
        raise Refused(f"{one.name}: other arms: {', '.join(alone)} only in one study")
    for name in arms[0]:
        difference = _difference(arms[0][name].config, arms[1][name].config)
        if difference is not None:
            raise Refused(f"{one.name}: other configs: arm {name}: {difference}")


def _difference(old: Any, new: Any, where: str = "") -> str | None:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            found = _difference(old.get(key), new.get(key), f"{where}.{key}".lstrip("."))
            if found is not None:
                return found
        return None
    return None if old == new else f"{where} was {old}, now {new}"


def probe_shift_pct(one: CellAnalysis, other: CellAnalysis) -> float | None:
    """Give how much longer the probe takes in the new study, in percent (medians)."""
    probes = [list(a.data.probe.values()) for a in (one, other)]
    if not all(probes):
        return None
    return percent(float(np.median(probes[1]) - np.median(probes[0])))


def _compare(pair: _Pair) -> list[_Compared]:
    """Compare every shared primary row and arm; rows of as many runs share their splits."""
    items = list(_shared_rows(pair))
    groups: dict[tuple[int, int], list[int]] = {}
    for i, item in enumerate(items):
        if min(len(item.old), len(item.new)) > 0 and min(item.old.min(), item.new.min()) > 0:
            groups.setdefault((len(item.old), len(item.new)), []).append(i)
    for sizes, members in groups.items():
        labels = splits(*sizes)
        runs = [np.log(np.concatenate([items[i].old, items[i].new])) for i in members]
        statistics = labels.mean_differences(np.stack(runs, axis=1))
        for column, i in enumerate(members):
            found = _comparison(items[i], statistics[:, column], labels)
            items[i] = replace(items[i], found=found)
    return items


def _rows_alone(pair: _Pair) -> Iterator[str]:
    """Name the primary rows that only one of the studies measured."""
    old, new = (
        {(r.case, r.metric): r.case for r in a.rows if r.primary and r.skipped is None}
        for a in (pair.old, pair.new)
    )
    for name, mine, other in zip(NAMES, (old, new), (new, old), strict=True):
        yield from (f"{pair.name}: {mine[row]}: only in {name}" for row in mine if row not in other)


def _shared_rows(pair: _Pair) -> Iterator[_Compared]:
    rows = {(row.case, row.metric): row for row in pair.new.rows}
    blocks = min(len(a.data.blocks_done) for a in (pair.old, pair.new))
    for row in pair.old.rows:
        match = rows.get((row.case, row.metric))
        if not row.primary or row.skipped is not None or match is None or match.skipped is not None:
            continue
        for arm in pair.old.data.arms:
            if arm.role != "control":
                values = (_values(row, arm.name), _values(match, arm.name))
                nothing = Comparison(arm.name, arm.name, blocks=blocks)
                yield _Compared(pair, row, arm.name, *values, nothing)


def _values(row: Row, arm: str) -> Floats:
    return np.array([v.value for v in row.arms.get(arm, ())], np.float64)


def _comparison(item: _Compared, statistics: Floats, labels: Splits) -> Comparison:
    levels, old, new = item.pair.levels, np.log(item.old), np.log(item.new)
    blocks = item.found.blocks
    points = breakpoints(statistics, labels)
    limits, sd = points.interval(levels.alpha), pooled_sd(old, new)
    return replace(
        item.found,
        effect_pct=percent(hodges_lehmann_shift(old, new)),
        ci_pct=None if limits is None else (percent(limits[0]), percent(limits[1])),
        p=two_sided_p(statistics),
        p_floor=labels.floor,
        mde_pct=None if sd is None else detectable_pct(sd, blocks, levels.runs, levels.alpha),
        sd=sd,
        equivalence=equivalence(points, levels.margin_pct, levels.alpha),
    )
