"""The identity gate fails for one wrong token and names its position."""

from dataclasses import replace

import numpy as np

from labkit.analysis import analyse_cell
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.comparison.first_output_difference import ulp_distance
from labkit.analysis.comparison.output_identity import compare_outputs
from labkit.records import CaseRecord, Record, output_values_path
from labkit.workload.output_digest import array_outputs

ROWS, HEADS = list(range(64)), list(range(16))


def change_outputs(arm, index, outputs, block=None):
    """Return a change of one case's outputs in the runs of an arm (in one block)."""

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
    result = cell["gates"]["identical"]
    assert result["status"] == "fail"
    reason = result["reasons"][0]
    assert "seq_map differs from binary_search" in reason
    assert "case 'prefill, 8 × 512', first at token 37, head 5" in reason
    assert "(1 of 64 token rows, 1 of 16 heads)" in reason
    for row in cell["rows"]:
        words = {c["arm"]: (c["verdict"], c["reason"]) for c in row["comparisons"]}
        assert words["seq_map"][0] == "invalid" and "token 37" in words["seq_map"][1]
        assert words["control"][0] != "invalid"
    assert cell["rows"][1]["arms"]["seq_map"]["median"] is not None


def test_ulp_distances_are_counted_across_zero():
    a = np.array([1.0, -1.0, 0.0, -0.0, 1e-45, 2.0], np.float32)
    b = np.array([np.nextafter(np.float32(1), 2), -1.0, -0.0, 1e-45, -1e-45, 1.0], np.float32)
    assert ulp_distance(a, b).tolist() == [1, 0, 0, 1, 2, 1 << 23]


def store_values(cell, change):
    """Give every record real outputs, store their values, and change those of ``seq_map``."""
    one = np.random.default_rng(0).standard_normal((6, 4, 8)).astype(np.float32)
    arrays = {False: one, True: change(one.copy())}
    for array in arrays.values():
        path = output_values_path(cell, array_outputs(array)["digest"])
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, array)

    def apply(record):
        outputs = array_outputs(arrays[record.arm == "seq_map"])
        cases = [replace(record.cases[0], outputs=outputs), *record.cases[1:]]
        return replace(record, cases=tuple(cases))

    return apply


def test_stored_values_give_the_first_and_the_largest_ulp_distance(make_cell, tmp_path):
    def change(x):
        x[2, 3, 1] = np.nextafter(x[2, 3, 1], np.float32(np.inf))
        x.view(np.int32)[4, 0, 7] += 9
        return x

    cell = tmp_path / "a/x"
    path = make_cell("a/x", change=store_values(cell, change))
    reason = gate(path)["reasons"][0]
    assert "first at token 2, head 3: 1 ULP apart, at most 9 ULP at token 4, head 0 [" in reason
    assert "(2 of 6 token rows, 2 of 4 heads)" in reason
    for file in (cell / "outputs").iterdir():  # damaged: not the bytes that the name says
        np.save(file, np.zeros((6, 4, 8), np.float32))
    assert "ULP distance unknown: the values were not kept" in gate(path)["reasons"][0]


def test_an_arm_that_does_not_repeat_itself_fails_bitwise(make_cell, make_array):
    path = make_cell("a/x", change=change_outputs("seq_map", 1, wrong_row(make_array), block=2))
    assert gate(path)["status"] == "fail"
    path = make_cell("a/y", change=change_outputs("control", 1, wrong_row(make_array), block=2))
    cell = analyse_cell(path)
    assert "control does not reproduce its own outputs" in cell["gates"]["identical"]["reasons"][0]
    assert all(c["verdict"] == "invalid" for row in cell["rows"] for c in row["comparisons"])
    path = make_cell(
        "a/z", change=change_outputs("binary_search", 1, wrong_row(make_array), block=2)
    )
    assert "binary_search does not reproduce its own outputs" in gate(path)["reasons"][0]


def test_other_shapes_and_missing_outputs_fail_the_gate(make_cell, make_array):
    path = make_cell("a/x", change=change_outputs("seq_map", 0, make_array(ROWS[:32], HEADS)))
    assert "float32 [64, 16, 8] and float32 [32, 16, 8]" in gate(path)["reasons"][0]
    path = make_cell("a/y", change=change_outputs("seq_map", 0, None))
    assert "no outputs were recorded" in gate(path)["reasons"][0]


def tokens(changed=0):
    return {f"r{i:03d}": [i, i + 1, 50 if i < changed else i + 2, 7] for i in range(8)}


