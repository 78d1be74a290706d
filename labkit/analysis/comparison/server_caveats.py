"""Arms that are servers: their runs, and the caveats that follow from the servers' counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from labkit.analysis.comparison.client_lateness import Json, number_at, server_and_client
from labkit.records import Record

COUNTS = {"tokens.usage": "usage", "tokens.tokenizer": "tokenizer", "tokens.stream": "stream"}
MIN_BUNDLE = 1.5  # tokens in a chunk from which on the gap between chunks is not the gap of tokens
COUNT_TEXTS = {
    "usage": "in the server's usage",
    "tokenizer": "counted by the tokenizer",
    "stream": "in the stream",
}


@dataclass(frozen=True)
class ServerArm:
    """An arm that is a server, with its successful runs."""

    arm: str
    runs: Sequence[Record]

    @property
    def server(self) -> Json:
        notes = server_and_client(self.runs[0])
        assert notes is not None
        return notes[0]

    def counter(self, name: str) -> float | None:
        """Return a counter's median over the runs, or None if a run lacks it."""
        values = [run.counters.get(name) for run in self.runs]
        known = [value for value in values if value is not None]
        return median(known) if len(known) == len(values) else None

    def client(self, path: str) -> float | None:
        """Return the median over the runs of a number of the client, or None if not measured."""
        notes = [pair for run in self.runs if (pair := server_and_client(run)) is not None]
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
        if record.ok and selected and server_and_client(record) is not None:
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
