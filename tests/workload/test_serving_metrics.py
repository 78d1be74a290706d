import pytest

from labkit.workload.metrics import Served, request_notes, serving_metrics


def served(name, prompt, submitted, times, tokens=None):
    return Served(
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
    assert got["ttft_p50_ms"] == pytest.approx((1000 + 250) / 2)
    assert got["ttft_p99_ms"] == pytest.approx(250 + 0.99 * 750)
    # TPOT leaves the first token out: a (2.5 - 1.0) / 2, b (5.0 - 1.25) / 1.
    assert got["tpot_excl_first_p50_ms"] == pytest.approx((750 + 3750) / 2)
    # ITL pools the gaps 0.5, 1.0 and 3.75.
    assert got["itl_chunk_p50_ms"] == pytest.approx(1000)
    assert got["itl_chunk_p99_ms"] == pytest.approx(1000 + 0.98 * 2750)
    assert got["e2e_p50_ms"] == pytest.approx((2500 + 4000) / 2)
    assert got["peak_kv_bytes"] == 4096


def test_the_primary_metric_comes_first_and_is_the_only_one():
    metrics = serving_metrics([served("a", 1, 0.0, [1.0, 2.0])], 1)
    assert [m.name for m in metrics if m.primary] == ["total_tok_s"]
    better = {m.name: m.better for m in metrics}
    assert better["total_tok_s"] == better["output_tok_s"] == better["request_s"] == "higher"
    assert all(word == "lower" for name, word in better.items() if not name.endswith("_s"))


def test_the_wall_clock_starts_at_the_first_submission():
    got = values(serving_metrics([served("a", 5, 100.0, [101.0]), served("b", 5, 98.0, [99.0])], 1))
    assert got["total_tok_s"] == pytest.approx(12 / 3.0)


def test_itl_is_per_chunk_and_tpot_per_token():
    # Three tokens in two chunks: one gap of 1 s, two tokens after the first.
    got = values(serving_metrics([served("a", 1, 0.0, [1.0, 2.0], tokens=[7, 8, 9])], 1))
    assert got["itl_chunk_p50_ms"] == pytest.approx(1000)
    assert got["tpot_excl_first_p50_ms"] == pytest.approx(500)


def test_metrics_without_a_value_are_left_out():
    got = values(serving_metrics([served("a", 1, 0.0, [1.0])], None))
    assert not any(name.startswith(("tpot", "itl", "peak")) for name in got)
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
