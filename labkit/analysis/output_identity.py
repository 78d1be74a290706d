"""Output identity: whether arms give the same outputs, and where they first differ.

Every run is compared with one reference, the first successful run of the baseline, so that an
arm that does not reproduce its own outputs is caught too. Digests decide; finer checksums are
only read to locate a difference (:mod:`labkit.analysis.first_divergence`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.analysis import frame_identity
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
    "noise_floor": "outputs differ no more often than the control's",
    "frames": "every frame is the decoder's at that index",
}


@dataclass(frozen=True)
class OutputDifference:
    """A run's case whose outputs differ from the reference; ``where`` is a phrase for readers."""

    arm: str
    run: str
    case: str
    where: str


@dataclass(frozen=True)
class OutputAgreement:
    """How many outputs of an arm agree with the reference, and up to where.

    An output is a request, a token row or a picked frame. It is counted once per arm and agrees
    if it does in every run. ``prefix`` is the mean share of an output's tokens before the first
    difference (0 to 1).
    """

    arm: str
    agree: int
    total: int
    prefix: float


@dataclass(frozen=True)
class IdentityReport:
    """All differences from the reference run, and each arm's agreement with it.

    ``reference`` is None if the baseline has no successful run.
    """

    reference: str | None
    differences: tuple[OutputDifference, ...]
    agreement: tuple[OutputAgreement, ...]

    def first(self, arm: str) -> OutputDifference | None:
        """Return an arm's first difference in run order, or None."""
        return next((d for d in self.differences if d.arm == arm), None)


def compare_outputs(
    records: Sequence[Record], arms: Sequence[str], values: StoredValues, claim: str = "none"
) -> IdentityReport:
    """Compare the outputs of every successful run with the first one of ``arms[0]``.

    Under the ``claim`` ``bitwise``, arms may not pick other frames than the reference.
    """
    reference = next((r for r in records if r.ok and r.arm == arms[0]), None)
    if reference is None:
        return IdentityReport(None, (), ())
    expected = {c.case: c for c in reference.cases}
    total = sum(_size(c.outputs) for c in reference.cases if c.outputs is not None)
    differences: list[OutputDifference] = []
    # By pair of digests: many runs differ from the reference in the same way.
    known: dict[tuple[str, str], str | None] = {}
    # Only outputs that ever differ: the share that agrees, in the worst of all runs.
    shares: dict[str, dict[tuple[str, str], float]] = {}
    for record in records:
        if not record.ok or record.arm not in arms:
            continue
        cases = {c.case: c for c in record.cases}
        worst = shares.setdefault(record.arm, {})
        for name, case in expected.items():
            other = cases.get(name)
            where = _difference(case, other, values, known, claim == "bitwise")
            if where is None:
                continue
            differences.append(OutputDifference(record.arm, record.run, name, where))
            if case.outputs is not None:
                theirs = other.outputs if other is not None else None
                for output, share in _shares(case.outputs, theirs).items():
                    worst[name, output] = min(share, worst.get((name, output), 1.0))
    agreement = tuple(_agreement(arm, shares[arm], total) for arm in arms if arm in shares)
    return IdentityReport(reference.run, tuple(differences), agreement)


def _size(outputs: Outputs) -> int:
    if outputs["kind"] == "frames":
        return len(outputs["picks"])
    return int(outputs["shape"][0]) if outputs["kind"] == "array" else len(outputs["requests"])


def _agreement(arm: str, worst: Mapping[tuple[str, str], float], total: int) -> OutputAgreement:
    missing = [1.0 - share for share in worst.values() if share < 1.0]
    prefix = 1.0 - sum(missing) / total if total else 1.0
    return OutputAgreement(arm, total - len(missing), total, prefix)


def _difference(
    mine: CaseRecord,
    other: CaseRecord | None,
    values: StoredValues,
    known: dict[tuple[str, str], str | None],
    bitwise: bool,
) -> str | None:
    """Return how a case's outputs differ from the reference's, or None."""
    theirs = None if other is None else other.outputs
    if theirs is not None and theirs["kind"] == "frames":
        return frame_identity.frames_difference(mine.outputs, theirs, bitwise)
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
    if key not in known:
        known[key] = _where(a, b, values)
    return known[key]


def _where(a: Outputs, b: Outputs, values: StoredValues) -> str | None:
    """Return where two outputs differ, or None if their known parts do not."""
    kinds = {a["kind"], b["kind"]}
    if kinds == {"array"}:
        return array_difference(a, b, values)
    if kinds == {"tokens"}:
        return token_difference(a, b)
    if kinds <= {"tokens", "text"}:
        return text_difference(a, b)
    return f"{a['kind']} and {b['kind']} outputs"


def _shares(a: Outputs, b: Outputs | None) -> dict[str, float]:
    """Return the share (0 to 1) of each request, token row or pick that agrees from its start."""
    if a["kind"] == "frames":
        return {} if b is None else frame_identity.verified_shares(b)
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
        # An output that is a prefix of the other does not agree.
        longest = max(len(mine), len(other), 1)
        shares[request["id"]] = 1.0 if mine == other else first_difference(mine, other) / longest
    return shares


def above_noise_floor(arm: OutputAgreement, control: OutputAgreement, alpha: float) -> str | None:
    """Return how much more often an arm differs than the control does, or None.

    R. A. Fisher's exact test, one-sided, over requests or token rows.
    """
    misses, floor = arm.total - arm.agree, control.total - control.agree
    p = fisher_p(misses, arm.total, floor, control.total, "greater")
    if p > alpha:
        return None
    return (
        f"{arm.arm}: {misses} of {arm.total} outputs differ from the baseline's, "
        f"{floor} of {control.total} of the control's (Fisher p = {p:.2g})"
    )
