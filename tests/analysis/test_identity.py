"""The identity gate: it fails for one wrong token, and says where."""

from dataclasses import replace

from labkit.analysis import analyse_cell
from labkit.analysis.cell import analyse

ROWS, HEADS = list(range(64)), list(range(16))


def change_outputs(arm, index, outputs, block=None):
    """Give a change of one case's outputs, for the runs of an arm (in one block)."""

    def apply(record):
        if record.arm != arm or (block is not None and record.block != block):
            return record
        cases = list(record.cases)
        cases[index] = replace(cases[index], outputs=outputs)
        return replace(record, cases=tuple(cases))

    return apply


def wrong_row(make_array):
    return make_array([999 if i == 37 else i for i in ROWS], [99 if i == 5 else i for i in HEADS])


def gate(path):
    return analyse_cell(path)["gates"]["identical"]


def test_equal_outputs_pass_and_none_is_unclaimed(make_cell):
    assert gate(make_cell("a/x")) == {"status": "pass", "reasons": []}
    assert gate(make_cell("a/y", identity="none")) == {"status": "unclaimed", "reasons": []}


def test_one_wrong_token_fails_and_names_case_token_and_head(make_cell, make_array):
    path = make_cell(change=change_outputs("seq_map", 1, wrong_row(make_array)))
    cell = analyse_cell(path)
    found = cell["gates"]["identical"]
    assert found["status"] == "fail"
    reason = found["reasons"][0]
    assert "seq_map differs from binary_search" in reason
    assert "case 'prefill, 8 × 512', first at token 37, head 5" in reason
    assert "(1 of 64 token rows, 1 of 16 heads)" in reason
    for row in cell["rows"]:
        words = {c["arm"]: (c["verdict"], c["reason"]) for c in row["comparisons"]}
        assert words["seq_map"][0] == "invalid" and "token 37" in words["seq_map"][1]
        assert words["control"][0] != "invalid"
    assert cell["rows"][1]["arms"]["seq_map"]["median"] is not None


def test_an_arm_that_does_not_repeat_itself_fails_bitwise(make_cell, make_array):
    path = make_cell("a/x", change=change_outputs("seq_map", 1, wrong_row(make_array), block=2))
    assert gate(path)["status"] == "fail"
    path = make_cell("a/y", change=change_outputs("control", 1, wrong_row(make_array), block=2))
    cell = analyse_cell(path)
    assert "control does not repeat itself" in cell["gates"]["identical"]["reasons"][0]
    assert all(c["verdict"] == "invalid" for row in cell["rows"] for c in row["comparisons"])
    path = make_cell(
        "a/z", change=change_outputs("binary_search", 1, wrong_row(make_array), block=2)
    )
    assert "binary_search does not repeat itself" in gate(path)["reasons"][0]


def test_shape_and_missing_outputs(make_cell, make_array):
    path = make_cell("a/x", change=change_outputs("seq_map", 0, make_array(ROWS[:32], HEADS)))
    assert "float32 [64, 16, 8] and float32 [32, 16, 8]" in gate(path)["reasons"][0]
    path = make_cell("a/y", change=change_outputs("seq_map", 0, None))
    assert "no outputs were recorded" in gate(path)["reasons"][0]


def tokens(changed=0):
    return {f"r{i:03d}": [i, i + 1, 50 if i < changed else i + 2, 7] for i in range(8)}


def test_requests_name_request_position_tokens_and_margin(make_cell, make_tokens):
    for claim in ("tokens", "bitwise"):
        path = make_cell(
            f"a/{claim}",
            requests=True,
            identity=claim,
            change=change_outputs("seq_map", 0, make_tokens(tokens(1), 0.25)),
        )
        (reason, *_) = gate(path)["reasons"]
        assert "request r000 at position 2: 2 and 50, logit margin 0.5 (1 of 8 requests)" in reason
    agreement = {a.arm: a for a in analyse(path).identity.agreement}
    assert (agreement["seq_map"].agree, agreement["seq_map"].total) == (7, 8)
    assert agreement["seq_map"].prefix == (7 + 0.5) / 8
    assert agreement["control"].agree == 8


def test_a_shorter_output_differs_at_its_end(make_cell, make_tokens):
    short = {**tokens(), "r003": [3, 4]}
    path = make_cell(
        requests=True, identity="tokens", change=change_outputs("seq_map", 0, make_tokens(short))
    )
    assert "request r003 at position 2: 5 and the end" in gate(path)["reasons"][0]


def test_noise_floor_compares_with_the_control(make_cell, make_tokens):
    def noisy(arm_misses, control_misses):
        arm = change_outputs("seq_map", 0, make_tokens(tokens(arm_misses)))
        control = change_outputs("control", 0, make_tokens(tokens(control_misses)))
        return lambda record: control(arm(record))

    options = {"requests": True, "identity": "noise_floor"}
    assert gate(make_cell("a/x", change=noisy(3, 2), **options))["status"] == "pass"
    found = gate(make_cell("a/y", change=noisy(8, 0), **options))
    assert found["status"] == "fail"
    assert (
        "8 of 8 outputs differ from the baseline's, 0 of 8 of the control's"
        in (found["reasons"][0])
    )
    found = gate(make_cell("a/z", control=False, **options))
    assert found["status"] == "fail" and "needs the A/A control" in found["reasons"][0]
