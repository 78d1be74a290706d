"""Tables of arms that are HTTP servers: their response streams and the client's own cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from labkit.analysis.comparison.server_arm_caveats import ServerArm, server_arms
from labkit.analysis.document.report_parts import Parts, section, table_parts
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import value_text
from labkit.records import Record

if TYPE_CHECKING:
    from labkit.analysis.pages.cell_report_content import CellReport

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


def streams_table(cell: Cell, records: Sequence[Record]) -> Table[ServerArm] | None:
    """Return the counters of every server's response streams, or None if no arm is a server."""
    arms = server_arms(records, cell.real_arms)
    if not arms:
        return None
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
    kept_url = arm.server["kept"]
    return f"kept: {kept_url}" if kept_url is not None else str(arm.server["preset"])


def _counter_column(name: str, heading: str) -> Column[ServerArm]:
    return Column(heading, lambda arm: arm.counter(name), _count_text)


def _count_text(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


CLIENT_TIMES = {
    "loop late, p99": ("lag_ms", "p99"),
    "sends late, p99": ("late_ms", "p99"),
    "connecting, p99": ("connect_ms", "p99"),
    "floor of TTFT, p50": ("floor.ttft_ms", "p50"),
    "p99": ("floor.ttft_ms", "p99"),
    "chunk seen late, p50": ("floor.chunk_ms", "p50"),
    "chunk seen late, p99": ("floor.chunk_ms", "p99"),
    "gap wrong by, p99": ("floor.itl_ms", "p99"),
    "CPU per chunk": ("floor", "chunk_us"),
}


def client_table(cell: Cell, records: Sequence[Record]) -> Table[ServerArm] | None:
    """Return the client's own cost with every server, or None if no arm is a server."""
    arms = server_arms(records, cell.real_arms)
    if not arms:
        return None
    columns = [Column[ServerArm]("arm", lambda arm: arm.arm, numeric=False)]
    columns += [
        Column(
            heading, _client_time(*path), lambda value: "" if value is None else value_text(value)
        )
        for heading, path in CLIENT_TIMES.items()
    ]
    return Table(tuple(columns), tuple(arms), (CLIENT_NOTE,))


def _client_time(path: str, key: str) -> Callable[[ServerArm], float | None]:
    return lambda arm: arm.client(path, key)


@section("HTTP streams and client overhead")
def http_section(report: CellReport) -> Parts:
    """Show the servers' streams and the client's own cost."""
    return table_parts(
        streams_table(report.cell, report.records), client_table(report.cell, report.records)
    )
