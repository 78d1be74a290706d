"""Attained rates beside attainable ones, and disagreements between counters and workloads."""

from planted_cells import planted_cell, section_table

from labkit.analysis.robustness.hit_and_acceptance_rates import hit_and_acceptance_rates
from labkit.analysis.tables.engine_counter_tables import hit_and_acceptance_section
from labkit.records import Record

CELL = planted_cell(arms=[{"name": "a", "role": "baseline"}, {"name": "b", "role": "arm"}])


def run(arm, counters, *, shared=500, unshared=False, **notes):
    sharing = {
        "prompt_tokens": 1000, "shared_tokens": shared, "block_size": 16, "unshared": unshared,
    }  # fmt: skip
    role = "baseline" if arm == "a" else "arm"
    noted = {"sharing": sharing, **notes}
    return Record(arm, role, 0, 0, 0, "ok", "now", counters=counters, notes=noted)


def hits(tokens, **counters_added):
    return {"prefix.queried_tokens": 990.0, "prefix.hit_tokens": float(tokens), **counters_added}


def disagreements(*records):
    return [
        line
        for one in hit_and_acceptance_rates(["a", "b"], records)
        for line in one.impossible_counts()
    ]


def test_attained_rates_stand_beside_attainable_ones():
    records = [
        run("a", hits(400, **{"tokens.padded": 25.0, "tokens.computed": 75.0})),
        run("b", {"spec.drafted": 200.0, "spec.accepted": 30.0}),
    ]
    table = section_table(hit_and_acceptance_section, CELL, records)
    assert [c.heading for c in table.columns] == [
        "arm", "prefix hits attainable", "attained", "drafts accepted", "rows of padding",
    ]  # fmt: skip
    assert [table.cells(line) for line in table.lines] == [
        ["a", "50.0%", "40.0%", "", "25.0%"],
        ["b", "", "", "15.0%", ""],
    ]
    assert disagreements(*records) == []
    (note,) = table.notes
    assert note.startswith("Attainable: ")


def test_hits_above_the_shared_tokens_are_a_disagreement():
    assert disagreements(run("a", hits(500))) == []
    assert disagreements(run("a", hits(516))) == [
        "a: 51.6% of its prompt tokens hit the prefix cache, but at most 50.0% are shared "
        "with an earlier prompt and its answer"
    ]
    # A preempted request finds its own blocks again.
    assert disagreements(run("a", hits(516, preemptions=2.0))) == []


def test_prompts_may_repeat_earlier_answers():
    """Of each of two requests 20 tokens, and the end of its prompt in the same block."""
    served = {"tokens.output": 40.0, "requests.submitted": 2.0}
    assert disagreements(run("a", hits(572, **served))) == []
    (line,) = disagreements(run("a", hits(573, **served)))
    assert "at most 57.2% are shared" in line
    (line,) = disagreements(run("a", hits(16, **served), shared=0, unshared=True))
    assert line.endswith("no two prompts share a prefix")


def test_impossible_hits_and_accepted_random_drafts_are_disagreements():
    assert disagreements(run("a", hits(16), shared=0, unshared=True)) == [
        "a: 1.6% of its prompt tokens hit the prefix cache, but no two prompts share a prefix"
    ]
    assert disagreements(run("a", hits(0), shared=0, unshared=True)) == []
    warm = run("a", hits(900), shared=950, unshared=True, cache_state="warm")
    assert disagreements(warm) == []
    random = {"spec.random": 9.0, "spec.drafted": 1000.0}
    assert disagreements(run("b", {**random, "spec.accepted": 2.0})) == []
    (line,) = disagreements(run("b", {**random, "spec.accepted": 100.0}))
    assert line == "b: 10.0% of its draft tokens are accepted, but the drafts are random"


def test_old_records_and_arms_without_attainable_rates_have_no_table():
    old = Record("a", "baseline", 0, 0, 0, "ok", "now", counters=hits(4))
    assert (
        section_table(hit_and_acceptance_section, CELL, [old, run("b", {"tokens.computed": 5.0})])
        is None
    )


def padding(padded, computed=100, *, tokens=80, slots=100, prompts=1.0, **counters_added):
    counted = {"tokens.padded": float(padded), "tokens.computed": computed}
    counters = {"layout.padded": 5.0, "steps.prefill": prompts, **counted, **counters_added}
    return run("a", counters, rectangle={"tokens": tokens, "slots": slots})


def test_padding_is_compared_with_that_of_a_rectangle():
    table = section_table(hit_and_acceptance_section, CELL, [padding(10, 90)])
    assert [note.partition(":")[0] for note in table.notes] == ["One rectangle"]
    heads = ["arm", "padding of one rectangle", "rows of padding"]
    assert [c.heading for c in table.columns] == heads
    assert [table.cells(line) for line in table.lines] == [["a", "20.0%", "10.0%"]]
    assert disagreements(padding(20, 80)) == []


def test_padding_of_equal_requests_is_a_disagreement():
    assert disagreements(padding(1, 99, tokens=100)) == [
        "a: 1.0% of its rows are padding, but all requests have the same length"
    ]
    alike = section_table(hit_and_acceptance_section, CELL, [padding(0, tokens=100)])
    assert [alike.cells(line) for line in alike.lines] == [["a", "0.0%", "0.0%"]]
    # Rows wait for the prompts of others, and a fixed shape pads by its own rule.
    assert disagreements(padding(1, 99, tokens=100, prompts=2.0)) == []
    assert disagreements(padding(50, 50, tokens=100, **{"decode_shape.fixed": 3.0})) == []
