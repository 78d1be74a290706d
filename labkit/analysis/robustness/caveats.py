"""Caveats: what weakens a result, in two ranks.

Some could change the answer, such as a failed gate, too few blocks or a machine that was busier
during one arm. The others are for the record: the statistics account for them (noise that all arms
share widens the intervals), or they describe the measurement.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.analysis.comparison import server_caveats
from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.comparison.request_comparability import sustained, traffic_notes
from labkit.analysis.comparison.verdict import NOISE_EXCEEDS_MARGIN
from labkit.analysis.number_format import p_text
from labkit.analysis.robustness.cells_by_host import hosts_sentence, on_same_machine
from labkit.analysis.robustness.disturbed_runs import (
    clock_mhz,
    group_by_host,
    memory_wait_share,
    probe_us,
    samples,
    steal_share,
    throttled,
)
from labkit.analysis.robustness.hit_and_acceptance_rates import hit_and_acceptance_rates
from labkit.analysis.robustness.isolation_agreement import isolation_agreements
from labkit.analysis.statistics.bimodality import Bimodality, find_modes
from labkit.analysis.statistics.power import min_blocks_to_claim
from labkit.analysis.text_format import join_names
from labkit.config import count_text
from labkit.records import Record, describe_last_session

MAX_STEAL_SHARE = 0.01
MAX_FOREIGN_CORES = 0.25
MAX_MEMORY_WAIT_SHARE = 0.01
MAX_CLOCK_VARIATION = 0.10
MAX_PROBE_VARIATION = 0.10
MAX_SHOWN_REASONS = 3  # per gate
MIN_P99_REQUESTS = 100  # with fewer, the 99th percentile lies between the two slowest requests
REQUEST_P99 = ("ttft_p99_ms", "tpot_excl_first_p99_ms", "e2e_p99_ms")


@dataclass(frozen=True)
class RankedCaveats:
    """The caveats on a cell's numbers, one line each, the gravest first in each rank."""

    could_change: tuple[str, ...]
    for_the_record: tuple[str, ...]


def ranked_caveats(analysis: CellAnalysis) -> RankedCaveats:
    """Return the caveats on a cell's numbers in two ranks."""
    data, imported = analysis.data, analysis.data.design.imported
    rates = hit_and_acceptance_rates(data.real_arms, data.records)
    could_change = (
        *_failed_gates(analysis),
        *imported.get("could_change", ()),
        *_design(analysis),
        *_noise(analysis),
        *_unserved(analysis),
        *_unsustained(analysis),
        *_p99_of_few(analysis),
        *server_caveats.caveats(data.records),
        *(line for one in rates for line in one.impossible_counts()),
        *_emulated(analysis),
        *_machines(analysis, _machine_changes),
        *_modes(analysis, of_arms=True),
    )
    for_the_record = (
        *_isolation(analysis),
        *_waits(analysis),
        *_machines(analysis, _machine_caveats),
        *_modes(analysis, of_arms=False),
        *_skipped(analysis),
        *imported.get("for_the_record", ()),
    )
    return RankedCaveats(could_change, for_the_record)


def _emulated(analysis: CellAnalysis) -> Iterator[str]:
    if names := analysis.data.emulated:
        yield (
            f"{', '.join(names)}: the Metal kernels were emulated on a CPU; "
            "their times say nothing about Metal"
        )


def _machines(
    analysis: CellAnalysis, find: Callable[[Sequence[Record]], Iterator[str]]
) -> Iterator[str]:
    """Yield what ``find`` says of each host's successful runs, after its name if several."""
    hosts = group_by_host([record for record in analysis.data.records if record.ok])
    for host, records in hosts.items():
        where = f"host {host}: " if len(hosts) > 1 else ""
        yield from (f"{where}{line}" for line in find(records))


def machine_states(analysis: CellAnalysis) -> dict[str, list[str]]:
    """Return in which states the machine was during successful runs, with the caveats on each.

    The states are ``busy machine`` and ``slowed machine`` (heat or power); neither if it was quiet.
    """
    found = {"busy machine": _busy, "slowed machine": _heat_and_power}
    states = {state: list(_machines(analysis, find)) for state, find in found.items()}
    return {state: lines for state, lines in states.items() if lines}


