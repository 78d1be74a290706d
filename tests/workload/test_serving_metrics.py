import pytest

from labkit.config import ArrivalKind, Arrivals, LatencySLO, Workload
from labkit.workload.requests.serving_metrics import (
    ServedRequest,
    counted_metrics,
    meets,
    outcome_notes,
    request_notes,
    sending_metrics,
    serving_metrics,
    sharing_notes,
)
from labkit.workload.tokenized_prompt import Prompt


def served(name, prompt, submitted, times, tokens=None):
    return ServedRequest(
        name,
        prompt,
        submitted,
        tokens=tokens or [1] * len(times),
        chunk_times=list(times),
        finish="length",
    )


def values(metrics):
    return {m.name: m.repeats[0] for m in metrics}


def test_known_answers():
    a = served("a", 10, 0.0, [1.0, 1.5, 2.5])
    b = served("b", 30, 1.0, [1.25, 5.0])
    got = values(serving_metrics([a, b], 4096))
    wall = 5.0
    assert got["total_tok_s"] == pytest.approx((10 + 30 + 5) / wall)
    assert got["output_tok_s"] == pytest.approx(5 / wall)
    assert got["request_s"] == pytest.approx(2 / wall)
    assert got["wall_s"] == pytest.approx(wall)
    assert got["ttft_p50_ms"] == pytest.approx((1000 + 250) / 2)
    assert got["ttft_p99_ms"] == pytest.approx(250 + 0.99 * 750)
    # TPOT leaves the first token out: a (2.5 - 1.0) / 2, b (5.0 - 1.25) / 1.
    assert got["tpot_excl_first_p50_ms"] == pytest.approx((750 + 3750) / 2)
    # ITL pools the gaps 0.5, 1.0 and 3.75.
    assert got["itl_chunk_p50_ms"] == pytest.approx(1000)
    assert got["itl_chunk_p99_ms"] == pytest.approx(1000 + 0.98 * 2750)
    assert got["e2e_p50_ms"] == pytest.approx((2500 + 4000) / 2)
    assert got["peak_kv_bytes"] == 4096


def test_counters_make_three_metrics():
    counters = {
        "steps.total": 40.0,
        "host_ms": 60.0,
        "shape.repeated": 10.0,
        "kv.slots_held": 2048.0,
        "kv.slots_filled": 512.0,
    }
    expected = {"host_ms_per_step": 1.5, "shape_repeated_pct": 25.0, "kv_waste_pct": 75.0}
    assert values(counted_metrics(counters)) == expected
    assert counted_metrics({}) == counted_metrics({"steps.total": 0.0, "host_ms": 0.0}) == ()
    assert values(counted_metrics({"kv.slots_held": 9.0, "steps.total": 2.0})) == {}


def test_the_rate_that_was_reached_and_how_late_the_sender_was():
    sent = [served(str(n), 1, 0.5 * n, [9.0]) for n in range(5)]
    assert sending_metrics(sent) == ()  # a closed loop
    for n, entry in enumerate(sent):
        entry.due, entry.late = 0.4 * n, 0.01 * n
    assert values(sending_metrics(sent)) == pytest.approx({"sent_req_s": 2.0, "late_p99_ms": 39.6})
    for entry in sent:
        entry.submitted = 1.0
    assert values(sending_metrics(sent)) == pytest.approx({"late_p99_ms": 39.6})  # all at once


def test_throughput_comes_first_and_a_higher_rate_is_better():
    metrics = serving_metrics([served("a", 1, 0.0, [1.0, 2.0])], 1)
    assert metrics[0].name == "total_tok_s"
    better = {m.name: m.better for m in metrics}
    rates = {"total_tok_s", "output_tok_s", "request_s"}
    assert all(better[name] == "higher" for name in rates)
    assert all(word == "lower" for name, word in better.items() if name not in rates)


def test_the_wall_clock_starts_at_the_first_submission():
    got = values(serving_metrics([served("a", 5, 100.0, [101.0]), served("b", 5, 98.0, [99.0])], 1))
    assert got["total_tok_s"] == pytest.approx(12 / 3.0)


def test_itl_is_per_chunk_and_tpot_per_token():
    # Three tokens in two chunks: one gap of 1 s, two tokens after the first.
    got = values(serving_metrics([served("a", 1, 0.0, [1.0, 2.0], tokens=[7, 8, 9])], 1))
    assert got["itl_chunk_p50_ms"] == pytest.approx(1000)
    assert got["tpot_excl_first_p50_ms"] == pytest.approx(500)


