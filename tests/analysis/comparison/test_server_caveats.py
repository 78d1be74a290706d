"""Servers as arms: lateness of the client, counts that differ, and outputs compared as text."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from planted_cells import planted_cell

from labkit.analysis.comparison import client_lateness, server_caveats
from labkit.analysis.comparison.first_output_difference import text_difference, text_shares
from labkit.analysis.comparison.output_identity import compare_outputs
from labkit.analysis.comparison.validity_gates import healthy, identical
from labkit.analysis.robustness.disturbed_runs import disturbed_blocks
from labkit.analysis.tables.load_test_diagnostics import http_section
from labkit.records import Arm, CaseRecord, Record
from labkit.workload.output_digest import text_digest

SPREAD = {"p50": 1.0, "p99": 2.0, "max": 3.0}
CLIENT = {
    "lag_ms": SPREAD, "late_ms": SPREAD, "connect_ms": SPREAD, "chunk_us": 50.0,
    "most_late_ms": 20.0,
    "floor": {"ttft_ms": SPREAD, "chunk_ms": SPREAD, "itl_ms": SPREAD, "chunk_us": 40.0},
}  # fmt: skip
SERVER = {
    "preset": "mlx_lm", "command": "serve {port}", "kept": None, "run_here": True,
    "api": "completions", "prompts": "text", "identity": "text", "counted_by": "usage",
    "disagree": [],
}  # fmt: skip
COUNTS = {
    "tokens.usage": 40.0, "tokens.tokenizer": 40.0, "tokens.stream": 40.0,
    "tokens.prompt": 90.0, "tokens.prompt_usage": 90.0, "tokens.cached": 0.0,
    "stream.chunks": 38.0, "stream.bundled": 2.0, "stream.empty": 1.0,
    "requests.submitted": 2.0, "finish.length": 2.0,
}  # fmt: skip
SHARING = {"prompt_tokens": 90, "shared_tokens": 16, "block_size": 16, "unshared": False}


def run(arm="server", role="arm", client=None, server=None, traffic=None, outputs=None, **counts):
    notes = {
        "engine": {"server": {**SERVER, **(server or {})}, "client": {**CLIENT, **(client or {})}},
        "sharing": SHARING,
    }
    case = CaseRecord("all", outputs=outputs, notes={"traffic": traffic or {}})
    return Record(
        arm, role, 0, 0, 0, "ok", "2026-01-01T00:00:00Z",
        cases=(case,), counters={**COUNTS, **counts}, notes=notes,
    )  # fmt: skip


def test_a_faultless_server_without_token_ids_has_one_caveat():
    (line,) = server_caveats.caveats([run()])
    assert "the server returns no token ids" in line and "weaker" in line
    assert list(server_caveats.caveats([run(server={"identity": "token ids"})])) == []
    assert healthy([run()]).status == "pass"


@pytest.mark.parametrize("missing", ["server", "client"])
def test_an_arm_without_notes_on_both_server_and_client_is_no_server(missing):
    engine = {"server": SERVER, "client": CLIENT, missing: None}
    record = replace(run(), notes={"engine": engine})
    assert list(client_lateness.lateness_errors(record)) == []
    assert list(server_caveats.caveats([record])) == []


def test_cached_tokens_are_not_judged_without_the_workload_s_sharing():
    record = run(server={"identity": "token ids"}, **{"tokens.cached": 89.0})
    (line,) = server_caveats.caveats([record])
    assert "hit the server's cache" in line
    notes = {"engine": record.notes["engine"]}
    assert list(server_caveats.caveats([replace(record, notes=notes)])) == []


@pytest.mark.parametrize(
    ("path", "key", "message"),
    [
        ("lag_ms", "p99", "its event loop woke 20.5 ms late"),
        ("late_ms", "p99", "it sent requests 20.5 ms late"),
        ("floor.ttft_ms", "p50", "its own part of TTFT, measured with a null server, is 20.5 ms"),
        ("floor.chunk_ms", "p99", "it saw a null server's chunks 20.5 ms late"),
    ],
)
def test_a_client_that_is_late_is_not_healthy(path, key, message):
    client = json.loads(json.dumps(CLIENT))  # its spreads are one
    *folders, last = path.split(".")
    times = client
    for name in folders:
        times = times[name]
    times[last][key] = 20.5
    gate = healthy([run(), run(client=client)])
    assert gate.status == "fail" and len(gate.reasons) == 1
    assert message in gate.reasons[0] and "(engine.server.most_late_ms)" in gate.reasons[0]
    assert gate.cause("any arm") == "the client was late in b00-p00-server"
    times[last][key] = 19.5
    assert healthy([run(client=client)]).status == "pass"


@pytest.mark.parametrize(
    ("blocks", "late_blocks", "status"),
    [
        (6, 1, "pass"), (6, 2, "fail"), (6, 6, "fail"), (4, 1, "pass"), (4, 2, "fail"),
        (3, 1, "pass"), (2, 1, "fail"), (10, 2, "pass"), (10, 3, "fail"),
    ],
)  # fmt: skip
def test_a_client_that_was_late_in_few_blocks_disturbs_them_and_no_more(
    blocks, late_blocks, status
):
    """In one block of several it is left out as other disturbances are; in more it is the arm's."""
    late = {**CLIENT, "lag_ms": {**SPREAD, "p99": 50.5}}
    records = [
        replace(run(arm, role, client=client if n < late_blocks else None), block=n)
        for n in range(blocks)
        for arm, role, client in (("base", "baseline", None), ("server", "arm", late))
    ]
    gate, disturbed = healthy(records), disturbed_blocks(records)
    assert gate.status == status and len(gate.reasons) == (late_blocks if status == "fail" else 0)
    assert list(disturbed) == list(range(late_blocks))
    ((reason, during_arm),) = disturbed[0]
    assert "its event loop woke 50.5 ms late" in reason and during_arm


