"""The answer to a question about video loaders has both halves: the time and the frames."""

from types import SimpleNamespace

import pytest

from labkit.analysis.findings.cell_findings import Findings
from labkit.analysis.findings.output_quality_sentences import (
    frames_sentences,
    picked_frames,
    worth_clauses,
)


def found(**arms):
    """Return findings; ``arms``: visible, planted, right, asked and distance of each."""
    records = []
    for arm, (visible, planted, right, asked, distance_ms) in arms.items():
        notes = {"video": {"distance_ms": distance_ms}}
        if planted:
            notes["evidence"] = {"collision": {"visible": visible, "planted": planted}}
        case = SimpleNamespace(notes=notes)
        answers = {"answers": {"right": right, "asked": asked}} if asked else {}
        records.append(SimpleNamespace(arm=arm, ok=True, cases=(case, case), notes=answers))
    first, *others = arms
    cell = SimpleNamespace(records=records, baseline=first, treatment_arms=others)
    return Findings(tuple(others), first, frames=picked_frames(cell))


@pytest.mark.parametrize(
    ("arms", "sentences", "clause"),
    [
        (
            {"stream": (6, 9, 0, 0, 0), "seek": (6, 9, 0, 0, 0), "keyframes": (2, 9, 0, 0, 980.0)},
            ["Of 18 planted events the frames show: stream and seek 12; keyframes 4."],
            "it shows 4 of 18 planted events, stream 12",
        ),
        (
            {"stream": (6, 9, 70, 90, 0), "keyframes": (2, 9, 50, 90, 980.0)},
            [
                "Of 90 questions a model answers correctly: stream 70; keyframes 50.",
                "Of 18 planted events the frames show: stream 12; keyframes 4.",
            ],
            "50 of 90 answers are correct, stream 70",
        ),
        (
            {"stream": (0, 0, 0, 0, 0), "keyframes": (0, 0, 0, 0, 980.0)},
            [
                "Mean distance of the frames from the requested ones, in ms: stream 0.0; "
                "keyframes 980.0."
            ],
            "its frames are 980.0 ms off on average",
        ),
    ],
)
def test_the_frames_are_described(arms, sentences, clause):
    assert list(frames_sentences(found(**arms))) == sentences
    assert list(worth_clauses(found(**arms), "keyframes")) == [clause]


def test_cells_without_video_say_nothing():
    record = SimpleNamespace(arm="a", ok=True, cases=(SimpleNamespace(notes={}),), notes={})
    other = SimpleNamespace(records=[record], baseline="a", treatment_arms=["b"])
    assert picked_frames(other) == {}
    assert not list(frames_sentences(Findings(("b",), "a"))) + list(
        worth_clauses(Findings(("b",), "a"), "b")
    )
