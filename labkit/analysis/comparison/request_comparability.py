"""Whether arms' request metrics compare: the same requests served, tokens counted alike.

Metrics of requests describe the served ones alone. An arm that fails half of its requests is soon
done, and an arm that serves the short ones is fast, so arms that served different requests get no
verdict, nor does any arm if many failed. Tokens that were counted by different means get no verdict
either: a tokenizer's count of a text may be twice the number of tokens that were generated. TPOT
leaves out the first chunk, so a server whose first chunk holds an unknown number of tokens has no
TPOT that compares. Goodput with a limit on TPOT depends on both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.config import count_text
from labkit.records import Arm, Record
from labkit.records.record_notes_schema import TrafficNote

MAX_UNSERVED_SHARE = 0.05  # of an arm's requests, if all arms served the same ones
MIN_SENT_SHARE = 0.95  # of the rate of arrivals; a load that is sent more slowly is not sustained
SAMPLED = ("token ids", "usage")  # counts of the engine that sampled the tokens
IMPOSSIBLE_COUNTS = {  # notes on a server
    "counted_beyond_max": "more tokens than max_tokens allows",
    "counted_below_chunks": "fewer tokens than chunks arrived",
}
REQUESTS_PER_S = "requests/s"
MAX_EXCESS_PCT = 1.0  # of the tokens after the first, by which arms' TPOT may be biased apart
TPOT_METRICS = ("tpot_excl_first_p50_ms", "tpot_excl_first_p99_ms", "tpot_excl_first_mean_ms")
TOKEN_METRICS = ("total_tok_s", "output_tok_s", "tpot_incl_first_mean_ms")


def unserved_errors(records: Sequence[Record]) -> Iterator[tuple[str, str | None, str]]:
    """Yield why a run's requests forbid verdicts: a reason, the arm (None: all) and the cause.

    The run served other requests than the baseline, or too few. Arms whose workloads differ may
    serve different requests if every request is served.
    """
    runs = [(record, traffic) for record in records if (traffic := _traffic(record)) is not None]
    baseline = [run for run in runs if run[0].role == "baseline"]
    reference = _served(baseline[0][0]) if baseline else None
    lost = any(_unserved(traffic) for _, traffic in baseline)
    for record, traffic in runs:
        unserved, asked = _unserved(traffic), traffic["requests"]
        differs = bool(lost or unserved) and _served(record) != reference
        if not differs and unserved <= MAX_UNSERVED_SHARE * asked:
            continue
        others = ", and the baseline served others" if differs and baseline else ""
        first = next(iter(traffic.get("unserved", ())), None)
        why = f"; {first['error']}" if first is not None and first["error"] else ""
        text = f"{unserved} of {count_text(asked, 'request')} were not served{others}"
        arm = record.arm if record.role == "arm" else None
        yield f"{record.run}: {text}{why}", arm, f"{text} in {record.run}"


def traffic_notes(records: Sequence[Record]) -> dict[str, list[TrafficNote]]:
    """Return the notes on the outcomes and times of requests of all runs, by arm."""
    noted: dict[str, list[TrafficNote]] = {}
    for record in records:
        for case in record.cases:
            if "traffic" in case.known_notes:
                noted.setdefault(record.arm, []).append(case.known_notes["traffic"])
    return noted


def sustained(traffic: TrafficNote) -> bool:
    """Return whether a run's requests were sent at the rate of their arrivals, or in no hurry.

    ``traffic``: the record's note. A closed loop, or arrivals all at once, have no rate.
    """
    due, sent = traffic.get("due_per_s"), traffic.get("sent_per_s")
    return due is None or (sent is not None and sent >= MIN_SENT_SHARE * due)


def rate_unit(arm: str, records: Sequence[Record]) -> str:
    """Return the unit of an arm's rate: ``sessions/s`` if those have several requests, if noted."""
    notes = traffic_notes(records).get(arm, ())
    return next((note["asked_unit"] for note in notes if "asked_unit" in note), REQUESTS_PER_S)


