"""Arms that are servers: lateness of the client, and caveats from the servers' counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from labkit.records import Record

Json = Mapping[str, Any]
COUNTS = {"tokens.usage": "usage", "tokens.tokenizer": "tokenizer", "tokens.stream": "stream"}
MAX_LATE_SHARE = 0.2  # of an arm's runs with a late client, which then are no rare disturbance
MIN_BUNDLE = 1.5  # tokens in a chunk from which on the gap between chunks is not the gap of tokens
COUNT_TEXTS = {
    "usage": "in the server's usage",
    "tokenizer": "counted by the tokenizer",
    "stream": "in the stream",
}
# The times that engine.server.most_late_ms limits: path in the client's notes, and text.
BOUNDED_TIMES = {
    "lag_ms.p99": "its event loop woke {} ms late (99th percentile)",
    "late_ms.p99": "it sent requests {} ms late (99th percentile)",
    "floor.ttft_ms.p50": "its own part of TTFT, measured with a null server, is {} ms (median)",
    "floor.chunk_ms.p99": "it saw a null server's chunks {} ms late (99th percentile)",
}


def _server_and_client(record: Record) -> tuple[Json, Json] | None:
    """Return a run's notes on its server and its client, or None if the arm is not a server."""
    engine = record.known_notes.get("engine") or {}
    server, client = engine.get("server"), engine.get("client")
    return None if server is None or client is None else (server, client)


def lateness_errors(record: Record) -> Iterator[str]:
    """Yield an error for each of the client's delays above ``engine.server.most_late_ms``."""
    notes = _server_and_client(record)
    if notes is None:
        return
    client = notes[1]
    max_late_ms = float(client["most_late_ms"])
    arrivals = "it sent arrivals {} ms late (99th percentile)"
    traffic = (case.known_notes.get("traffic") for case in record.cases)
    times = [(text, number_at(client, path)) for path, text in BOUNDED_TIMES.items()]
    times += ((arrivals, number_at(note, "late_ms.p99")) for note in traffic)
    for description, value in times:
        if value is not None and value > max_late_ms:
            lateness = description.format(f"{value:.1f}")
            yield (
                f"the client is the bottleneck: {lateness}; the limit is {max_late_ms:g} ms "
                "(engine.server.most_late_ms)"
            )


def often_late_runs(records: Sequence[Record]) -> list[Record]:
    """Return the runs with a late client of the arms whose client was often late.

    A rare delay is the machine's, as other disturbances are. A frequent one may be the arm's: a
    server that leaves the client no CPU time. One late run of three or more is rare: a machine that
    is late in 5 % of the runs is so in one of four runs in every sixth study, in two in every 70th.
    """
    runs, late = Counter(r.arm for r in records), [r for r in records if any(lateness_errors(r))]
    by_arm = Counter(record.arm for record in late)
    often = {
        arm
        for arm, count in by_arm.items()
        if count > max(1, MAX_LATE_SHARE * runs[arm]) or 2 * count >= runs[arm]
    }
    return [record for record in late if record.arm in often]


