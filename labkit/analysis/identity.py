"""Are the outputs the same, and if not, where do they first differ?

Every run is compared with one reference, the first good run of the baseline, so that an
arm that does not repeat itself is caught too. Digests decide; the finer fingerprints are
only opened to say where: for an array the first token row and head (from their CRC-32
lists), for requests the request, the position, both tokens and the reference's logit
margin there.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.analysis.modes import fisher_p
from labkit.experiment.record import Record

Outputs = Mapping[str, Any]
CLAIMS = {
    "bitwise": "outputs bit-identical",
    "tokens": "outputs token-identical",
    "noise_floor": "outputs no further apart than the control's",
}


@dataclass(frozen=True)
class Difference:
    """One run's case that is not the reference's; ``where`` is a phrase for people."""

    arm: str
    run: str
    case: str
    where: str


@dataclass(frozen=True)
class Agreement:
    """How many outputs of an arm agree with the reference, and for how long.

    Units are requests or token rows, counted once per arm: one agrees if it does in every
    run. ``prefix``: mean share of a unit's tokens before the first difference (0 to 1).
    """

    arm: str
    agree: int
    total: int
    prefix: float


@dataclass(frozen=True)
class IdentityReport:
    """All differences from the reference run, and each arm's agreement with it."""

    reference: str | None
    differences: tuple[Difference, ...]
    agreement: tuple[Agreement, ...]


def compare_outputs(records: Sequence[Record], arms: Sequence[str]) -> IdentityReport:
    """Compare every good run's outputs with the first good run of the first of ``arms``."""
    reference = next((r for r in records if r.ok and r.arm == arms[0]), None)
    if reference is None:
        return IdentityReport(None, (), ())
    expected = {c.case: c for c in reference.cases}
    total = sum(_size(c.outputs) for c in reference.cases if c.outputs is not None)
    differences: list[Difference] = []
    # Only units that ever differ are kept: the share that agrees, the worst of all runs.
    shares: dict[str, dict[tuple[str, str], float]] = {}
    for record in records:
        if not record.ok or record.arm not in arms:
            continue
        given = {c.case: c for c in record.cases}
        worst = shares.setdefault(record.arm, {})
        for name, case in expected.items():
            other = given.get(name)
            where = _case_difference(case.skipped, case.outputs, other)
            if where is None:
                continue
            differences.append(Difference(record.arm, record.run, name, where))
            if case.outputs is not None:
                theirs = other.outputs if other is not None else None
                for unit, share in _units(case.outputs, theirs).items():
                    worst[name, unit] = min(share, worst.get((name, unit), 1.0))
    agreement = tuple(_agreement(arm, shares[arm], total) for arm in arms if arm in shares)
    return IdentityReport(reference.run, tuple(differences), agreement)


def _size(outputs: Outputs) -> int:
    return int(outputs["shape"][0]) if outputs["kind"] == "array" else len(outputs["requests"])


def _agreement(arm: str, worst: Mapping[tuple[str, str], float], total: int) -> Agreement:
    lost = [1.0 - share for share in worst.values() if share < 1.0]
    return Agreement(arm, total - len(lost), total, 1.0 - sum(lost) / total if total else 1.0)


def _case_difference(skipped: str | None, expected: Outputs | None, other: Any) -> str | None:
    if skipped is not None:
        return None
    if other is None or other.skipped is not None:
        return "the case was not run"
    if expected is None or other.outputs is None:
        return "no outputs were recorded"
    if expected["digest"] == other.outputs["digest"]:
        return None
    if expected["kind"] != other.outputs["kind"]:
        return f"{expected['kind']} and {other.outputs['kind']} outputs"
    if expected["kind"] == "array":
        return _array_difference(expected, other.outputs)
    return _token_difference(expected, other.outputs)


def _crc(text: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.frombuffer(base64.b64decode(text), dtype="<u4").astype(np.uint32)


def _array_difference(a: Outputs, b: Outputs) -> str:
    if a["shape"] != b["shape"] or a["dtype"] != b["dtype"]:
        return f"{a['dtype']} {a['shape']} and {b['dtype']} {b['shape']}"
    rows = np.flatnonzero(_crc(a["rows"]) != _crc(b["rows"]))
    heads = np.flatnonzero(_crc(a["heads"]) != _crc(b["heads"]))
    if not len(rows) or not len(heads):
        return "bytes differ, but no row's or head's checksum does"
    tokens, total = len(rows), a["shape"][0]
    return (
        f"first at token {rows[0]}, head {heads[0]} "
        f"({tokens} of {total} token rows, {len(heads)} of {a['shape'][1]} heads)"
    )


def _token_difference(a: Outputs, b: Outputs) -> str:
    others = {r["id"]: r for r in b["requests"]}
    differing = [r for r in a["requests"] if r["tokens"] != _tokens(others, r["id"])]
    if not differing:
        return "digests differ, but no request's tokens do"
    first = differing[0]
    count = f"({len(differing)} of {len(a['requests'])} requests)"
    if first["id"] not in others:
        return f"request {first['id']} is missing {count}"
    mine, theirs = first["tokens"], others[first["id"]]["tokens"]
    at = _first_difference(mine, theirs)
    tokens = " and ".join(str(t[at]) if at < len(t) else "the end" for t in (mine, theirs))
    margins = first.get("margins")
    margin = f", logit margin {margins[at]:.3g}" if margins and at < len(margins) else ""
    return f"first in request {first['id']} at position {at}: {tokens}{margin} {count}"


def _tokens(requests: Mapping[str, Any], request_id: str) -> Any:
    return requests[request_id]["tokens"] if request_id in requests else None


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _units(a: Outputs, b: Outputs | None) -> dict[str, float]:
    """Give for each request or token row the share that agrees from the start, 0 to 1."""
    if b is None or a["kind"] != b["kind"]:
        names = range(_size(a)) if a["kind"] == "array" else (r["id"] for r in a["requests"])
        return {str(name): 0.0 for name in names}
    if a["kind"] == "array":
        rows, others = _crc(a["rows"]), _crc(b["rows"])
        same = rows == others if len(rows) == len(others) else np.zeros(len(rows), bool)
        return {str(i): float(ok) for i, ok in enumerate(same)}
    theirs = {r["id"]: r["tokens"] for r in b["requests"]}
    shares = {}
    for request in a["requests"]:
        mine, other = request["tokens"], theirs.get(request["id"], [])
        # A prefix of a longer output is not an agreement.
        longest = max(len(mine), len(other), 1)
        shares[request["id"]] = 1.0 if mine == other else _first_difference(mine, other) / longest
    return shares


def above_noise_floor(arm: Agreement, control: Agreement, alpha: float) -> str | None:
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