def _traffic(record: Record) -> TrafficNote | None:
    """Return the outcomes of the requests of a run that serves a workload of requests."""
    notes = (case.known_notes for case in record.cases) if record.outcome == "ok" else ()
    return next((note.get("traffic") for note in notes if "requests" in note), None)


def _unserved(traffic: TrafficNote) -> int:
    return int(traffic.get("refused", 0) + traffic.get("failed", 0))


def _served(record: Record) -> frozenset[str]:
    notes = (case.known_notes for case in record.cases if "requests" in case.known_notes)
    return frozenset(request["id"] for request in next(notes)["requests"])


def count_cause(
    metric: str | None, arm: str, arms: Sequence[Arm], records: Sequence[Record]
) -> str | None:
    """Return the reason why an arm's counts of tokens forbid a verdict on a metric, or None.

    Token ids and a server's usage are counts of the tokens that were sampled, so they compare.
    """
    baseline = arms[0].name
    pair = [one for one in arms if one.name in (arm, baseline)]
    uses_tpot = metric in TPOT_METRICS or (
        metric == "goodput_req_s" and any(has_tpot_limit(one) for one in pair)
    )
    if not uses_tpot and metric not in TOKEN_METRICS:
        return None
    impossible = _impossible_count(arm, records) or _impossible_count(baseline, records)
    if impossible is not None:
        return impossible
    own, base = (_means(name, records) for name in (arm, baseline))
    if own != base and not own | base <= {*SAMPLED}:
        return (
            f"tokens were counted by different means: {arm}'s by {_join(own)}, {baseline}'s by "
            f"{_join(base)}"
        )
    excess = [_excess_pct(name, records) for name in (arm, baseline)]
    if uses_tpot and max(excess) - min(excess) > MAX_EXCESS_PCT:
        return _excess_text((arm, baseline)[excess.index(max(excess))], max(excess))
    return None


def has_tpot_limit(arm: Arm) -> bool:
    """Return whether an arm's goodput has a limit on TPOT, which depends on counts of tokens."""
    limits = (arm.config.get("workload") or {}).get("limits") or {}
    return limits.get("tpot_ms") is not None


def tpot_cause(arm: str, records: Sequence[Record]) -> str | None:
    """Return the reason why an arm's own TPOT cannot be compared with a limit, or None."""
    excess, means = _excess_pct(arm, records), _means(arm, records)
    if means <= {*SAMPLED} and excess > MAX_EXCESS_PCT:
        return _excess_text(arm, excess)
    other = None if means <= {*SAMPLED} else f"its tokens were counted by {_join(means)}"
    return _impossible_count(arm, records) or other


def _impossible_count(arm: str, records: Sequence[Record]) -> str | None:
    for record in records:
        server = _server(record) if record.arm == arm else {}
        for key, what in IMPOSSIBLE_COUNTS.items():
            if server.get(key):
                requests = count_text(server[key], "request")
                return (
                    f"the {server['counted_by']} counts {what} in {requests} of {record.run}, "
                    "so the count is unusable"
                )
    return None


def _excess_pct(arm: str, records: Sequence[Record]) -> float:
    """Return the estimated share of an arm's later tokens that came unseen with its first chunk."""
    runs = [record for record in records if record.arm == arm and record.ok]
    return max((_server(run).get("first_chunk_excess_pct", 0.0) for run in runs), default=0.0)


def _excess_text(arm: str, excess_pct: float) -> str:
    return (
        f"{arm}'s chunks hold several tokens and no token ids; the first one, which TPOT leaves "
        f"out, may hold {excess_pct:.0f} % of the tokens after the first"
    )


def _server(record: Record) -> Mapping[str, Any]:
    return record.known_notes.get("engine", {}).get("server") or {}


def _means(arm: str, records: Sequence[Record]) -> set[str]:
    """Return how an arm's tokens were counted; an engine in the run's process has their ids."""
    runs = [record for record in records if record.arm == arm and record.ok]
    counted = (str(_server(record).get("counted_by", SAMPLED[0])) for record in runs)
    return {means for text in counted for means in text.split(" and ")}


def _join(means: set[str]) -> str:
    return " and ".join(sorted(means))