def test_a_difference_names_request_position_tokens_and_margin(make_cell, make_tokens):
    for claim in ("tokens", "bitwise"):
        path = make_cell(
            f"a/{claim}",
            requests=True,
            identity=claim,
            change=change_outputs("seq_map", 0, make_tokens(tokens(1), 0.25)),
        )
        (reason, *_) = gate(path)["reasons"]
        difference = "request r000 at position 2: 2 against 50, logit margin 0.5 (1 of 8 requests)"
        assert difference in reason
    agreement = {a.arm: a for a in analyse(path).identity.agreement}
    assert (agreement["seq_map"].agree, agreement["seq_map"].total) == (7, 8)
    assert agreement["seq_map"].prefix == (7 + 0.5) / 8
    assert agreement["control"].agree == 8


def test_tokens_are_shown_with_their_recorded_text(make_cell, make_tokens):
    def spelled(record):
        changed = tokens(record.arm == "seq_map")
        outputs = {**make_tokens(changed), "pieces": {"2": " the", "50": ' "a\n'}}
        return replace(record, cases=(replace(record.cases[0], outputs=outputs),))

    path = make_cell(requests=True, identity="tokens", change=spelled)
    (reason, *_) = gate(path)["reasons"]
    assert 'at position 2: 2 " the" against 50 " \\"a\\n", logit margin 0.5' in reason
    first = analyse(path).identity.first("seq_map")
    assert first.where in reason and analyse(path).identity.first("control") is None


def test_a_shorter_output_differs_at_its_end(make_cell, make_tokens):
    short = {**tokens(), "r003": [3, 4]}
    path = make_cell(
        requests=True, identity="tokens", change=change_outputs("seq_map", 0, make_tokens(short))
    )
    assert "request r003 at position 2: 5 against the end" in gate(path)["reasons"][0]


def test_noise_floor_compares_with_the_control(make_cell, make_tokens):
    def noisy(arm_misses, control_misses):
        arm = change_outputs("seq_map", 0, make_tokens(tokens(arm_misses)))
        control = change_outputs("control", 0, make_tokens(tokens(control_misses)))
        return lambda record: control(arm(record))

    options = {"requests": True, "identity": "noise_floor"}
    assert gate(make_cell("a/x", change=noisy(3, 2), **options))["status"] == "pass"
    result = gate(make_cell("a/y", change=noisy(8, 0), **options))
    assert result["status"] == "fail"
    assert (
        "8 of 8 outputs differ from the baseline's; of the control's outputs, 0 of 8 differ"
        in (result["reasons"][0])
    )
    result = gate(make_cell("a/z", control=False, **options))
    assert result["status"] == "fail" and "needs the A/A control" in result["reasons"][0]


def agreements(alike, others, claim="none"):
    """Return how many outputs of an arm agree: ``others`` are those of its runs, in order."""
    runs = [("base", alike), *(("arm", outputs) for outputs in others)]
    records = [
        Record(arm, "arm", block, 0, 0, "ok", "now", cases=(CaseRecord("a", outputs=outputs),))
        for block, (arm, outputs) in enumerate(runs)
    ]
    report = compare_outputs(records, ["base", "arm"], None, claim)
    return {one.arm: (one.agree, one.total) for one in report.agreement}["arm"]


def test_an_output_agrees_only_if_it_does_so_in_every_run(make_array, make_tokens):
    """Runs that differ in other outputs count too, and runs with the same outputs only once."""
    plain = {"a": [1, 2], "b": [3, 4], "c": [5, 6]}
    first, second = (make_tokens({**plain, name: [1, 9]}) for name in "ab")
    assert agreements(make_tokens(plain), [first, first, second, make_tokens(plain)]) == (1, 3)
    rows = make_array(ROWS, HEADS)
    changed = [make_array([999 if i in at else i for i in ROWS], HEADS) for at in ((1,), (2, 3))]
    assert agreements(rows, [changed[0], rows, changed[1]]) == (61, 64)
    frames = {"kind": "frames", "digest": "d", "picks": [1, 2], "asked": [1, 2], "pixels": "xy",
              "wished": True}  # fmt: skip
    right, *wrong = ({**frames, "decoder": decoder} for decoder in ("xy", "xz", "zy"))
    assert agreements(right, [right, wrong[0]]) == (1, 2)
    assert agreements(right, wrong) == (0, 2)  # the digest is that of the pixels alone