def test_arrivals_that_were_sent_late_are_not_healthy():
    gate = healthy([run(traffic={"late_ms": {"p99": 21.0}})])
    assert "it sent arrivals 21.0 ms late" in gate.reasons[0]


def test_counts_that_differ_are_named_with_the_first_request():
    server = {"disagree": [{"id": "r3", "usage": 20, "tokenizer": 21, "stream": None}]}
    lines = list(server_caveats.caveats([run(server=server, **{"tokens.tokenizer": 44.0})]))
    assert (
        "server: its output tokens: 40 in the server's usage, 44 counted by the tokenizer, 40 in "
        "the stream; request r3: 20 in the server's usage, 21 counted by the tokenizer, none in "
        "the stream; the metrics use the counts from the usage" in lines
    )


def test_every_peculiarity_of_a_server_is_a_caveat():
    server = {"kept": "http://127.0.0.1:9", "run_here": False, "preset": "vllm"}
    lines = "\n".join(server_caveats.caveats([
        run(server=server, **{"tokens.prompt_usage": 95.0, "tokens.cached": 89.0,
                            "stream.tool_calls": 3.0})
    ]))  # fmt: skip
    assert "its server ran before this run and stays up (http://127.0.0.1:9)" in lines
    assert "may hold the previous run's prompts (89 tokens hit)" in lines
    assert "labkit's tests have not run it" in lines
    assert "read 95 prompt tokens, but the workload has 90 (prompts were sent as text)" in lines
    assert (
        "89 prompt tokens hit the server's cache, but the prompts share only 16 and at most 40 of "
        "earlier answers, so the cache held" in lines
    )
    assert "3 chunks were tool calls" in lines


def test_a_kept_server_without_cache_counts_is_not_assumed_cold():
    """Every run sends the same prompts, so a server that stays up may have them cached."""
    record = run(server={"kept": "http://127.0.0.1:9"})
    silent = replace(record, counters={k: v for k, v in COUNTS.items() if k != "tokens.cached"})
    (caveat, *_) = server_caveats.caveats([silent])
    assert caveat.endswith(
        "may hold the previous run's prompts (the server does not report cached tokens)"
    )
    assert not any("prefix cache" in line for line in server_caveats.caveats([run()]))


@pytest.mark.parametrize(("unshared", "most"), [(False, 88.0), (True, 48.0)])
def test_cache_hits_may_exceed_shared_tokens_by_a_block_per_request_and_the_answers(unshared, most):
    """A server may share single tokens: up to a block of 16 more for each of two requests."""

    def about_cache(cached):
        record = run(**{"tokens.cached": cached})
        notes = {**record.notes, "sharing": {**SHARING, "unshared": unshared}}
        lines = server_caveats.caveats([replace(record, notes=notes)])
        return [line for line in lines if "the cache held" in line]

    assert about_cache(most) == []
    (line,) = about_cache(most + 1)
    assert ("of earlier answers" in line) == (not unshared)


