"""The identity gate of picked frames: their pixels are the decoder's at that position."""

from dataclasses import replace

import pytest
from planted_cells import output_difference

from labkit.analysis import analyse_cell, load
from labkit.analysis.pages.report_files import write_study
from labkit.records import CaseRecord, Metric

KEYS = [0, 50, 100]


def outputs(picks, requested=None, wished=True, wrong=()):
    """Return outputs of picked frames; those at ``wrong`` have other pixels than the decoder's."""
    return {
        "kind": "frames",
        "digest": str(picks) + str(wrong),
        "wished": wished,
        "asked": list(requested or picks),
        "picks": list(picks),
        "pixels": [f"x{place}" if i in wrong else f"p{place}" for i, place in enumerate(picks)],
        "decoder": [f"p{place}" for place in picks],
    }


GOOD, KEYFRAMES = outputs([0, 40, 99]), outputs([0, 50, 100], wished=False)


def test_correct_frames_have_no_difference():
    assert output_difference(GOOD, outputs([0, 40, 99])) is None
    assert output_difference(GOOD, KEYFRAMES) is None
    assert output_difference(None, GOOD) is None
    same = outputs([0, 40, 99], wished=False)
    assert output_difference(GOOD, same, claim="bitwise") is None
    assert "first differ at pick 1" in output_difference(GOOD, KEYFRAMES, claim="bitwise")


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (
            outputs([0, 41, 99], requested=[0, 40, 99]),
            "pick 1 is frame 41, but frame 40 was requested",
        ),
        (
            outputs([0, 40, 99], wrong=[1]),
            "the pixels of pick 1 are not those that the decoder returns for frame 40",
        ),
        (
            outputs([0, 50, 100], wished=False, wrong=[2]),
            "the pixels of pick 2 .* frame 100 .*1 of 3 picks",
        ),
        (
            outputs([0, 51, 100], [0, 50, 100], False),
            "pick 1 is frame 51, but frame 50 was requested",
        ),
        (outputs([0, 40], requested=[0, 40, 99]), "2 frames were returned, but 3 were requested"),
        (outputs([0, 41, 99]), "the pixels first differ at pick 1, frame 41"),
        (outputs([0, 40]), "2 frames, but 3 in the baseline"),
    ],
)
def test_a_wrong_frame_is_named(mine, message):
    import re

    assert re.match(message, output_difference(GOOD, mine))


NOTED = {
    "frames": 101,
    "seconds": 4.0,
    "keyframes": 3,
    "keyframe_places": [[0, 50, 3]],
    "packets_read": 101,
    "packets_decoded": 101,
    "frames_decoded": 101,
    "delta_frames": 98,
    "seeks": 0,
    "repeated": 0,
    "distance_frames": 3.5,
    "most_frames": 10,
    "distance_ms": 140.0,
    "most_ms": 400.0,
}
SEEN = {"colour change": {"visible": 1, "planted": 2}}


def as_videos(change=None, fails=None):
    """Return a change that makes a record that of two clips and a job; clip one may fail."""

    def apply(record):
        seek = record.arm == "seq_map"
        (ms, *_), *_ = (case.metrics for case in record.cases)
        picked = KEYFRAMES if seek else GOOD
        if change is not None and record.arm == change[0]:
            picked = change[1]
        notes = {"video": NOTED, "evidence": SEEN}
        metric = replace(ms, name="decode_ms", unit="ms")
        job = CaseRecord("all", metrics=(Metric("request_s", "req/s", "higher", False, (3.0,)),))
        cases = [
            CaseRecord("one", metrics=(metric,), outputs=picked, notes=notes),
            CaseRecord("two", metrics=(metric,), outputs=GOOD, notes=notes),
            job,
        ]
        if record.arm == fails:
            cases[0] = CaseRecord("one", skipped="one: broken")
        return replace(record, cases=tuple(cases))

    return apply


def gate(path):
    return analyse_cell(path)["gates"]["identical"]


def test_the_gate_passes_and_fails_for_one_moved_pick(make_cell):
    options = {"identity": "frames", "control": True}
    assert gate(make_cell("a/x", change=as_videos(), **options))["status"] == "pass"
    moved = outputs([0, 51, 100], [0, 50, 100], False)
    result = gate(make_cell("a/y", change=as_videos(("seq_map", moved)), **options))
    assert result["status"] == "fail"
    assert "case 'one', pick 1 is frame 51, but frame 50 was requested" in result["reasons"][0]
    swapped = outputs([0, 50, 100], None, False, wrong=[1])
    path = make_cell("a/z", change=as_videos(("seq_map", swapped)), **options)
    assert "not those that the decoder returns" in gate(path)["reasons"][0]
    (row, *_) = analyse_cell(path)["rows"]
    words = {c["arm"]: c["verdict"] for c in row["comparisons"]}
    assert words["seq_map"] == "invalid" != words["control"]
    path = make_cell("a/w", change=as_videos(("control", outputs([0, 41, 99]))), **options)
    assert "control does not reproduce its own outputs" in gate(path)["reasons"][0]


def test_a_request_that_failed_has_no_frames_and_is_no_difference(make_cell):
    options = {"identity": "frames"}
    for number, fails in enumerate(("seq_map", "binary_search", "control")):
        path = make_cell(f"a/{number}", change=as_videos(fails=fails), **options)
        assert gate(path)["status"] == "pass", fails
    moved = ("seq_map", outputs([0, 51, 100], [0, 50, 100], False))
    path = make_cell("a/b", change=as_videos(moved, fails="binary_search"), **options)
    assert gate(path)["status"] == "fail"  # though there is nothing to compare with


def test_the_report_of_a_video_study_has_clips_and_published_tables(make_cell, tmp_path):
    published = {
        "source": "a post",
        "machine": "their machine",
        "metric": "decode_ms",
        "unit": "ms",
        "rows": [{"case": "one", "arms": {"binary_search": 193}}],
        "tables": [
            {"title": "Theirs", "columns": ["what", "so much"], "rows": [["x", "43 to 77"]]}
        ],
    }
    path = make_cell("study/cell", change=as_videos(), identity="frames", published=published)
    write_study(path.parent)
    text = (path.parent / "report.md").read_text()
    page = (path.parent / "report.html").read_text()
    for expected in (
        "| one | 101 | 3 |",
        "published: binary_search (ms)",
        "| x | 43 to 77 |",
        "2 of 4 (50%)",
        "evidence in the frames, not accuracy",
        "set workload.questions",
        "their machine; a post. These numbers are never mixed with ours.",
        "picks that agree in every run",
        "--picks.png",
    ):
        assert expected in text, expected
    assert page.count('aria-label="frames picked of one"') == 1 and "frame 50" in page
    pictures = sorted(p.name for p in (path.parent / "plots").glob("*picks*"))
    assert [p.rpartition(".")[2] for p in pictures] == ["png", "svg"]
    assert len(load(path.parent))
