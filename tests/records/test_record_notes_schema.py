"""The declared notes: every key that the analysis reads is one of them."""

import re
from pathlib import Path

from labkit.records.record_notes_schema import CaseNotes, RunNotes

READ = re.compile(r"known_notes(?:\.get\(|\[)\"(\w+)\"|\"(\w+)\" in \w+\.known_notes\b(?!\.get)")


def test_the_analysis_reads_only_declared_notes():
    """A key that a ``TypedDict`` lacks fails in mypy; this test needs no mypy."""
    declared = {*CaseNotes.__annotations__, *RunNotes.__annotations__}
    folder = Path(__file__).parents[2] / "labkit" / "analysis"
    texts = [path.read_text("utf-8") for path in folder.rglob("*.py")]
    read = {key for text in texts for pair in READ.findall(text) for key in pair if key}
    assert len(read) > 20 and read <= declared
