"""Gates: conditions that must hold before a verdict may be given.

A gate is ``pass``, ``fail`` or ``unclaimed``. A failure names its reason and makes the verdicts
of the affected arms invalid. A failure of the baseline or the control affects every arm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.analysis.comparison import client_lateness
from labkit.analysis.comparison.observations import MEASURED_OUTCOMES
from labkit.analysis.comparison.output_identity import IdentityReport, above_noise_floor
from labkit.analysis.comparison.perplexity_and_kl import broken_limits, kl_is_bound, text_qualities
from labkit.analysis.comparison.request_comparability import unserved_errors
from labkit.analysis.model.cell_model import GateResult
from labkit.analysis.statistics.text_window_intervals import CONFIDENCE
from labkit.config import count_text
from labkit.records import Arm, Record

SWAP_GROWTH_BYTES = 16 << 20
MAX_SHOWN_REASONS = 8


@dataclass
class Gate:
    """A gate's status and reasons.

    ``causes`` maps an arm's name to the reason why the arm's verdicts are invalid. The reason under
    the key None applies to every arm.
    """

    status: str
    reasons: list[str] = field(default_factory=list)
    causes: dict[str | None, str] = field(default_factory=dict)

    def fail(self, reason: str, arm: str | None, cause: str) -> None:
        """Fail the gate for ``arm`` (None: every arm). An arm's first cause is kept."""
        self.status = "fail"
        self.reasons.append(reason)
        self.causes.setdefault(arm, cause)

    def cause(self, arm: str) -> str | None:
        """Return the reason why this gate forbids a verdict on ``arm``, or None."""
        return self.causes.get(arm, self.causes.get(None))

    def result(self) -> GateResult:
        """Return the status and the first 8 reasons; a ninth entry counts those left out."""
        shown = self.reasons[:MAX_SHOWN_REASONS]
        hidden = len(self.reasons) - len(shown)
        rest = [f"{hidden} more"] if hidden else []
        return GateResult(self.status, (*shown, *rest))


def healthy(
    records: Sequence[Record], arms: Sequence[Arm] = (), across_hosts: bool = False
) -> Gate:
    """Fail on a failed run, unserved requests, swap growth, late clients, or a changed host.

    A client that was late in few of an arm's runs only disturbs their blocks
    (:mod:`labkit.analysis.robustness.disturbed_runs`).

    An arm that claims to run out of memory must do so in every run. It gets no verdict. With
    ``across_hosts`` the host may change from block to block, but not within a block.

    No run is excluded: an arm itself can cause the first three failures, and excluding its runs
    could favour it. Instead every verdict of the cell is invalid.
    """
    gate = Gate("pass")
    if not records:
        gate.fail("no run has left a record", None, "no runs")
    claimed = {arm.name for arm in arms if arm.out_of_memory}
    for record in records:
        if record.arm in claimed and record.outcome in MEASURED_OUTCOMES:
            reason = "it did not run out of memory, as ablation.claims.out_of_memory says"
            gate.fail(f"{record.run}: {reason}", record.arm, reason)
    for name in claimed:
        gate.causes.setdefault(name, "out of memory, as claimed")
    for alike in _own_failures(records):
        record = alike[0]
        if record.arm in claimed and record.outcome == "oom":
            continue
        more = f"; {count_text(len(alike) - 1, 'more run')} failed alike" if len(alike) > 1 else ""
        reason = f"{record.outcome}: {record.detail}{_aftermath(record, records)}{more}"
        cause = f"run {record.run} failed ({record.outcome})"
        gate.fail(f"{record.run}: {reason}", None, cause)
    for reason, cause in machine_failures(records, across_hosts):
        gate.fail(reason, None, cause)
    for unserved in unserved_errors(records):
        gate.fail(*unserved)
    return gate


def machine_failures(records: Sequence[Record], across_hosts: bool) -> Iterator[tuple[str, str]]:
    """Yield the reason and cause of what makes all times of a cell doubtful.

    It is swap that grew, a client that was often late, or a host that changed.
    """
    for record in records:
        growth = _used_swap(record.environment_end) - _used_swap(record.environment)
        if growth > SWAP_GROWTH_BYTES:
            reason = f"{record.run}: swap grew by {growth / 2**20:.0f} MiB during the run"
            yield reason, f"swap grew in {record.run}"
    for record in client_lateness.often_late_runs(records):
        for late in client_lateness.lateness_errors(record):
            yield f"{record.run}: {late}", f"the client was late in {record.run}"
    for hosts in _hosts(records, across_hosts):
        if len(hosts) > 1:
            runs = ", ".join(f"{host} ({run})" for host, run in hosts.items())
            yield f"runs are from different hosts: {runs}", "the host changed"


def _own_failures(records: Sequence[Record]) -> Iterable[list[Record]]:
    """Return the runs that no other run's failure ended, in groups of one arm and one reason."""
    groups: dict[tuple[str, str, str | None], list[Record]] = {}
    runs = {record.run for record in records}
    for r in records:
        if r.outcome not in MEASURED_OUTCOMES and r.known_notes.get("failed_by") not in runs:
            groups.setdefault((r.arm, r.outcome, r.detail), []).append(r)
    return groups.values()


def _aftermath(record: Record, records: Sequence[Record]) -> str:
    """Return clauses on a failed run: the other arms that ended with its process, and its log."""
    ended = [other.arm for other in records if other.known_notes.get("failed_by") == record.run]
    runs = f"; this ended the runs of {', '.join(ended)} in the same process" if ended else ""
    log = record.known_notes.get("log")
    return runs + (f"; log: {log}" if log else "")


