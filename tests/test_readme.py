"""Committed reports are derived from committed records; links of the README lead to files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REFERENCES = ROOT / "outputs" / "reference"
ARCHIVES = sorted(REFERENCES.glob("*.zip"))
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|tmp|root|Users|work|build)/")
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["gqa_sharing", "seq_map"])
def test_the_committed_report_is_that_of_the_committed_records(name, tmp_path):
    import shutil

    from labkit import analysis
    from labkit.records import unpack_archive

    committed, study = tmp_path / "committed", tmp_path / name
    unpack_archive(REFERENCES / f"{name}.zip", committed)
    pages = shutil.copytree(REFERENCES / f"{name}.report", tmp_path / "pages")
    shutil.copytree(committed, study)
    for path in (*study.glob("tables/*"), study / "report.md", study / "study.json"):
        path.unlink()
    analysis.write_study(study, plots=False)
    derived = ("report.md", "study.json", "tables/*", "*/cell.json")
    files = [p.relative_to(committed) for one in derived for p in committed.glob(one)]
    assert len(files) == 6
    for path in files:
        assert (study / path).read_bytes() == (committed / path).read_bytes(), path
    for page in ("report.md", "report.html"):
        assert (study / page).read_bytes() == (pages / page).read_bytes(), page


def test_every_experiment_has_committed_records_and_its_page_shows_them():
    page = (ROOT / "docs" / "experiments.md").read_text("utf-8")
    for path in (ROOT / "conf" / "experiment").glob("*.yaml"):
        assert (REFERENCES / f"{path.stem}.zip").exists(), path.stem
        (line,) = [line for line in page.splitlines() if f"| `{path.stem}` |" in line]
        assert f"{path.stem}.zip" in line


# Gates of committed studies that fail, as a finding.
FAILED_GATES = {"precision": ["identical"]}  # int4 keys and values exceed the limits of quality


@pytest.mark.slow
@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.stem)
def test_gates_of_committed_archives_hold(path):
    from labkit.analysis.studies.study_analysis import AnalysisCache
    from labkit.records import open_study

    for cell in AnalysisCache().study(open_study(path)):
        failed = [name for name, gate in cell.cell.gates.items() if gate.status == "fail"]
        assert failed == FAILED_GATES.get(path.stem, []), cell.cell.cell


def test_all_committed_records_are_at_most_20_mb():
    """Issue 60: a clone stays small."""
    size = sum(path.stat().st_size for path in REFERENCES.rglob("*") if path.is_file())
    assert size <= 20e6


def test_the_readme_names_every_ablation():
    names = [path.stem for path in (ROOT / "conf" / "ablation").glob("*.yaml")]
    assert [name for name in names if f"`{name}`" not in README] == []


def test_every_link_of_the_readme_leads_to_a_file():
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_nothing_recorded_names_a_machine_path():
    texts = [p for p in REFERENCES.rglob("*") if p.suffix in (".json", ".md", ".html", ".csv")]
    assert texts
    assert [p.name for p in texts if MACHINE_PATH.search(p.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "path", [path for path in ARCHIVES if path.stem != "sensitivity"], ids=lambda path: path.stem
)
def test_no_committed_archive_names_a_machine_path(path, tmp_path):
    """Except in sensitivity.zip, whose 89 studies would take 5 seconds."""
    from labkit.records import unpack_archive

    unpack_archive(path, tmp_path / "study")
    files = [p for p in (tmp_path / "study").rglob("*") if p.is_file()]
    assert files
    assert [p.name for p in files if MACHINE_PATH.search(p.read_bytes().decode("latin-1"))] == []