def _failed_gates(analysis: CellAnalysis) -> Iterator[str]:
    for name, gate in analysis.gates.items():
        reasons = gate.reasons if gate.status == "fail" else []
        rest = len(reasons) - MAX_SHOWN_REASONS
        more = [f"and {count_text(rest, 'more reason')}"] if rest > 0 else []
        for reason in (*reasons[:MAX_SHOWN_REASONS], *more):
            yield f"gate {name} failed: {reason}"


def _design(analysis: CellAnalysis) -> Iterator[str]:
    data = analysis.data
    planned, done = data.design.blocks, len(data.blocks_done)
    if done < planned:
        last = describe_last_session(data.dir)
        blocks = f"{done} of {count_text(planned, 'block')}"
        yield f"unfinished: {blocks}; {last}; repeat the command to continue"
    elif data.withheld_reason is not None:
        yield data.withheld_reason
    if analysis.all_computed:
        return
    needed = min_blocks_to_claim(data.criteria.runs)
    if planned < needed:
        runs = f"{count_text(planned, 'block')} of {data.criteria.runs}"
        yield f"estimate only: {runs} cannot support a claim; {needed} blocks can"
    for look in {look.blocks: look for look in data.stopped.values()}.values():
        rows = [repr(case) for case, of_case in data.stopped.items() if of_case == look]
        yield (
            f"decided at the look after {look.blocks} blocks, with the interval of that look "
            f"({100 * (1 - look.alpha):g} %), and then not measured: {', '.join(rows)}"
        )
    if estimates := data.design.estimates:
        names = (f"{case!r} ({math.ceil(s / 60)} min)" for case, s in estimates.items())
        yield (
            "measured in few rounds and not tested, because deciding them would take longer than "
            f"design.time: {', '.join(names)}"
        )
    if (units := data.design.units) is not None:
        yield f"every run has the first {units} requests or windows, a number that a pilot found"
    if (hosts := hosts_sentence(analysis)) is not None:
        yield hosts
    if data.stalls is not None:
        yield from data.stalls.caveats()
    if analysis.data.control is None:
        yield "no A/A control: the noise of this machine is unknown"


def _isolation(analysis: CellAnalysis) -> Iterator[str]:
    if analysis.all_computed:
        return
    beside = analysis.companion()
    if beside is not None and not on_same_machine(analysis, beside):
        yield f"{beside.name} ran on another machine: the two are not compared"
    elif analysis.data.design.isolation == "in_process" and isolation_agreements(analysis) is None:
        yield (
            "all arms were interleaved in one process (design.isolation=in_process): an arm could "
            "disturb another, and differences between processes cancel; design=strict adds "
            "separate processes that must agree"
        )


def _noise(analysis: CellAnalysis) -> Iterator[str]:
    withheld = sum(one.reason == NOISE_EXCEEDS_MARGIN for one in analysis.cell.comparisons)
    margin = analysis.data.criteria.margin_pct
    if withheld:
        yield (
            f"noise exceeds margin: {count_text(withheld, 'verdict')} "
            f"{'is' if withheld == 1 else 'are'} withheld because the A/A control varies by more "
            f"than ±{margin:g} %"
        )
    control = analysis.data.control
    rows = [
        (p, analysis.cell.row_name(row))
        for row in analysis.cell.primary_rows
        if (one := row.comparison(control)) is not None
        if (p := one.p_adjusted) is not None and p <= analysis.data.criteria.alpha
    ]
    if rows:
        p, worst = min(rows)
        where = repr(worst) if len(rows) == 1 else f"{len(rows)} rows, above all in {worst!r}"
        yield (
            f"the A/A control differs from the baseline in {where} (adjusted p = {p_text(p)}): "
            "something other than the arms has an effect"
        )