def test_the_tokens_of_the_first_chunk_are_not_later_ones():
    """A server that sends four tokens at a time needs 0.5 s for each, whatever the length."""
    bundled = served("a", 1, 0.0, [2.0, 4.0], tokens=[1] * 8)
    bundled.first_chunk = 4
    at_once = served("b", 1, 0.0, [4.0], tokens=[1] * 8)
    at_once.first_chunk = 8
    assert bundled.tpot == 0.5 and at_once.tpot is None
    assert [note["first_chunk"] for note in request_notes([bundled, at_once])] == [4, 8]


def test_a_token_after_the_last_chunk_counts_but_takes_no_time():
    text = served("a", 1, 0.0, [1.0, 1.5, 2.0], tokens=[])
    text.counted, text.untimed_tokens = 4, 1
    got = values(serving_metrics([text], 1))
    assert got["output_tok_s"] == 2 and got["tpot_excl_first_mean_ms"] == 500
    assert got["tpot_incl_first_mean_ms"] == pytest.approx(2000 / 3)
    assert request_notes([text])[0]["untimed_tokens"] == 1


def test_means_of_the_time_per_token():
    fast = served("a", 1, 0.0, [1.0, 1.5, 2.0])
    slow = served("b", 1, 0.0, [2.0, 4.0, 10.0])
    got = values(serving_metrics([fast, slow], 1))
    assert got["tpot_excl_first_mean_ms"] == pytest.approx((500 + 4000) / 2)
    assert got["tpot_incl_first_mean_ms"] == pytest.approx((2000 / 3 + 10000 / 3) / 2)


def test_metrics_without_a_value_are_left_out():
    got = values(serving_metrics([served("a", 1, 0.0, [1.0])], None))
    assert not any(name.startswith(("tpot_excl", "itl", "peak")) for name in got)
    assert "e2e_p99_ms" in got


def test_notes_carry_each_request_s_own_times():
    notes = request_notes([served("a", 2, 10.0, [11.0, 11.5]), served("b", 3, 10.25, [12.0])])
    assert notes[1] == {
        "id": "b",
        "prompt_tokens": 3,
        "output_tokens": 1,
        "submitted_ms": 250.0,
        "ttft_ms": 1750.0,
        "e2e_ms": 1750.0,
        "itl_ms": [],
    }
    assert notes[0]["itl_ms"] == [500.0]


def test_times_count_from_the_first_arrival_even_of_a_refused_request():
    """The memory's timeline begins there; the bars of requests are drawn beside it."""
    refused = ServedRequest("x", 4, 8.0, finish="error", error="no room")
    (note,) = request_notes([refused, served("a", 2, 10.0, [11.0])])
    assert (note["id"], note["submitted_ms"], note["ttft_ms"]) == ("a", 2000.0, 1000.0)


TIMELINE = [
    # Sent, chunks, tokens: TTFT 0.5, 1.0, 2.0; TPOT 0.25, 1.0, none; E2E 1.5, 2.0, 2.0.
    served("a", 4, 0.0, [0.5, 1.0, 1.5], tokens=[1] * 5),
    served("b", 4, 1.0, [2.0, 3.0]),
    served("c", 4, 2.0, [4.0]),
]


def test_a_hand_made_timeline_has_the_numbers_of_vllm_s_definitions():
    """TTFT and E2E from sending, TPOT (E2E - TTFT) / (n - 1), ITL the gaps of chunks, pooled."""
    assert [r.ttft for r in TIMELINE] == [0.5, 1.0, 2.0]
    assert [r.e2e for r in TIMELINE] == [1.5, 2.0, 2.0]
    assert [r.tpot for r in TIMELINE] == [0.25, 1.0, None]
    assert [gap for r in TIMELINE for gap in r.itl] == [0.5, 0.5, 1.0]
    got = values(serving_metrics(TIMELINE, None))
    assert got["request_s"] == 3 / 4.0 and got["output_tok_s"] == 8 / 4.0


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft_ms": 1000}, "ab"),
        ({"ttft_ms": 999}, "a"),
        ({"tpot_ms": 250}, "ac"),  # a single token counts as 0 ms per token
        ({"e2e_ms": 1500}, "a"),
        ({"e2e_ms": 2000, "ttft_ms": 1000, "tpot_ms": 900}, "a"),
        ({"ttft_ms": 1}, ""),
    ],
)
def test_goodput_counts_the_requests_that_met_every_limit(limits, good):
    limits = LatencySLO(**limits)
    assert "".join(r.request_id for r in TIMELINE if meets(r, limits)) == good
    got = values(serving_metrics(TIMELINE, None, limits=limits))
    assert got["goodput_req_s"] == len(good) / 4.0
    assert "goodput_req_s" not in values(serving_metrics(TIMELINE, None, limits=LatencySLO()))


