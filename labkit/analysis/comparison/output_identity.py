"""Output identity: whether arms give the same outputs, and where they first differ.

Every run is compared with one reference run, the first successful run of the baseline, so that an
arm that does not reproduce its own outputs is detected too. Digests decide whether outputs are
equal. Finer checksums are read only to locate a difference (:mod:`.first_output_difference`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.analysis.comparison.first_output_difference import (
    Outputs,
    array_difference,
    checksums,
    first_difference,
    text_difference,
    text_shares,
    token_difference,
)
from labkit.analysis.statistics.bimodality import fisher_p
from labkit.records import CaseRecord, Record, StudyPath

IDENTITY_CLAIMS = {
    "bitwise": "outputs bit-identical",
    "tokens": "outputs token-identical",
    "noise_floor": "outputs differ no more often than the control's",
    "quality": "quality within the limits",
    "frames": "every frame is the decoder's at that index",
}


@dataclass(frozen=True)
class OutputDifference:
    """A case in one run whose outputs differ from the reference run's; ``where``: in a phrase."""

    arm: str
    run: str
    case: str
    where: str


@dataclass(frozen=True)
class OutputAgreement:
    """How many of an arm's ``total`` outputs agree with the reference.

    An output is a request, a token row or a picked frame. It agrees only if it does so in every run
    of the arm. ``prefix`` is a mean over outputs: of each output, the share (0 to 1) before its
    first difference, in the run in which it differs earliest.
    """

    arm: str
    agree: int
    total: int
    prefix: float


@dataclass(frozen=True)
class IdentityReport:
    """All differences from the reference run (None: no successful one), and the arms' agreement."""

    reference: str | None
    differences: tuple[OutputDifference, ...]
    agreement: tuple[OutputAgreement, ...]

    def first(self, arm: str) -> OutputDifference | None:
        """Return an arm's first difference in run order, or None."""
        return next((d for d in self.differences if d.arm == arm), None)


def compare_outputs(
    records: Sequence[Record], arms: Sequence[str], cell_dir: StudyPath, claim: str = "none"
) -> IdentityReport:
    """Compare the outputs of every successful run with those of the reference run.

    The reference is the first successful run of ``arms[0]``. If ``claim`` is ``bitwise``, every arm
    must also pick the same frames as the reference.
    """
    reference = next((r for r in records if r.ok and r.arm == arms[0]), None)
    if reference is None:
        return IdentityReport(None, (), ())
    # If the reference run lacks a case of another baseline run, an empty case stands for it.
    names = (c.case for r in records if r.ok and r.arm == arms[0] for c in r.cases)
    expected = {name: CaseRecord(name) for name in names} | {c.case: c for c in reference.cases}
    total = sum(_size(c.outputs) for c in reference.cases if c.outputs is not None)
    differences: list[OutputDifference] = []
    # A block may leave out a case, for all of its arms.
    measured: dict[int, set[str]] = {}
    for record in records:
        measured.setdefault(record.block, set()).update(case.case for case in record.cases)
    # Cache by pair of digests: many runs differ from the reference in the same way.
    known: dict[tuple[str, str], str | None] = {}
    # By arm: each differing output's share that agrees, in the run where it is smallest.
    shares: dict[str, dict[tuple[str, str], float]] = {}
    counted: set[tuple[str, str, str | None]] = set()
    for record in records:
        if not record.ok or record.arm not in arms:
            continue
        cases = {c.case: c for c in record.cases}
        worst = shares.setdefault(record.arm, {})
        for name in [name for name in expected if name in measured[record.block]]:
            reference_case, case = expected[name], cases.get(name)
            where = _difference(reference_case, case, cell_dir, known, claim == "bitwise")
            if where is None:
                continue
            differences.append(OutputDifference(record.arm, record.run, name, where))
            outputs = None if case is None else case.outputs
            # Runs with the same outputs have the same shares: those of frames are not in a digest.
            key = (record.arm, name, None if outputs is None else outputs["digest"])
            frames = outputs is not None and outputs["kind"] == "frames"
            if reference_case.outputs is None or (key in counted and not frames):
                continue
            counted.add(key)
            for output, share in _shares(reference_case.outputs, outputs).items():
                worst[name, output] = min(share, worst.get((name, output), 1.0))
    agreement = tuple(_agreement(arm, shares[arm], total) for arm in arms if arm in shares)
    return IdentityReport(reference.run, tuple(differences), agreement)


def _size(outputs: Outputs) -> int:
    if outputs["kind"] == "frames":
        return len(outputs["picks"])
    return int(outputs["shape"][0]) if outputs["kind"] == "array" else len(outputs["requests"])


def _agreement(arm: str, worst: Mapping[tuple[str, str], float], total: int) -> OutputAgreement:
    missing = [1.0 - share for share in worst.values() if share < 1.0]
    return OutputAgreement(arm, total - len(missing), total, 1.0 - sum(missing) / (total or 1))