def _unserved(analysis: CellAnalysis) -> Iterator[str]:
    for arm, notes in traffic_notes(analysis.data.records).items():
        unserved = [one for note in notes for one in note.get("unserved", ())]
        if unserved:
            refused, failed = (sum(n[key] for n in notes) for key in ("refused", "failed"))
            total, first = sum(n["requests"] for n in notes), unserved[0]
            error = str(first["error"]).removeprefix(f"request {first['id']}: ")
            yield (
                f"{arm}: {refused + failed} of {count_text(total, 'request')} were not served, "
                f"{refused} of them without a first token (request {first['id']}: {error}); its "
                "numbers describe the rest"
            )


def _unsustained(analysis: CellAnalysis) -> Iterator[str]:
    """Yield a caveat on each arm with a run whose requests were sent more slowly than drawn."""
    for arm, notes in traffic_notes(analysis.data.records).items():
        slow = [note for note in notes if not sustained(note)]
        if slow:
            sent, due = (
                statistics.median(note[key] for note in slow) for key in ("sent_per_s", "due_per_s")
            )
            yield (
                f"{arm}: its load was not sustained in {len(slow)} of "
                f"{count_text(len(notes), 'run')}: requests arrived at {due:.3g} per second and "
                f"were sent at {sent:.3g}"
            )


def _p99_of_few(analysis: CellAnalysis) -> Iterator[str]:
    """Yield a caveat if a p99 that the answer is about is that of too few requests."""
    metrics = dict.fromkeys(row.metric for row in analysis.cell.primary_rows)
    names = join_names([name for name in REQUEST_P99 if name in metrics])
    counts = [
        len(case.known_notes["requests"])
        for record in analysis.data.records
        for case in record.cases
        if case.known_notes.get("requests")
    ]
    if names and min(counts, default=MIN_P99_REQUESTS) < MIN_P99_REQUESTS:
        yield (
            f"{names} of {count_text(min(counts), 'request')} in a run: the p99 of fewer than "
            f"{MIN_P99_REQUESTS} is close to the slowest one"
        )


def _waits(analysis: CellAnalysis) -> Iterator[str]:
    """Yield a caveat on each arm whose median time in the client's queue is above 0.

    In older records, latencies begin when a request is sent.
    """
    for arm, notes in traffic_notes(analysis.data.records).items():
        queued = [note for note in notes if "queue_ms" in note]
        waits = [note["queue_ms"]["p50"] for note in queued]
        if waits and statistics.median(waits) > 0:
            is_counted = all("latency_from" in note for note in queued)
            latencies = "latencies include" if is_counted else "no latency includes"
            yield (
                f"{arm}: half of the requests waited {statistics.median(waits):,.0f} ms or more at "
                f"the client (workload.concurrency); {latencies} this wait"
            )


def _skipped(analysis: CellAnalysis) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for row in analysis.rows:
        if row.skipped is not None:
            reasons.setdefault(row.skipped, []).append(row.case)
    for reason, cases in reasons.items():
        yield f"{count_text(len(cases), 'row')} skipped ({'; '.join(cases)}): {reason}"


def _machine_changes(records: Sequence[Record]) -> Iterator[str]:
    first = records[0].environment.get("settings") or {}
    changes: dict[str, str] = {}
    for record in records[1:]:
        for key, value in (record.environment.get("settings") or {}).items():
            if key in first and first[key] != value:
                changes.setdefault(key, f"{key} {first[key]} to {value} ({record.run})")
    if changes:
        yield f"machine settings changed between runs: {', '.join(changes.values())}"


def _machine_caveats(records: Sequence[Record]) -> Iterator[str]:
    """Yield caveats from the runs' fingerprints, probes before their arms, and observers."""
    yield from _busy(records)
    clocks = [mhz for r in records if (mhz := clock_mhz(r)) is not None]
    if clocks and max(clocks) / min(clocks) - 1 > MAX_CLOCK_VARIATION:
        yield f"the CPU's clock varied from {min(clocks):,.0f} to {max(clocks):,.0f} MHz"
    yield from _heat_and_power(records)
    probes = [us for r in records if (us := probe_us(r)) is not None]
    if len(probes) > 2:
        low, high = np.percentile(probes, [10, 90])
        if high / low - 1 > MAX_PROBE_VARIATION:
            yield (
                f"the machine's own speed varied by {100 * (high / low - 1):.0f} % "
                "between runs (arm-blind probe, 10th to 90th percentile)"
            )
    removed = sorted(
        {str(v) for r in records for v in r.known_notes.get("removed_environment", ())}
    )
    if removed:
        yield f"inherited environment variables were removed for all arms: {', '.join(removed)}"


