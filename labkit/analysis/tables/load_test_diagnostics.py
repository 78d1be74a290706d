"""Diagnostic tables of a load test: request outcomes, HTTP streams, client overhead; no metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from labkit.analysis.comparison.client_lateness import number_at
from labkit.analysis.comparison.request_comparability import REQUESTS_PER_S, traffic_notes
from labkit.analysis.comparison.server_caveats import ServerArm, server_arms
from labkit.analysis.document.report_parts import table_section
from labkit.analysis.document.table_model import Column, Table, if_known
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import value_text
from labkit.records import Record
from labkit.records.record_notes_schema import TrafficNote

NotesByArm = Mapping[str, Sequence[TrafficNote]]
COUNTS = {
    "requests": "requests", "served": "served", "refused": "ended without a token",
    "failed": "ended after a token",
}  # fmt: skip
TOKEN_COUNTERS = ("usage", "tokenizer", "stream")
STREAMS_NOTE = (
    "Medians over runs. Tokens are counted by the server's usage field, by the model's tokenizer "
    "from the text, and by the stream (its token ids, else its events with text). A chunk is what "
    "one read returned; it is bundled if it held more than one event or token. Chunks never count "
    "as tokens."
)
CLIENT_NOTE = (
    "Medians over runs (ms; CPU in us). The floor is the client's own cost, measured beside every "
    "run with a null server and the same number of streams: the client's part of TTFT, its delay "
    "in seeing a chunk, the error of the gaps that it measures between chunks, and its CPU time "
    "per chunk. The time to connect depends on the server."
)


def _request_outcomes_table(cell: Cell, records: Sequence[Record]) -> Table[str]:
    """Return the outcomes of every arm's requests, as far as records note them."""
    notes = traffic_notes(records)
    arms = [arm for arm in cell.real_arms if arm in notes]
    all_notes = [note for arm_notes in notes.values() for note in arm_notes]
    open_loop = any("late_ms" in note for note in all_notes)
    columns = [Column[str]("arm", str, numeric=False)]
    columns += [_total_column(notes, key, heading) for key, heading in COUNTS.items()]
    if any("good" in note for note in all_notes):
        columns.append(_total_column(notes, "good", "within the limits"))
    if open_loop:
        units = dict.fromkeys(note.get("asked_unit", REQUESTS_PER_S) for note in all_notes)
        unit = "1/s" if [*units] == [REQUESTS_PER_S] else " or ".join(units)
        columns.append(_median_column(notes, f"requested ({unit})", "asked_per_s"))
        columns += [_median_column(notes, heading, path) for heading, path in SENDER_TIMES.items()]
    share = "sender_cpu_share"
    if any(number_at(note, share) is not None for note in all_notes):
        heading = "sender's share of a core"
        columns.append(_median_column(notes, heading, share, "{:.2%}".format))
    lost = any(note.get("refused") or note.get("failed") for note in all_notes)
    times = " but the time of a run" if lost else ""
    lines = [
        f"Requests of all runs. No other number{times} includes requests that were not served."
    ]
    if open_loop:
        lines.append(
            "Medians over runs. Requested: the workload's rate, of requests or of sessions; due: "
            "the rate of the requests' arrival times, which are drawn from it (a later turn of a "
            "session is due at the previous answer); sent: the rate at which requests left the "
            "client. Wait at the client: because too many requests were in flight. Sender late: "
            "its own delay."
        )
    return Table(tuple(columns), tuple(arms), tuple(lines))


request_outcomes_section = table_section("Request outcomes", _request_outcomes_table)


def _total_column(notes: NotesByArm, key: str, heading: str) -> Column[str]:
    return Column(heading, lambda arm: sum(note.get(key, 0) for note in notes[arm]), "{:,}".format)


def _median_column(
    notes: NotesByArm, heading: str, path: str, formatter: Callable[[Any], str] = value_text
) -> Column[str]:
    """Return a column of medians over runs. A cell is empty if no run of the arm has the number."""

    def value(arm: str) -> float | None:
        values = [v for note in notes[arm] if (v := number_at(note, path)) is not None]
        return median(values) if values else None

    return Column(heading, value, if_known(formatter))


SENDER_TIMES = {
    "due (1/s)": "due_per_s",
    "sent (1/s)": "sent_per_s",
    "wait at the client, p50 (ms)": "queue_ms.p50",
    "p99": "queue_ms.p99",
    "sender late, p99 (ms)": "late_ms.p99",
}


def _streams_table(cell: Cell, records: Sequence[Record]) -> Table[ServerArm]:
    arms = server_arms(records, cell.real_arms)
    columns: tuple[Column[ServerArm], ...] = (
        Column("arm", lambda arm: arm.arm, numeric=False),
        Column("server", _server_name, numeric=False),
        Column("identity by", lambda arm: arm.server["identity"], numeric=False),
        *(_counter_column(f"tokens.{name}", f"tokens by {name}") for name in TOKEN_COUNTERS),
        *(_counter_column(f"stream.{name}", name) for name in ("chunks", "bundled", "empty")),
        Column("finish reasons", ServerArm.finishes, numeric=False),
        _counter_column("tokens.cached", "prompt tokens cached"),
    )
    return Table(columns, tuple(arms), (STREAMS_NOTE,))


def _server_name(arm: ServerArm) -> str:
    preset, kept_url = arm.server["preset"], arm.server["kept"]
    return str(preset) if kept_url is None else f"kept: {kept_url}"


def _counter_column(name: str, heading: str) -> Column[ServerArm]:
    return Column(heading, lambda arm: arm.counter(name), if_known("{:,.0f}".format))


CLIENT_TIMES = {
    "loop late, p99": "lag_ms.p99",
    "sends late, p99": "late_ms.p99",
    "connecting, p99": "connect_ms.p99",
    "floor of TTFT, p50": "floor.ttft_ms.p50",
    "p99": "floor.ttft_ms.p99",
    "chunk seen late, p50": "floor.chunk_ms.p50",
    "chunk seen late, p99": "floor.chunk_ms.p99",
    "gap wrong by, p99": "floor.itl_ms.p99",
    "CPU per chunk": "floor.chunk_us",
}


def _client_table(cell: Cell, records: Sequence[Record]) -> Table[ServerArm]:
    arms = server_arms(records, cell.real_arms)
    columns = [Column[ServerArm]("arm", lambda arm: arm.arm, numeric=False)]
    columns += [
        Column(heading, partial(ServerArm.client, path=path), if_known(value_text))
        for heading, path in CLIENT_TIMES.items()
    ]
    return Table(tuple(columns), tuple(arms), (CLIENT_NOTE,))


http_section = table_section("HTTP streams and client overhead", _streams_table, _client_table)
