"""Tables of arms that are servers: their streams, and what the client itself cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.analysis.client_lateness import ServerArm, server_arms
from labkit.analysis.number_format import value_text
from labkit.analysis.rendering.tables import Column, Table
from labkit.analysis.verdict_sentences import real_arms
from labkit.records import Record

Json = Mapping[str, Any]
STREAMS = (
    "Medians over runs. Tokens by the server's own usage, by the model's tokenizer from the text, "
    "and by the stream (its token ids, else its events with text). A chunk is what was read at "
    "once: bundled where it brought more than one event or token. Chunks are never counted as "
    "tokens.",
)
CLIENT = (
    "Medians over runs (ms; CPU in us). Floor: the same client on a null server, beside every run, "
    "with as many streams at once: what it adds to TTFT, how late it sees a chunk, how wrong its "
    "gaps between chunks are, and its CPU time per chunk. Connecting is the server's to answer.",
)


def streams_table(cell: Json, records: Sequence[Record]) -> Table[ServerArm] | None:
    """Lay out what was counted of every server's streams; None where no arm is a server."""
    lines = server_arms(records, real_arms(cell))
    if not lines:
        return None
    columns: tuple[Column[ServerArm], ...] = (
        Column("arm", lambda one: one.arm, number=False),
        Column("server", _server, number=False),
        Column("identity by", lambda one: one.server["identity"], number=False),
        *(_counted(f"tokens.{name}", f"tokens by {name}") for name in COUNTED),
        *(_counted(f"stream.{name}", name) for name in ("chunks", "bundled", "empty")),
        Column("ended by", ServerArm.finishes, number=False),
        _counted("tokens.cached", "prompt tokens cached"),
    )
    return Table(columns, tuple(lines), STREAMS)


COUNTED = ("usage", "tokenizer", "stream")


def _server(one: ServerArm) -> str:
    kept = one.server["kept"]
    return f"kept: {kept}" if kept is not None else str(one.server["preset"])


def _counted(name: str, heading: str) -> Column[ServerArm]:
    return Column(heading, lambda one: one.counter(name), _count)


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def client_table(cell: Json, records: Sequence[Record]) -> Table[ServerArm] | None:
    """Lay out what the client itself cost beside every server; None where no arm is one."""
    lines = server_arms(records, real_arms(cell))
    if not lines:
        return None
    columns = [Column[ServerArm]("arm", lambda one: one.arm, number=False)]
    columns += [
        Column(heading, _read(*path), lambda value: "" if value is None else value_text(value))
        for heading, path in TIMES.items()
    ]
    return Table(tuple(columns), tuple(lines), CLIENT)


def _read(path: str, key: str) -> Callable[[ServerArm], float | None]:
    return lambda one: one.client(path, key)


TIMES = {
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