def _busy(records: Sequence[Record]) -> Iterator[str]:
    foreign = [x for r in records for x in samples(r, "foreign_cores")]
    if foreign and statistics.fmean(foreign) > MAX_FOREIGN_CORES:
        yield f"other processes used {statistics.fmean(foreign):.1f} cores on average"
    steal = [s for r in records if (s := steal_share(r)) is not None]
    if steal and max(steal) > MAX_STEAL_SHARE:
        yield f"the hypervisor took up to {100 * max(steal):.0f} % of the CPU time of a run"
    waited = max((memory_wait_share(r) or 0.0 for r in records), default=0.0)
    if waited > MAX_MEMORY_WAIT_SHARE:
        yield f"processes waited for memory (up to {100 * waited:.0f} % of a run)"
    if any(level > 1 for r in records for level in samples(r, "memory_pressure_level")):
        yield "macOS reported memory pressure"


def _heat_and_power(records: Sequence[Record]) -> Iterator[str]:
    hot = sum(map(throttled, records))
    if hot:
        yield f"heat slowed the CPU in {hot} of {count_text(len(records), 'run')}"
    if any((r.environment.get("power") or {}).get("source") == "Battery Power" for r in records):
        yield "the machine ran on battery"
    if any(r.environment.get("low_power_mode") for r in records):
        yield "low power mode was on"
    for name in ("time_machine", "spotlight"):
        if any((r.environment.get("background") or {}).get(name) for r in records):
            yield f"{name.replace('_', ' ').title()} was active during runs"


def primary_modes(analysis: CellAnalysis) -> Iterator[tuple[str, Bimodality]]:
    """Yield (name, modes) for each primary row whose runs fall into two modes."""
    arms = [arm.name for arm in analysis.data.arms]
    for row in analysis.rows:
        if row.primary and row.metric is not None and row.positive:
            values = {arm: [v.value for v in row.arms[arm]] for arm in arms if arm in row.arms}
            logs = {arm: np.log(own) for arm, own in values.items()}
            if (modes := find_modes(logs, arms[0])) is not None:
                yield analysis.cell.row_name(row), modes


def _modes(analysis: CellAnalysis, of_arms: bool) -> Iterator[str]:
    """Yield a single caveat if any primary rows have two modes, with details of the widest gap.

    An arm may differ significantly from the baseline in its share of runs in the upper mode. If
    ``of_arms``, the caveat is yielded only if some arm does, else only if no arm does.
    """
    bimodal, alpha = list(primary_modes(analysis)), analysis.data.criteria.alpha
    significant = any(p <= alpha for _, modes in bimodal for p in modes.fisher_p.values())
    if not bimodal or significant is not of_arms:
        return
    name, modes = max(bimodal, key=lambda item: item[1].gap_pct)
    counts = ", ".join(f"{a} {modes.above_gap[a]} of {modes.total[a]}" for a in modes.above_gap)
    rows = "" if len(bimodal) == 1 else f"in {len(bimodal)} rows, the widest "
    yield (
        f"the runs form two modes {rows}{modes.gap_pct:.0f} % apart in {name!r}; runs above the "
        f"gap: {counts}{_mode_tests(modes, [each for _, each in bimodal])}; no run was dropped"
    )


def _mode_tests(widest: Bimodality, rows: Sequence[Bimodality]) -> str:
    """Return the p-values of Fisher's tests in parentheses; empty if there is only the baseline."""
    if not widest.fisher_p:
        return ""
    tests = ", ".join(f"{arm} p = {p_text(p)}" for arm, p in widest.fisher_p.items())
    least = min(p for row in rows for p in row.fisher_p.values())
    smallest = "" if len(rows) == 1 else f"; smallest p of all rows: {p_text(least)}"
    return f" (Fisher's exact test against the baseline: {tests}{smallest})"
