"""The committed notebook is what its code prints now."""

import json
from pathlib import Path

from docs.generators import study_frames

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "study_frames.ipynb"


def test_the_notebook_prints_what_it_shows(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    again = study_frames.notebook()
    command = "python -m docs.generators.study_frames > docs/study_frames.ipynb"
    assert again == PAGE.read_text("utf-8"), command


def test_the_notebook_has_the_keys_of_its_format():
    page = json.loads(PAGE.read_text("utf-8"))
    assert (page["nbformat"], page["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in page["cells"]}) == len(page["cells"])
    code = [cell for cell in page["cells"] if cell["cell_type"] == "code"]
    assert code and all({"outputs", "execution_count", "source"} <= set(cell) for cell in code)