def number_at(notes: object, path: str) -> float | None:
    """Return the number at a path of keys such as ``late_ms.p99``, or None if a key is missing."""
    for name in path.split("."):
        notes = notes.get(name) if isinstance(notes, Mapping) else None
    return None if notes is None else float(notes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ServerArm:
    """An arm that is a server, with its successful runs."""

    arm: str
    runs: Sequence[Record]

    @property
    def server(self) -> Json:
        notes = _server_and_client(self.runs[0])
        assert notes is not None
        return notes[0]

    def counter(self, name: str) -> float | None:
        """Return a counter's median over the runs, or None if a run lacks it."""
        values = [run.counters.get(name) for run in self.runs]
        known = [value for value in values if value is not None]
        return median(known) if len(known) == len(values) else None

    def client(self, path: str) -> float | None:
        """Return the median over the runs of a number of the client, or None if not measured."""
        notes = [pair for run in self.runs if (pair := _server_and_client(run)) is not None]
        known = [v for _, client in notes if (v := number_at(client, path)) is not None]
        return median(known) if known else None

    def finishes(self) -> str:
        """Return how many streams ended for each finish reason: ``length 24, stop 3``."""
        names = sorted({n for run in self.runs for n in run.counters if n.startswith("finish.")})
        counts = {n: sum(run.counters.get(n, 0) for run in self.runs) for n in names}
        return ", ".join(f"{n.removeprefix('finish.')} {v:,.0f}" for n, v in counts.items() if v)

    def caveats(self) -> Iterator[str]:
        server, cached = self.server, self.counter("tokens.cached")
        if server["kept"] is not None:
            hits = "the server does not report cached tokens"
            if cached is not None:
                hits = f"{cached:,.0f} tokens hit"
            yield (
                f"{self.arm}: its server ran before this run and stays up ({server['kept']}), so "
                "earlier work, also for other arms, affects the numbers; every run has the same "
                "prompts, so the server's prefix cache may hold the previous run's prompts "
                f"({hits})"
            )
        if not server["run_here"]:
            yield (
                f"{self.arm}: engine.server.preset={server['preset']} was written from "
                "the server's documentation, and labkit's tests have not run it"
            )
        if server["identity"] == "text":
            yield (
                f"{self.arm}: the server returns no token ids, so its outputs are compared as "
                "text, which is weaker than token by token"
            )
        yield from self._counts()
        yield from self._prompts()

    def _counts(self) -> Iterator[str]:
        server = self.server
        counts = {source: self.counter(name) for name, source in COUNTS.items()}
        known = {source: count for source, count in counts.items() if count is not None}
        if len(set(known.values())) > 1:
            first = next(iter(server["disagree"]), None)
            where = f"; request {first['id']}: {_join_counts(first)}" if first is not None else ""
            yield (
                f"{self.arm}: its output tokens: {_join_counts(counts)}{where}; "
                f"the metrics use the counts from the {server['counted_by']}"
            )
        has_ids = server["identity"] == "token ids"
        tokens = self.counter("tokens.stream" if has_ids else "tokens.usage")
        chunks = self.counter("stream.chunks")
        if tokens and chunks and tokens >= MIN_BUNDLE * chunks:
            yield (
                f"{self.arm}: a chunk of its stream holds {tokens / chunks:.1f} tokens on "
                "average: ITL is the gap between chunks, TPOT is a mean over tokens and no gap "
                "that a client saw, and TTFT is the time to the first chunk"
            )
        for name, what in (("stream.refusals", "refusals"), ("stream.tool_calls", "tool calls")):
            if self.counter(name):
                yield f"{self.arm}: {self.counter(name):,.0f} chunks were {what}"

    def _prompts(self) -> Iterator[str]:
        counted, usage = self.counter("tokens.prompt"), self.counter("tokens.prompt_usage")
        if counted is not None and usage is not None and counted != usage:
            yield (
                f"{self.arm}: the server read {usage:,.0f} prompt tokens, but the workload has "
                f"{counted:,.0f} (prompts were sent as {self.server['prompts']})"
            )
        cached, sharing = self.counter("tokens.cached"), self.runs[0].known_notes.get("sharing")
        if cached is None or sharing is None:
            return
        # Prompts may repeat earlier answers, unless each begins with another token.
        answers = 0.0 if sharing["unshared"] else max(self.counter(name) or 0.0 for name in COUNTS)
        # The workload counts shared tokens in whole blocks, but a server may share single tokens.
        requests = self.counter("requests.submitted") or 0.0
        single_tokens = requests * sharing["block_size"]
        if cached > sharing["shared_tokens"] + single_tokens + answers:
            repeated = f" and at most {answers:,.0f} of earlier answers" if answers else ""
            yield (
                f"{self.arm}: {cached:,.0f} prompt tokens hit the server's cache, but the prompts "
                f"share only {sharing['shared_tokens']:,}{repeated}, "
                f"so the cache held tokens from before the run"
            )


def server_arms(records: Sequence[Record], arms: Sequence[str] | None = None) -> list[ServerArm]:
    """Return the arms that are servers, among ``arms`` or, if None, among all arms."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        selected = arms is None or record.arm in arms
        if record.ok and selected and _server_and_client(record) is not None:
            runs.setdefault(record.arm, []).append(record)
    return [ServerArm(arm, arm_runs) for arm, arm_runs in runs.items()]


def caveats(records: Iterable[Record]) -> Iterator[str]:
    """Yield the caveats on arms that are servers; the control's would repeat the baseline's."""
    for server_arm in server_arms([record for record in records if record.role != "control"]):
        yield from server_arm.caveats()


def _join_counts(counts: Mapping[str, float | None]) -> str:
    """Return three token counts as text: ``52 in the server's usage, 141 counted by ...``."""
    return ", ".join(
        f"{'none' if (count := counts.get(name)) is None else f'{count:,.0f}'} {text}"
        for name, text in COUNT_TEXTS.items()
    )