def test_a_request_that_was_not_served_is_counted_and_never_good():
    refused = ServedRequest("x", 4, 0.0, finish="error", error="no room")
    failed = ServedRequest("y", 4, 0.0, tokens=[1], chunk_times=[0.1], finish="abort", error="gone")
    workload = Workload(limits=LatencySLO(ttft_ms=1000))
    entries = [*TIMELINE, refused, failed]
    notes = outcome_notes(entries, workload, rate_unit="", cpu_s=0.04)
    assert (notes["requests"], notes["served"], notes["refused"], notes["failed"]) == (5, 3, 1, 1)
    assert notes["good"] == 2 and notes["sender_cpu_share"] == 0.01
    assert notes["unserved"] == [
        {"id": "x", "outcome": "refused", "error": "no room"},
        {"id": "y", "outcome": "failed", "error": "gone"},
    ]
    assert "late_ms" not in notes  # a closed loop is never late


def test_rates_and_waits_of_what_arrives_by_itself():
    entries = [served(str(i), 1, sent, [9.0]) for i, sent in enumerate([0.0, 1.0, 4.0])]
    for entry, due in zip(entries, [0.0, 1.0, 2.0], strict=True):
        entry.due = due
    entries[1].late = 0.003
    workload = Workload(arrivals=Arrivals(ArrivalKind.poisson, 0.8), concurrency=None)
    notes = outcome_notes(entries, workload, rate_unit="requests/s", cpu_s=0.0)
    assert (notes["asked_per_s"], notes["due_per_s"], notes["sent_per_s"]) == (0.8, 1.0, 0.5)
    assert notes["queue_ms"] == {"p50": 0.0, "p99": 1960.0, "max": 2000.0}
    assert notes["late_ms"]["max"] == 3.0 and notes["latency_from"] == "arrival"


def test_latencies_count_from_the_arrival_even_if_the_client_waits_to_send():
    """One client and an arrival every second: the third request waits 2 s before it is sent."""
    entries = [served(str(i), 1, 2.0 * i, [2.0 * i + 0.5, 2.0 * i + 1]) for i in range(3)]
    for i, entry in enumerate(entries):
        entry.due = 1.0 * i
    assert [entry.ttft for entry in entries] == [0.5, 1.5, 2.5]
    assert [entry.e2e for entry in entries] == [1.0, 2.0, 3.0]
    assert [entry.tpot for entry in entries] == [0.5] * 3
    assert [meets(entry, LatencySLO(ttft_ms=1500)) for entry in entries] == [True, True, False]
    last = request_notes(entries)[2]
    assert (last["arrived_ms"], last["submitted_ms"], last["ttft_ms"]) == (2000, 4000, 2500)


def test_the_time_of_a_request_that_hung_counts():
    hung = ServedRequest("x", 4, 0.5, finish="error", ended=60.0, error="nothing for 59.5 s")
    got = values(serving_metrics([*TIMELINE, hung], None, limits=LatencySLO(ttft_ms=1000)))
    assert got["wall_s"] == 60.0 and got["request_s"] == 3 / 60 and got["goodput_req_s"] == 2 / 60


def prompts(*texts):
    return [Prompt(f"r{i}", tuple(map(ord, text)), 1) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("texts", "shared"),
    [
        (["abcdefgh", "abcdefgh"], 4),  # the last token is computed, so its block is too
        (["abcdefgh", "abcdefghi"], 8),
        (["abcdefgh", "abcdXXghi"], 4),
        (["abcdefgh", "XbcdefghX"], 0),
        (["abcdef", "abcdeX"], 4),  # whole blocks only
        (["abcdefghi", "abcd1", "abcdefgh2"], 4 + 8),
        (["abc", "abc"], 0),
    ],
)
def test_only_whole_blocks_of_an_earlier_prompt_s_prefix_count(texts, shared):
    notes = sharing_notes(prompts(*texts), 4, warm=False, unshared=False)
    assert notes["shared_tokens"] == shared


def test_a_warm_cache_hits_all_blocks_but_the_last():
    twice_served = prompts("abcdefghi", "12345678")
    notes = sharing_notes(twice_served, 4, warm=True, unshared=False)
    assert notes["shared_tokens"] == 8 + 4
    notes = sharing_notes(twice_served, 4, warm=False, unshared=False)
    assert notes == {
        "prompt_tokens": 17, "shared_tokens": 0, "block_size": 4, "unshared": False,
    }  # fmt: skip
