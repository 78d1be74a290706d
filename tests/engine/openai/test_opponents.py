"""Servers that fail, hang or miscount, beside an honest one: none of them gets a wrong headline.

Both serve tokens at the same pace, so no verdict of faster or slower is right. Each server is
measured once. The runs of further blocks differ from it by noise.
"""

import contextlib
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from planted_cells import caveats
from stub_server import Stub

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.findings.cell_findings import plan_findings
from labkit.analysis.findings.full_answer import long_text
from labkit.analysis.findings.verdict_sentences import summary_verdict
from labkit.analysis.model.result_row import Row
from labkit.config import Engine, OpenAIServer, Workload
from labkit.engine import openai
from labkit.experiment.worker.run_failures import failure_of
from labkit.records import Arm, Record, publish_arm, publish_records, write_json
from labkit.workload.requests.serving_session import ServingSession
from labkit.workload.tokenized_prompt import Prompt

WORKLOAD = Workload(name="opponents", concurrency=4, warmup=0)
PROMPTS = [Prompt(f"r{i}", (300 + i, 301, 302), 6 + 3 * (i % 2)) for i in range(4)]
BLOCKS = 8
ON_TIME = {"most_late_ms": 1e4}  # a busy machine delays the client, which is not asked here
DESIGN = {
    "seed": 0, "blocks": BLOCKS, "runs_per_block": 1, "control": False, "isolation": "process",
    "looks": [], "alpha": 0.05, "margin_pct": 2.0, "metrics": ["total_tok_s"],
}  # fmt: skip


def measured(engine):
    """Return the record of a run."""
    record = Record("one", "arm", 0, 0, 0, "ok", "2026-11-20T20:00:00Z", environment={"host": "h"})
    session = ServingSession(engine, PROMPTS, WORKLOAD, seed=1, vocab_size=512)
    try:
        result = session.measure(lambda text: None)
    except Exception as error:
        failure = failure_of(error, "measure")
        return replace(record, outcome=failure.outcome, detail=failure.detail)
    return replace(record, cases=result.cases, counters=result.counters, notes=result.notes)


@pytest.fixture(scope="module")
def honest(tiny_dir):
    """The record of an honest server's run."""
    with contextlib.closing(Stub()) as stub:
        server = OpenAIServer(preset="other", url=stub.url, **ON_TIME)
        with contextlib.closing(
            openai.create(Engine(name="openai", server=server), tiny_dir)
        ) as it:
            it.reset_counters()
            return measured(it)


@pytest.fixture
def study(tmp_path):
    """Return a function that analyses an opponent's run beside an honest server's."""
    number = count()

    def compare(baseline, arm):
        cell = tmp_path / f"cell{next(number)}"
        (cell / "runs").mkdir(parents=True)
        (cell / "arms").mkdir()
        config = {"engine": {"name": "openai"}, "model": {}, "workload": {}, "seed": 0}
        for name, role in (("base", "baseline"), ("server", "arm")):
            publish_arm(cell, Arm(name, role, {}, config, "none"))
        write_json(cell / "cell.json", {
            "schema_version": 1, "cell": cell.name, "question": None, "arms": [], "design": DESIGN,
            "gates": {}, "rows": [], "failures": [], "environment": {}, "published": None,
        })  # fmt: skip
        noise = np.exp(np.random.default_rng(5).normal(0, 0.01, (BLOCKS, 2)))
        for block in range(BLOCKS):
            for place, record in enumerate((baseline, arm)):
                named = replace(record, arm=("base", "server")[place], block=block, position=place)
                role = ("baseline", "arm")[place]
                publish_records(cell, replace(varied(named, noise[block, place]), role=role))
        return analyse(cell)

    return compare


def varied(record, factor):
    """Return a record whose values are larger by a factor."""
    cases = [
        replace(case, metrics=[replace(m, repeats=(m.repeats[0] * factor,)) for m in case.metrics])
        for case in record.cases
    ]
    return replace(record, cases=tuple(cases))


@pytest.mark.parametrize(
    ("modes", "why"),
    [
        (("broken",), "500: out of order"),
        (("half", "broken"), "2 of 4 requests were not served, and the baseline served others"),
        (("half", "refuses"), "2 of 4 requests were not served"),
        (("half", "dead"), "2 of 4 requests were not served"),
        (("half", "pings"), "2 of 4 requests were not served"),
        (("half", "breaks"), "2 of 4 requests were not served"),  # as a server that dies
        (("half", "redirects"), "2 of 4 requests were not served"),
        (("early",), "the stream ended early"),
        (("mute",), "the stream has no token"),
        (("nonsense",), "invalid chunk"),
        (("miscounts",), "the server returned 7 tokens, but max_tokens is 6"),
        (("undercounts",), "the stream ended early: 5 of 6 tokens"),
        (("half", "miscounts"), "2 of 4 requests were not served"),
        (("no_usage",), "the tokenizer counts more tokens than max_tokens allows"),
        (("half", "no_usage"), "the tokenizer and usage counts more tokens than max_tokens"),
    ],
)
def test_a_server_that_fails_or_miscounts_gets_no_verdict(opponent, honest, study, modes, why):
    silent = {"silence_s": 1.0} if {"dead", "pings"} & set(modes) else {}
    engine, stub = opponent(**silent, **ON_TIME)
    stub.modes |= set(modes)
    other = measured(engine)
    analysis = study(honest, other)
    row = Row("all", "total_tok_s")
    reasons = [*analysis.causes("server", row), *caveats(analysis)]
    assert any(why in reason for reason in reasons), reasons
    assert not any("request r1: request" in reason for reason in reasons), reasons
    for one in (analysis, study(other, honest)):
        words = {found.verdict for row, found in one.cell.compared if row.primary}
        assert words <= {"invalid"}
        findings = plan_findings(one)
        assert summary_verdict(findings).kind == "invalid"
        assert "nothing was measured" not in findings.cause or other.outcome != "ok"
        assert long_text(findings).startswith("No answer: ")


@pytest.mark.parametrize("modes", [(), ("bundles",), ("role_first",)])
def test_an_honest_server_gets_a_verdict(opponent, honest, study, modes):
    """Its throughput is set to that of the other: only what it did beside that is judged."""
    engine, stub = opponent(**ON_TIME)
    stub.modes |= set(modes)
    other = measured(engine)
    (case,), (own,) = honest.cases, other.cases
    analysis = study(honest, replace(other, cases=(replace(own, metrics=case.metrics),)))
    (one,) = [one for row, one in analysis.cell.compared if row.primary]
    assert one.verdict in ("inconclusive", "equivalent") and not analysis.causes("server")
    bundled = [line for line in caveats(analysis) if "a chunk of its stream holds" in line]
    assert len(bundled) == ("bundles" in modes)
    assert not bundled or "holds 1.9 tokens on average" in bundled[0]