def _never_ran(gate: Gate, arm: Arm, records: Iterable[Record]) -> bool:
    """Return whether no run of ``arm`` succeeded; then the gate fails (*healthy* says why)."""
    if any(r.arm == arm.name and r.outcome in MEASURED_OUTCOMES for r in records):
        return False
    gate.status = "fail"
    gate.reasons.append(f"{arm.name} has no successful run")
    return True


def _hosts(records: Sequence[Record], by_block: bool) -> Iterable[dict[str, str]]:
    """Return a run by host, for each group that must share one: blocks, or the whole cell."""
    groups: dict[int, dict[str, str]] = {}
    for record in records:
        for state in (record.environment, record.environment_end):
            if state.get("host"):
                group = groups.setdefault(record.block if by_block else 0, {})
                group.setdefault(str(state["host"]), record.run)
    return groups.values()


def _used_swap(environment: Mapping[str, Any]) -> int:
    swap = environment.get("swap")
    return int(swap.get("used_bytes", 0)) if isinstance(swap, Mapping) else 0


def engaged(records: Sequence[Record], arms: Sequence[Arm]) -> Gate:
    """Fail if a claimed counter is 0 in a run that has measurements.

    Every arm implicitly claims its engine's own counter. If an arm claims nothing else, the gate
    is ``unclaimed`` instead of ``pass``.
    """
    gate = Gate("pass")
    for arm in arms:
        claims = dict.fromkeys(filter(None, (arm.engine_counter, *arm.engaged)))
        if not arm.engaged and gate.status == "pass":
            gate.status = "unclaimed"
        if arm.engaged and not arm.out_of_memory and _never_ran(gate, arm, records):
            continue
        affected = arm.name if arm.role == "arm" else None
        for record in records:
            if record.arm != arm.name or record.outcome not in MEASURED_OUTCOMES:
                continue
            zero = [name for name in claims if not record.counters.get(name, 0) > 0]
            for name in zero:
                cause = f"vacuous: {name} stayed 0 in {record.run}"
                gate.fail(f"{arm.name}: {name} is 0 in {record.run}", affected, cause)
            if record.outcome == "vacuous" and not zero:
                gate.fail(f"{record.run}: {record.detail}", affected, f"vacuous: {record.detail}")
    return gate


def identical(
    report: IdentityReport,
    arms: Sequence[Arm],
    records: Iterable[Record],
    alpha: float,
    confidence: float = CONFIDENCE,
) -> Gate:
    """Fail if outputs differ by more than the baseline's identity claim allows.

    ``alpha`` is the level of the test against the noise floor, which only the claim ``noise_floor``
    uses. ``confidence`` is that of the intervals of the claim ``quality``.
    """
    claim = arms[0].identity if arms else "none"
    if claim == "none":
        return Gate("unclaimed")
    gate = Gate("pass")
    if claim == "quality":
        _quality(gate, arms, list(records), confidence)
        return gate
    if report.reference is None:
        gate.fail("the baseline has no successful run to compare with", None, "no outputs")
        return gate
    by_run = {record.run: record for record in records}
    for arm in arms:
        if not arm.out_of_memory:
            _never_ran(gate, arm, by_run.values())
    bare = (r for r in by_run.values() if all(case.outputs is None for case in r.cases))
    without = next((r for r in bare if r.ok), None)
    if without is not None:
        gate.fail(f"{without.run}: no outputs were recorded", None, "no outputs")
    roles = {arm.name: arm.role for arm in arms}
    if claim == "noise_floor":
        _noise_floor(gate, report, roles, alpha)
        return gate
    for d in report.differences:
        if d.arm == arms[0].name or roles[d.arm] == "control":
            affected, what = None, f"{d.arm} does not reproduce its own outputs"
        else:
            affected, what = d.arm, f"{d.arm} differs from {arms[0].name}"
        other_prompts = _other_prompts([by_run[d.run], by_run[report.reference]])
        reason = f"{what}: case {d.case!r}, {d.where}; {d.run} against {report.reference}"
        cause = f"outputs differ: case {d.case!r}, {d.where}"
        gate.fail(reason + other_prompts, affected, cause + other_prompts)
    return gate


def _other_prompts(records: Iterable[Record]) -> str:
    """Return a clause if a server tokenised prompts to other ids than the workload's, else ""."""
    for record in records:
        if count := record.counters.get("prompts.respelled", 0):
            return (
                f"; {record.arm}'s server takes text and tokenised {count:,.0f} prompts to other "
                "ids than the workload's: use a workload of texts, such as workload=chat"
            )
    return ""


def _quality(gate: Gate, arms: Sequence[Arm], records: Sequence[Record], confidence: float) -> None:
    roles = {arm.name: arm.role for arm in arms}
    qualities = text_qualities(list(roles), records, confidence)
    for arm in sorted(roles.keys() - {quality.arm for quality in qualities}):
        gate.fail(f"{arm}: no run has scored texts", None, "no scored texts")
    for quality in qualities:
        affected = quality.arm if roles[quality.arm] == "arm" else None
        is_bound = kl_is_bound(quality.arm, arms[0].name, records)
        for broken in broken_limits(quality, arms[0].quality, is_bound=is_bound):
            gate.fail(f"{quality.arm}: {broken}", affected, f"quality: {broken}")


def _noise_floor(
    gate: Gate, report: IdentityReport, roles: Mapping[str, str], alpha: float
) -> None:
    control = next((a for a in report.agreement if roles[a.arm] == "control"), None)
    if control is None or not control.total:
        reason = "the noise floor needs the A/A control; set design.control=true"
        gate.fail(reason, None, "no control")
        return
    for agreement in (each for each in report.agreement if roles[each.arm] == "arm"):
        above = above_noise_floor(agreement, control, alpha)
        if above is not None:
            gate.fail(above, agreement.arm, f"outputs above the noise floor: {above}")
