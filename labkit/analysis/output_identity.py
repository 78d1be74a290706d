"""Are the outputs the same, and if not, where do they first differ?

Every run is compared with one reference, the first good run of the baseline, so that an
arm that does not repeat itself is caught too. Digests decide; the finer fingerprints are
only opened to say where (:mod:`labkit.analysis.first_divergence`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.analysis import frame_verification
from labkit.analysis.first_divergence import (
    Outputs,
    StoredValues,
    array_difference,
    checksums,
    first_difference,
    text_difference,
    text_shares,
    token_difference,
)
from labkit.analysis.statistics.bimodality import fisher_p
from labkit.records import CaseRecord, Record

IDENTITY_CLAIMS = {
    "bitwise": "outputs bit-identical",
    "tokens": "outputs token-identical",
    "noise_floor": "outputs no further apart than the control's",
    "frames": "every frame the decoder's at its place",
}


@dataclass(frozen=True)
class OutputDifference:
    """One run's case that is not the reference's; ``where`` is a phrase for people."""

    arm: str
    run: str
    case: str
    where: str


@dataclass(frozen=True)
class OutputAgreement:
    """How many outputs of an arm agree with the reference, and for how long.

    Units are requests, token rows or picked frames, counted once per arm: one agrees if it does
    in every run. ``prefix``: mean share of a unit's tokens before the first difference (0 to 1).
    """

    arm: str
    agree: int
    total: int
    prefix: float


@dataclass(frozen=True)
class IdentityReport:
    """All differences from the reference run, and each arm's agreement with it."""

    reference: str | None
    differences: tuple[OutputDifference, ...]
    agreement: tuple[OutputAgreement, ...]

    def first(self, arm: str) -> OutputDifference | None:
        """Return an arm's first difference, in run order; None if it never differs."""
        return next((d for d in self.differences if d.arm == arm), None)


def compare_outputs(
    records: Sequence[Record], arms: Sequence[str], values: StoredValues, claim: str = "none"
) -> IdentityReport:
    """Compare every good run's outputs with the first good run of the first of ``arms``.

    ``claim``: what is claimed of them; where it is ``bitwise`` arms may not pick other frames.
    """
    reference = next((r for r in records if r.ok and r.arm == arms[0]), None)
    if reference is None:
        return IdentityReport(None, (), ())
    expected = {c.case: c for c in reference.cases}
    total = sum(_size(c.outputs) for c in reference.cases if c.outputs is not None)
    differences: list[OutputDifference] = []
    said: dict[tuple[str, str], str | None] = {}  # many runs have the same other outputs
    # Only units that ever differ are kept: the share that agrees, the worst of all runs.
    shares: dict[str, dict[tuple[str, str], float]] = {}
    for record in records:
        if not record.ok or record.arm not in arms:
            continue
        given = {c.case: c for c in record.cases}
        worst = shares.setdefault(record.arm, {})
        for name, case in expected.items():
            other = given.get(name)
            where = _difference(case, other, values, said, claim == "bitwise")
            if where is None:
                continue
            differences.append(OutputDifference(record.arm, record.run, name, where))
            if case.outputs is not None:
                theirs = other.outputs if other is not None else None
                for unit, share in _units(case.outputs, theirs).items():
                    worst[name, unit] = min(share, worst.get((name, unit), 1.0))
    agreement = tuple(_agreement(arm, shares[arm], total) for arm in arms if arm in shares)
    return IdentityReport(reference.run, tuple(differences), agreement)


def _size(outputs: Outputs) -> int:
    if outputs["kind"] == "frames":
        return len(outputs["picks"])
    return int(outputs["shape"][0]) if outputs["kind"] == "array" else len(outputs["requests"])


def _agreement(arm: str, worst: Mapping[tuple[str, str], float], total: int) -> OutputAgreement:
    lost = [1.0 - share for share in worst.values() if share < 1.0]
    return OutputAgreement(arm, total - len(lost), total, 1.0 - sum(lost) / total if total else 1.0)


def _difference(
    mine: CaseRecord,
    other: CaseRecord | None,
    values: StoredValues,
    said: dict[tuple[str, str], str | None],
    bitwise: bool,
) -> str | None:
    """Say how a case's outputs differ from the reference's; None if they do not."""
    theirs = None if other is None else other.outputs
    if theirs is not None and theirs["kind"] == "frames":
        return frame_verification.frames_difference(mine.outputs, theirs, bitwise)
    if mine.skipped is not None or (mine.outputs is None and theirs is None):
        return None
    if mine.outputs is not None and mine.outputs["kind"] == "frames":
        return None  # a request that failed is counted, and has no frames
    if other is None or other.skipped is not None:
        return "the case was not run"
    a, b = mine.outputs, other.outputs
    if a is None or b is None:
        return "no outputs were recorded"
    if a["digest"] == b["digest"]:
        return None
    key = (a["digest"], b["digest"])
    if key not in said:
        said[key] = _where(a, b, values)
    return said[key]


def _where(a: Outputs, b: Outputs, values: StoredValues) -> str | None:
    """Say where two outputs differ; None where they do not, as far as both are known."""
    kinds = {a["kind"], b["kind"]}
    if kinds == {"array"}:
        return array_difference(a, b, values)
    if kinds == {"tokens"}:
        return token_difference(a, b)
    if kinds <= {"tokens", "text"}:
        return text_difference(a, b)
    return f"{a['kind']} and {b['kind']} outputs"


def _units(a: Outputs, b: Outputs | None) -> dict[str, float]:
    """Return for each request, token row or pick the share that agrees from the start, 0 to 1."""
    if a["kind"] == "frames":
        return {} if b is None else frame_verification.verified_shares(b)
    if b is not None and {a["kind"], b["kind"]} in ({"text"}, {"text", "tokens"}):
        return text_shares(a, b)
    if b is None or a["kind"] != b["kind"]:
        names = range(_size(a)) if a["kind"] == "array" else (r["id"] for r in a["requests"])
        return {str(name): 0.0 for name in names}
    if a["kind"] == "array":
        rows, others = checksums(a["rows"]), checksums(b["rows"])
        same = rows == others if len(rows) == len(others) else np.zeros(len(rows), bool)
        return {str(i): float(ok) for i, ok in enumerate(same)}
    theirs = {r["id"]: r["tokens"] for r in b["requests"]}
    shares = {}
    for request in a["requests"]:
        mine, other = request["tokens"], theirs.get(request["id"], [])
        # A prefix of a longer output is not an agreement.
        longest = max(len(mine), len(other), 1)
        shares[request["id"]] = 1.0 if mine == other else first_difference(mine, other) / longest
    return shares


def above_noise_floor(arm: OutputAgreement, control: OutputAgreement, alpha: float) -> str | None:
    """Say how an arm mismatches more often than the control does; None if it does not.

    One-sided R. A. Fisher's exact test over requests or token rows.
    """
    misses, floor = arm.total - arm.agree, control.total - control.agree
    p = fisher_p(misses, arm.total, floor, control.total, "greater")
    if p > alpha:
        return None
    return (
        f"{arm.arm}: {misses} of {arm.total} outputs differ from the baseline's, "
        f"{floor} of {control.total} of the control's (Fisher p = {p:.2g})"
    )