def _difference(
    reference: CaseRecord,
    case: CaseRecord | None,
    cell_dir: StudyPath,
    known: dict[tuple[str, str], str | None],
    bitwise: bool,
) -> str | None:
    """Describe in a phrase how the outputs of ``case`` differ from those of ``reference``.

    Return None if they are equal, if the reference skipped the case, or if neither run has outputs.
    ``case`` is None if the arm's run lacks this case. ``known`` caches results by the two digests.
    """
    outputs = None if case is None else case.outputs
    if outputs is not None and outputs["kind"] == "frames":
        return _frames_difference(reference.outputs, outputs, bitwise)
    if reference.skipped is not None or (reference.outputs is None and outputs is None):
        return None
    if reference.outputs is not None and reference.outputs["kind"] == "frames":
        return None  # the request failed and has no frames; the failure is counted elsewhere
    if case is None or case.skipped is not None:
        return "the case was not run"
    a, b = reference.outputs, case.outputs
    if a is None or b is None:
        return "no outputs were recorded"
    if a["digest"] == b["digest"]:
        return None
    if (key := (a["digest"], b["digest"])) not in known:
        known[key] = _where(a, b, cell_dir)
    return known[key]


def _where(a: Outputs, b: Outputs, cell_dir: StudyPath) -> str | None:
    """Return a phrase on where two unequal outputs first differ; None if they agree as texts."""
    kinds = {a["kind"], b["kind"]}
    if kinds == {"array"}:
        return array_difference(a, b, cell_dir)
    if kinds == {"tokens"}:
        return token_difference(a, b)
    if kinds <= {"tokens", "text"}:
        return text_difference(a, b)
    return f"the kinds of output differ: {a['kind']} and {b['kind']}"


def _shares(a: Outputs, b: Outputs | None) -> dict[str, float]:
    """Return, for each output of ``a``, the share (0 to 1) before its first difference from ``b``.

    The share of a token row or a picked frame is 0 or 1. Token rows that agree may be left out.
    """
    if a["kind"] == "frames":
        return {} if b is None else _verified_shares(b)
    if b is not None and {a["kind"], b["kind"]} in ({"text"}, {"text", "tokens"}):
        return text_shares(a, b)
    if b is None or a["kind"] != b["kind"]:
        names = range(_size(a)) if a["kind"] == "array" else (r["id"] for r in a["requests"])
        return {str(name): 0.0 for name in names}
    if a["kind"] == "array":
        rows, others = checksums(a["rows"]), checksums(b["rows"])
        differ = rows != others if len(rows) == len(others) else np.ones(len(rows), bool)
        return {str(row): 0.0 for row in np.flatnonzero(differ)}
    theirs = {r["id"]: r["tokens"] for r in b["requests"]}
    shares = {}
    for request in a["requests"]:
        mine, other = request["tokens"], theirs.get(request["id"], [])
        # If one output is a prefix of the other, the share is below 1.
        longest = max(len(mine), len(other), 1)
        shares[request["id"]] = 1.0 if mine == other else first_difference(mine, other) / longest
    return shares


def above_noise_floor(arm: OutputAgreement, control: OutputAgreement, alpha: float) -> str | None:
    """Return a message if an arm's outputs differ more often than the control's, else None.

    The test is R. A. Fisher's exact test, one-sided at level ``alpha``, over requests, token rows
    or picked frames.
    """
    misses, floor = arm.total - arm.agree, control.total - control.agree
    p = fisher_p(misses, arm.total, floor, control.total, "greater")
    if p > alpha:
        return None
    return (
        f"{arm.arm}: {misses} of {arm.total} outputs differ from the baseline's; "
        f"of the control's outputs, {floor} of {control.total} differ (Fisher p = {p:.2g})"
    )


def _frames_difference(reference: Outputs | None, outputs: Outputs, all_alike: bool) -> str | None:
    """Return a phrase on the first error in a case's frames, or None.

    ``reference`` is the baseline's output, or None if the baseline did not serve the case.
    ``outputs`` is compared with the reference if ``all_alike``, or if both arms pick exactly the
    requested positions.
    """
    count = len(outputs["picks"])
    if len(outputs["asked"]) != count:
        return f"{count} frames were returned, but {len(outputs['asked'])} were requested"
    frames = zip(outputs["asked"], outputs["picks"], strict=True)
    for pick, (requested, picked) in enumerate(frames):
        if requested != picked:
            return f"pick {pick} is frame {picked}, but frame {requested} was requested"
    pairs = zip(outputs["pixels"], outputs["decoder"], strict=True)
    wrong = [pick for pick, (pixels, decoder) in enumerate(pairs) if pixels != decoder]
    if wrong:
        place = outputs["picks"][wrong[0]]
        return (
            f"the pixels of pick {wrong[0]} are not those that the decoder returns for frame "
            f"{place} ({len(wrong)} of {count} picks)"
        )
    if reference is None or not (all_alike or (outputs["wished"] and reference["wished"])):
        return None
    return _against(reference, outputs)


def _against(reference: Outputs, outputs: Outputs) -> str | None:
    if outputs["digest"] == reference["digest"]:
        return None
    if len(outputs["picks"]) != len(reference["picks"]):
        return f"{len(outputs['picks'])} frames, but {len(reference['picks'])} in the baseline"
    own, others = (list(zip(o["picks"], o["pixels"], strict=True)) for o in (outputs, reference))
    first = first_difference(own, others)
    if first == len(own):
        return "the digests of the outputs differ, but those of all frames agree"
    return f"the pixels first differ at pick {first}, frame {outputs['picks'][first]}"


def _verified_shares(outputs: Outputs) -> dict[str, float]:
    """Return, by index, 1.0 of a pick that is the requested frame as decoded, else 0.0."""
    fields = (outputs[key] for key in ("asked", "picks", "pixels", "decoder"))
    rows = enumerate(zip(*fields, strict=False))
    return {str(i): float(asked == pick and own == true) for i, (asked, pick, own, true) in rows}