def test_controls_and_arms_without_a_server_have_no_caveats():
    plain = Record("base", "baseline", 0, 0, 0, "ok", "2026-01-01T00:00:00Z")
    assert list(server_caveats.caveats([run(role="control"), plain])) == []
    assert list(client_lateness.lateness_errors(plain)) == []


def test_the_tables_have_a_line_for_every_server():
    arms = [{"name": "base", "role": "baseline"}, {"name": "server", "role": "arm"}]
    cell = planted_cell(arms=arms)

    def tables(*records):
        report = SimpleNamespace(cell=cell, records=records)
        return [part.table for part in http_section.parts(report)]

    streams, client = tables(run())
    assert [streams.cells(line) for line in streams.lines] == [
        ["server", "mlx_lm", "text", "40", "40", "40", "38", "2", "1", "length 2", "0"]
    ]
    (line,) = client.lines
    assert client.cells(line)[0] == "server" and "40.0" in client.cells(line)[-1]
    assert tables() == []


def texts(**texts_by_id):
    return {
        "kind": "text",
        "digest": text_digest(repr(texts_by_id)),
        "requests": [
            {"id": name, "text": text, "text_digest": text_digest(text), "finish": "length"}
            for name, text in texts_by_id.items()
        ],
    }


def tokens(**tokens_by_id):
    pieces = {str(i): word for i, word in enumerate(("a", " b", " c", " d"))}
    return {
        "kind": "tokens",
        "digest": "0" * 64,
        "pieces": pieces,
        "requests": [
            {
                "id": name,
                "tokens": ids,
                "margins": None,
                "finish": "length",
                "text_digest": text_digest("".join(pieces[str(i)] for i in ids)),
            }
            for name, ids in tokens_by_id.items()
        ],
    }


def test_tokens_and_texts_are_compared_as_texts():
    ours, same = tokens(r0=[0, 1, 2], r1=[0, 3]), texts(r0="a b c", r1="a d")
    assert text_difference(ours, same) is None
    other = texts(r0="a b c", r1="a c")
    assert text_difference(ours, other) == (
        'first in request r1 at character 2: "d" against "c" (1 of 2 requests, compared as text)'
    )
    assert text_shares(ours, other) == {"r0": 1.0, "r1": pytest.approx(2 / 3)}
    assert "is missing" in text_difference(ours, texts(r0="a b c"))


def test_texts_whose_digests_differ_are_never_the_same():
    ours, theirs = texts(r0="same"), texts(r0="same")
    theirs["requests"][0]["text_digest"] = "f" * 16
    assert text_shares(ours, theirs)["r0"] < 1 and text_difference(ours, theirs) is not None


@pytest.mark.parametrize(("text", "status"), [("a d", "pass"), ("a c", "fail")])
def test_the_identity_gate_compares_texts(text, status):
    arms = [
        Arm("base", "baseline", {}, {}, identity="tokens"),
        Arm("server", "arm", {}, {}, identity="tokens"),
    ]
    base = replace(run("base", "baseline", outputs=tokens(r0=[0, 3])), notes={})
    records = [base, run(outputs=texts(r0=text))]
    report = compare_outputs(records, ["base", "server"], None)
    gate = identical(report, arms, records, 0.05)
    assert gate.status == status
    assert (status == "pass") == (not gate.reasons)


@pytest.mark.parametrize("baseline", ["base", "server"])
@pytest.mark.parametrize("respelled", [0.0, 2.0])
def test_the_identity_gate_names_prompts_that_a_server_tokenised_differently(respelled, baseline):
    """Its outputs answer other prompts, so no difference of the engines need have caused theirs."""
    arms = [
        Arm(name, "baseline" if name == baseline else "arm", {}, {}, identity="tokens")
        for name in sorted(("base", "server"), key=lambda name: name != baseline)
    ]
    base = replace(run("base", "baseline", outputs=tokens(r0=[0, 3])), notes={})
    server = replace(run(outputs=texts(r0="a c")), counters={"prompts.respelled": respelled})
    records = [base, server]
    report = compare_outputs(records, [arm.name for arm in arms], None)
    gate = identical(report, arms, records, 0.05)
    clause = "server's server takes text and tokenised 2 prompts to other ids than the workload's"
    assert gate.status == "fail" and (clause in gate.reasons[0]) is (respelled > 0)
    assert ("workload=chat" in gate.cause(arms[1].name)) is (respelled > 0)
