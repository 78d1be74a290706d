"""The answer in at most 20 words: names as people write them, and only what was decided."""

from dataclasses import replace

import pytest

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.findings.short_answer import (
    MAX_WORDS,
    arm_text,
    rounded_text,
    short_answer,
    shortest,
)


def answer(path):
    return short_answer(analyse(path))


def test_one_decided_row_has_both_medians(make_cell):
    text = answer(make_cell(effects={"seq_map": 0.8}, cases=("one",)))
    assert text.startswith("Seq map is 19.") or text.startswith("Seq map is 20.")
    assert " % faster than binary search: time per launch 3" in text and text.endswith(" µs.")


def test_a_doubled_and_a_halved_time_are_called_so(make_cell):
    doubled = answer(make_cell(effects={"seq_map": 2.0}, cases=("one",)))
    assert doubled.startswith("Seq map doubles time per launch of binary search: ")
    halved = answer(make_cell("half/x", effects={"seq_map": 0.5}, cases=("one",)))
    assert halved.startswith("Seq map halves ")


def test_rows_that_agree_are_counted(make_cell):
    text = answer(make_cell(effects={"seq_map": 0.8}))
    assert text.startswith("Seq map is faster than binary search in both rows, by ")
    flat = answer(make_cell("flat/x", effects={"seq_map": 1.0}, noise=0.0005))
    assert flat.startswith("No difference between seq map and binary search beyond 0.")
    assert flat.endswith(" in both rows.")


def test_an_undecided_row_has_its_interval(make_cell):
    text = answer(make_cell(effects={"seq_map": 1.0}, noise=0.1, cases=("one",)))
    assert text.startswith("Undecided: seq map is ") and " faster to " in text


def test_an_estimate_keeps_the_name_of_its_arm_within_the_sentence(make_cell):
    text = answer(make_cell(blocks=1, runs=1, cases=("one",), effects={"float16": 0.8, "b": 0.9},
                            claims=False))  # fmt: skip
    assert text.startswith("Estimate only: float16 looks ") and ", b " in text


def test_several_arms_are_ranked_and_many_are_counted(make_cell):
    three = answer(make_cell(effects={"a": 0.9, "b": 0.5, "c": 1.4}, claims=False, cases=("one",)))
    assert three.startswith("B is ") and three.index(", a ") < three.index(", c ")
    effects = {name: 0.5 + 0.05 * i for i, name in enumerate("abcde")}
    many = answer(make_cell("many/x", effects=effects, claims=False))
    assert many.startswith("All 5 arms are faster than binary search in both rows, a most: ")


def test_computed_values_are_given_as_they_are(make_cell):
    """ "49 % less" would not say which share of the memory is taken."""
    pools = {"binary_search": 60.0, "a": 10.0, "b": 0.8}
    names = {f"a_long_name_of_{i}_words": 5.0 + i for i in range(5)}

    def pad(record):
        value = (pools | names).get(record.arm, 60.0)
        metric = replace(record.cases[0].metrics[0], name="kv_waste_pct", unit="%",
                         better="lower", repeats=(value,))  # fmt: skip
        return replace(record, cases=(replace(record.cases[0], metrics=(metric,)),))

    options = {"requests": True, "metrics": ["kv_waste_pct"], "claims": False, "change": pad}
    one = answer(make_cell("one/x", effects={"a": 1.0}, **options))
    assert one == "Wasted KV memory: binary search 60.0, a 10.0 %."
    two = answer(make_cell("two/x", effects={"a": 1.0, "b": 1.0}, **options))
    assert two == "Wasted KV memory: binary search 60.0, a 10.0, b 0.8 %."
    many = answer(make_cell("many/x", effects=dict.fromkeys(names, 1.0), **options))
    assert many == "Wasted KV memory: 5.00 (a long name of 0 words) to 60.0 (binary search), in %."


def test_the_best_arm_of_a_scoring_study_has_its_quality(make_cell):
    def score(record):
        same = 60 if record.arm == "a" else 64
        window = {"tokens": 64, "nll": 100.0, "kl": [0.004] * 64, "same_top1": same,
                  "probability_change_squared": 0.1}  # fmt: skip
        scoring = {"reference_top": 64, "reference_rest": 0.1, "worst": []}
        scoring["windows"] = [window] * 8
        cases = tuple(replace(c, notes={**c.notes, "scoring": scoring}) for c in record.cases)
        return replace(record, cases=cases)

    made = make_cell(effects={"a": 0.5}, cases=("one",), claims=False, change=score)
    assert answer(made).endswith("; KL is 0.004 nats, 93.8 % of next tokens are the same.")


def test_a_failed_gate_leaves_no_answer(make_cell, make_array):
    def differ(record):
        if record.arm != "seq_map":
            return record
        cases = tuple(replace(c, outputs=make_array([9] * 64, [9] * 16)) for c in record.cases)
        return replace(record, cases=cases)

    assert answer(make_cell(change=differ)) == "No answer: the gate identical failed."


def test_several_failed_gates_are_all_named(make_cell):
    def fail(record):
        if record.arm != "seq_map":
            return record
        return replace(record, outcome="oom", detail="no room", cases=())

    expected = "No answer: the gates healthy, engaged and identical failed."
    assert answer(make_cell(change=fail)) == expected


def test_nothing_to_compare_gives_the_value(make_cell):
    text = answer(make_cell(effects={}, requests=True))
    assert text.startswith("Nothing to compare: binary search has throughput 50") or (
        text.startswith("Nothing to compare: binary search has throughput 49")
    )
    assert text.endswith(" tok/s.")  # the case "all" is not named
    assert answer(make_cell("one/x", effects={}, cases=("one",))).endswith(" µs in one.")


def test_an_answer_has_at_most_20_words(make_cell):
    effects = {f"an_arm_with_a_very_long_name_of_many_words_{i}": 0.9 for i in range(3)}
    for blocks in (1, 4):
        made = make_cell(f"long/{blocks}", effects=effects, claims=False, blocks=blocks)
        assert len(answer(made).split()) <= MAX_WORDS


def test_the_first_candidate_that_fits_is_taken_or_the_last_is_cut():
    long = " ".join(["word"] * 21)
    assert shortest([long, "Short."]) == "Short."
    cut = shortest([f"{long}, more"])
    assert len(cut.split()) == MAX_WORDS + 1 and cut.endswith("word …")


@pytest.mark.parametrize(
    ("name", "text"),
    [("seq_map", "seq map"), ("mlx_lm", "mlx_lm"), ("mlx_lm_batch", "mlx_lm batch")],
)
def test_names_are_written_as_words(name, text):
    assert arm_text(name) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(2659.9, "us", "2,660"), (35.84, "us", "35.8"), (0.51832, "us", "0.518"), (0.0, "us", "0")],
)
def test_values_have_three_significant_digits(value, unit, text):
    assert rounded_text(value, unit) == text
