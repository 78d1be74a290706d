"""Tables of counters: of dispatches, of engines that differ, and rates beside attainable ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from labkit.analysis.document.report_parts import table_section
from labkit.analysis.document.table_model import Column, Table, if_known
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import significant_text
from labkit.analysis.robustness.hit_and_acceptance_rates import (
    AttainedRates,
    hit_and_acceptance_rates,
)
from labkit.records import Record, counter_registry

CaseAndArm = tuple[str, str]
CounterValues = Mapping[str, set[float]]
LEADING_COUNTERS = (
    "attention.search_iterations",
    "attention.dependent_loads",
    "attention.surplus_threadgroups",
    "attention.kv_blocks_visited",
    "attention.bytes",
)
VARIES = "varies"
# Times, and counters from which other counters are derived.
HIDDEN_COUNTERS = (
    "step_ms", "device_ms", "draft.device_ms", "host_ms", "attention.map_us",
    "draft.attention.map_us", "peak_kv_bytes",
)  # fmt: skip
PER_STEP_TIMES = {"host_ms": "host time per step (ms)", "device_ms": "model time per step (ms)"}


def _dispatch_table(cell: Cell, records: Sequence[Record]) -> Table[CaseAndArm] | None:
    """Return the counters of one dispatch by case and arm, or None if no record has any.

    Counters that are 0 everywhere are omitted. So are counters that are never above 1, because they
    only say which path ran, and the gate *engaged* checks them. A counter that differs between
    runs of an arm is not deterministic and is shown as ``varies``.
    """
    counters: dict[CaseAndArm, dict[str, set[float]]] = {}
    for record in records:
        for case in record.cases:
            by_name = counters.setdefault((case.case, record.arm), {}) if record.ok else {}
            for name, value in (case.known_notes.get("counters") or {}).items():
                by_name.setdefault(name, set()).add(float(value))
    pairs = ((name, max(of)) for by_name in counters.values() for name, of in by_name.items())
    leads = LEADING_COUNTERS
    informative = {name for name, most in pairs if most > (0.0 if name in leads else 1.0)}
    names = [
        *(name for name in leads if name in informative),
        *sorted(informative.difference(leads)),
    ]
    if not names:
        return None
    columns = (
        Column[CaseAndArm]("batch", lambda key: key[0], numeric=False),
        Column("arm", lambda key: key[1], numeric=False),
        *(_counter_column(name, counters) for name in names),
    )
    cases = dict.fromkeys(case for case, _ in counters)
    lines = [(case, arm) for case in cases for arm in cell.real_arms if counters.get((case, arm))]
    note = (
        "Counts per dispatch are the same on every machine with the same number of threads. The "
        "kernel itself counts, except in the columns called computed, which follow from its plan "
        "on the host."
    )
    return Table(columns, tuple(lines), (note,))


dispatch_section = table_section("Work per dispatch", _dispatch_table)


def _counter_column(name: str, counters: Mapping[CaseAndArm, CounterValues]) -> Column[CaseAndArm]:
    counter = counter_registry.find_counter(name)
    origin = "" if counter is not None and counter.counted_by_kernel else " (computed)"
    group, _, rest = name.partition(".")
    words = rest.replace("_", " ").replace("kv ", "KV ")
    words = words if group == "attention" else f"{group.replace('_', '-')} {words}"

    def text(key: CaseAndArm) -> str:
        values = counters[key].get(name, set())
        return VARIES if len(values) > 1 else "".join(f"{value:,.0f}" for value in values)

    return Column(words + origin, text)


def _engine_counters_table(cell: Cell) -> Table[str] | None:
    """Return the counters that differ between arms; None for kernels, and with one arm."""
    arms = cell.real_arms
    counters = {arm.name: arm.counters for arm in cell.arms if arm.name in arms}
    if len(counters) < 2 or not any(by_name.get("steps.total") for by_name in counters.values()):
        return None
    every = {name for by_name in counters.values() for name in by_name}
    names = [name for name in sorted(every.difference(HIDDEN_COUNTERS)) if _differs(name, counters)]
    names += [name for name in PER_STEP_TIMES if name in every]
    columns = (
        Column[str]("counter", lambda name: PER_STEP_TIMES.get(name, name), numeric=False),
        *(Column(arm, _counter_text(by_name)) for arm, by_name in counters.items()),
    )
    note = (
        "Medians over runs of the counters that differ between arms. A counter that is 0 or was "
        "not counted is empty."
    )
    return Table(columns, tuple(names), (note,))


engine_counters_section = table_section(
    "Engine counters", lambda cell, records: _engine_counters_table(cell)
)


def _differs(name: str, counters: Mapping[str, Mapping[str, float]]) -> bool:
    return len({by_name.get(name) or 0.0 for by_name in counters.values()}) > 1


def _counter_text(counters: Mapping[str, float]) -> Callable[[str], str]:
    """Return a function from a counter's name to its text: a count, or a time per step."""

    def value(name: str) -> str:
        if name not in PER_STEP_TIMES:
            return count_or_measure_text(counters[name]) if counters.get(name) else ""
        steps = counters.get("steps.total")
        return f"{counters[name] / steps:.3f}" if steps and name in counters else ""

    return value


def count_or_measure_text(value: float) -> str:
    """Format an integer with thousands separators, other numbers to 3 significant digits.

    From 100 on, other numbers have one decimal.
    """
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else significant_text(value, 3)


def _hit_and_acceptance_table(cell: Cell, records: Sequence[Record]) -> Table[AttainedRates]:
    """Return the attainable and attained rates of every arm that has some."""
    rates = hit_and_acceptance_rates(cell.real_arms, records)
    shares = {
        "prefix hits attainable": attrgetter("attainable_hits"),
        "attained": attrgetter("hits"),
        "drafts accepted": attrgetter("accepted"),
        "padding of one rectangle": attrgetter("rectangle"),
        "rows of padding": attrgetter("padded"),
    }
    columns = [Column[AttainedRates]("arm", lambda arm: arm.arm, numeric=False)]
    columns += [
        Column(heading, share, if_known("{:.1%}".format))
        for heading, share in shares.items()
        if any(share(arm) is not None for arm in rates)
    ]
    notes = [f"Disagreement: {line}." for arm in rates for line in arm.impossible_counts()]
    if any(arm.hits is not None for arm in rates):
        notes.append(
            "Attainable: the prompt tokens that an unlimited cache would hit. They are the whole "
            "blocks that a prompt shares with the start of an earlier, finished prompt; one that "
            "repeats an earlier answer can hit more."
        )
    if any(arm.rectangle is not None for arm in rates):
        notes.append(
            "One rectangle: all requests in one batch, each padded to the longest prompt plus the "
            "longest answer. Rows that wait while other prompts are computed are further padding."
        )
    return Table(tuple(columns), tuple(rates), tuple(notes))


hit_and_acceptance_section = table_section(
    "Attainable and attained rates", _hit_and_acceptance_table
)
WORK_SECTIONS = (dispatch_section, engine_counters_section, hit_and_acceptance_section)
