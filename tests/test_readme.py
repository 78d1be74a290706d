"""The committed records derive what is committed beside them, and README's files exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "outputs" / "reference" / "seq_map"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_committed_report_is_that_of_the_committed_records(tmp_path):
    import shutil

    from labkit import analysis

    study = shutil.copytree(REFERENCE, tmp_path / "seq_map")
    for table in (study / "tables").iterdir():
        table.unlink()
    for name in ("report.md", "report.html", "study.json"):
        (study / name).unlink()
    analysis.write_study(study, plots=False)
    derived = [p for p in REFERENCE.glob("*") if p.is_file()]
    derived += [*REFERENCE.glob("tables/*"), *REFERENCE.glob("*/cell.json")]
    assert len(derived) == 7
    for path in derived:
        assert (study / path.relative_to(REFERENCE)).read_bytes() == path.read_bytes(), path


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_nothing_recorded_names_a_machine_path():
    texts = [p for p in REFERENCE.rglob("*") if p.suffix in (".json", ".md", ".html", ".csv")]
    assert texts
    paths = re.compile(r"(?<![\w.])/(home|tmp|root|Users)/")
    assert [p.name for p in texts if paths.search(p.read_text(encoding="utf-8"))] == []
