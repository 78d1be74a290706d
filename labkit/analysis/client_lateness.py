"""Arms that are servers: what was counted of their streams, and whether the client kept up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from labkit.records import Record

Json = Mapping[str, Any]
COUNTS = {"tokens.usage": "usage", "tokens.tokenizer": "tokenizer", "tokens.stream": "stream"}
# What of a client must not be late, where its record has it, and how a reader knows it.
BOUNDED = (
    ("lag_ms", "p99", "its event loop woke {} ms late (99th percentile)"),
    ("late_ms", "p99", "its sends were {} ms late (99th percentile)"),
    ("floor.ttft_ms", "p50", "its own part of TTFT is {} ms by a null server (median)"),
    ("floor.chunk_ms", "p99", "it saw a null server's chunks {} ms late (99th percentile)"),
)


def server_and_client(record: Record) -> tuple[Json, Json] | None:
    """Return what a run notes of its server and of its client; None: it had none."""
    engine = record.notes.get("engine") or {}
    server, client = engine.get("server"), engine.get("client")
    return None if server is None or client is None else (server, client)


def lateness_errors(record: Record) -> Iterator[str]:
    """Say where a run's client was later than its config allows: it measured itself."""
    found = server_and_client(record)
    if found is None:
        return
    client = found[1]
    most = float(client["most_late_ms"])
    for path, key, words in BOUNDED:
        value = client_time(client, path, key)
        if value is not None and value > most:
            yield _beyond(words, value, most)
    for case in record.cases:
        sent = (case.notes.get("traffic", {}).get("late_ms") or {}).get("p99")
        if sent is not None and sent > most:
            yield _beyond("its arrivals were sent {} ms late (99th percentile)", sent, most)


def _beyond(words: str, value: float, most: float) -> str:
    said = words.format(f"{value:.1f}")
    return (
        f"the client is the bottleneck: {said}; allowed are {most:g} (engine.server.most_late_ms)"
    )


def client_time(client: Json, path: str, key: str) -> float | None:
    """Return one number of a client's times; None where it was not measured."""
    found: Any = client
    for name in (*path.split("."), key):
        found = found.get(name) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


@dataclass(frozen=True)
class ServerArm:
    """An arm that is a server: what its good runs note and count."""

    arm: str
    runs: Sequence[Record]

    @property
    def server(self) -> Json:
        """What the first run notes of the server."""
        found = server_and_client(self.runs[0])
        assert found is not None
        return found[0]

    def counter(self, name: str) -> float | None:
        """Return a counter's median over the runs; None where a run lacks it."""
        values = [run.counters.get(name) for run in self.runs]
        known = [value for value in values if value is not None]
        return median(known) if len(known) == len(values) else None

    def client(self, path: str, key: str) -> float | None:
        """Return the median over the runs of one number of the client's."""
        found = [pair for run in self.runs if (pair := server_and_client(run)) is not None]
        known = [v for _, client in found if (v := client_time(client, path, key)) is not None]
        return median(known) if known else None

    def finishes(self) -> str:
        """Say how the streams of all runs ended: ``length 24, stop 3``."""
        counts: dict[str, float] = {}
        for run in self.runs:
            for name, value in run.counters.items():
                if name.startswith("finish.") and value:
                    word = name.removeprefix("finish.")
                    counts[word] = counts.get(word, 0) + value
        return ", ".join(f"{word} {value:,.0f}" for word, value in sorted(counts.items()))

    def caveats(self) -> Iterator[str]:
        """Say what a reader must know of this arm."""
        server = self.server
        if server["kept"] is not None:
            yield (
                f"{self.arm}: its server ran before and is kept ({server['kept']}); what it did "
                "before, for other arms too, is part of its numbers; prompts are the same in every "
                f"run, so that a prefix cache may know them from the one before ({self._found()})"
            )
        if not server["run_here"]:
            yield (
                f"{self.arm}: engine.server.preset={server['preset']} is written by documentation "
                "and was not run by labkit's tests"
            )
        if server["identity"] == "text":
            yield (
                f"{self.arm}: the server tells no token ids, so that its outputs are compared as "
                "text, which is weaker than token by token"
            )
        yield from self._counts()
        yield from self._prompts()

    def _found(self) -> str:
        cached = self.counter("tokens.cached")
        return "it does not tell" if cached is None else f"{cached:,.0f} prompt tokens were found"

    def _counts(self) -> Iterator[str]:
        server = self.server
        counts = {said: self.counter(name) for name, said in COUNTS.items()}
        known = {said: count for said, count in counts.items() if count is not None}
        if len(set(known.values())) > 1:
            first = next(iter(server["disagree"]), None)
            where = f"; request {first['id']}: {_three(first)}" if first is not None else ""
            yield (
                f"{self.arm}: its output tokens are {_three(counts)}{where}; "
                f"counted by {server['counted_by']}"
            )
        for name, what in (("stream.refusals", "refusals"), ("stream.tool_calls", "tool calls")):
            if self.counter(name):
                yield f"{self.arm}: {self.counter(name):,.0f} chunks were {what}"

    def _prompts(self) -> Iterator[str]:
        ours, theirs = self.counter("tokens.prompt"), self.counter("tokens.prompt_usage")
        if ours is not None and theirs is not None and ours != theirs:
            yield (
                f"{self.arm}: the server read {theirs:,.0f} prompt tokens where the workload has "
                f"{ours:,.0f} (prompts were sent as {self.server['prompts']})"
            )
        cached, sharing = self.counter("tokens.cached"), self.runs[0].notes.get("sharing")
        if cached is None or sharing is None:
            return
        # A server may share single tokens, where the workload counts whole blocks.
        least = sharing["shared_tokens"] + self._requests() * sharing["block_size"]
        if cached > least:
            yield (
                f"{self.arm}: the server found {cached:,.0f} prompt tokens in its cache, and the "
                f"prompts share {sharing['shared_tokens']:,}: it knew them from before"
            )

    def _requests(self) -> float:
        return self.counter("requests.submitted") or 0.0


def server_arms(records: Sequence[Record], arms: Sequence[str] | None = None) -> list[ServerArm]:
    """Return the arms that are servers, those of ``arms`` (None: all)."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        wanted = arms is None or record.arm in arms
        if record.ok and wanted and server_and_client(record) is not None:
            runs.setdefault(record.arm, []).append(record)
    return [ServerArm(arm, found) for arm, found in runs.items()]


def caveats(records: Iterable[Record]) -> Iterator[str]:
    """Say what a reader must know of arms that are servers; the control is its baseline's twin."""
    for one in server_arms([record for record in records if record.role != "control"]):
        yield from one.caveats()


def _three(counts: Mapping[str, float | None]) -> str:
    """Write a count by everybody: ``52 by usage, 141 by tokenizer and 50 by stream``."""
    said = [
        f"{counts[name]:,.0f} by the {name}" if counts.get(name) is not None else f"no {name}"
        for name in COUNTS.values()
    ]
    return f"{', '.join(said[:-1])} and {said[-1]}"
