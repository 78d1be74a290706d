"""Published numbers stand under the arm, metric and condition of the articles' tables."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from labkit.analysis.studies.study_discovery import cell_dirs
from labkit.cli import hydra_arguments, multirun_composition
from labkit.experiment.compose import published_rows
from labkit.experiment.compose.cell_composer import with_scale_overrides
from labkit.records import open_study, read_json

TABLES = yaml.safe_load(Path(__file__).with_name("published_tables.yaml").read_text("utf-8"))
STUDIES = sorted(
    f"{group}={path.stem}"
    for group in ("ablation", "experiment")
    for path in (hydra_arguments.CONF / group).glob("*.yaml")
)
OPERATIONS = {
    "per": lambda row, spec: round(spec["per"] / number(row, spec["of"]), 1),
    "sum": lambda row, spec: sum(number(row, part) for part in spec["sum"]),
    "minus": lambda row, spec: -number(row, spec["minus"]),
    "change": lambda row, spec: round(
        100 * (number(row, spec["change"][1]) / number(row, spec["change"][0]) - 1), 1
    ),
}


def number(row, spec):
    """Return the number that a place's specification gives for a transcribed row."""
    if isinstance(spec, dict):
        return next(apply(row, spec) for name, apply in OPERATIONS.items() if name in spec)
    return row[spec]


def value(row, text):
    """Return a row's own value for "=column", else the text itself."""
    return row[text[1:]] if isinstance(text, str) and text.startswith("=") else text


def key(when, case, metric, kind, arm, figure):
    condition = tuple(sorted((option, str(choice)) for option, choice in when.items()))
    return condition, case, metric, kind, arm, figure


def rows_of(table):
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def selects(place, row):
    only, omitted = place.get("only", {}).items(), place.get("except", {}).items()
    return all(row[c] == v for c, v in only) and not any(row[c] == v for c, v in omitted)


def transcribed(study):
    """Return the numbers that a study must publish, with condition, case, metric and arm."""
    found = Counter()
    for table in TABLES:
        for place in table.get("places", ()):
            for row in rows_of(table):
                if study not in place["studies"] or not selects(place, row):
                    continue
                when = {option: value(row, v) for option, v in place.get("when", {}).items()}
                case = value(row, place.get("case", "all"))
                for kind in published_rows.NUMBER_KEYS:
                    for arm, spec in place.get(kind, {}).items():
                        if isinstance(spec, dict) or row[spec] is not None:
                            figure = number(row, spec)
                            metric = place["metric"]
                            found[key(when, case, metric, kind, value(row, arm), figure)] += 1
    return found


def published(whole):
    data, found = whole.ablation.published or {}, Counter()
    for row in data.get("rows") or ():
        metric = row.get("metric", data.get("metric"))
        case = row.get("case", data.get("case"))
        for kind in published_rows.NUMBER_KEYS:
            for arm, figure in row.get(kind, {}).items():
                found[key(row.get("when", {}), case, metric, kind, arm, figure)] += 1
    return found


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_publishes_each_number_of_the_tables_in_its_place(study, composer):
    with multirun_composition.initialized():
        whole = composer.compose(with_scale_overrides([study], composer))
    ours, articles = published(whole), transcribed(study)
    assert not (ours - articles), "published, but not so in the articles' tables"
    assert not (articles - ours), "in the articles' tables, but not published"
    shown = {table["title"]: table for table in (whole.ablation.published or {}).get("tables", ())}
    verbatim = {table["title"]: table for table in TABLES if study in table.get("verbatim", ())}
    assert list(shown) == list(verbatim)
    for title, table in verbatim.items():
        assert (shown[title]["columns"], shown[title]["rows"]) == (table["columns"], table["rows"])


def columns_in(spec):
    if isinstance(spec, dict):
        return {name for part in spec.values() for name in columns_in(part)}
    if isinstance(spec, list):
        return {name for part in spec for name in columns_in(part)}
    return {str(spec).removeprefix("=")}


@pytest.mark.parametrize("table", TABLES, ids=[table["title"] for table in TABLES])
def test_every_column_of_numbers_is_published_or_explained(table):
    numeric = {
        name
        for row in rows_of(table)
        for name, cell in row.items()
        if isinstance(cell, int | float) and "places" in table
    }
    used = {name for place in table.get("places", ()) for name in columns_in(place)}
    used |= {
        arm.removeprefix("=")
        for place in table.get("places", ())
        for kind in published_rows.NUMBER_KEYS
        for arm in place.get(kind, {})
    }
    assert numeric - used == set(table.get("unpublished", {})) & numeric
    for study in (s for place in table.get("places", ()) for s in place["studies"]):
        assert study in STUDIES


STUDY_OF = {study.partition("=")[2]: study for study in STUDIES}  # an experiment before an ablation
REFERENCE = hydra_arguments.CONF.parent / "outputs" / "reference"
ARCHIVES = sorted(path for path in REFERENCE.glob("*.zip") if path.stem in STUDY_OF)


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.stem)
def test_a_committed_record_publishes_what_its_study_publishes(archive):
    """keyframes.zip had the article's times with OpenCV under another arm."""
    study = STUDY_OF[archive.stem]
    known = {figure[1:] for figure in transcribed(study)}
    titles = {table["title"] for table in TABLES if study in table.get("verbatim", ())}
    for cell in cell_dirs(open_study(archive)):
        data = read_json(cell / "cell.json").get("published") or {}
        assert {table["title"] for table in data.get("tables", ())} <= titles
        for row in data.get("rows") or ():
            metric = row.get("metric", data.get("metric"))
            for kind in published_rows.NUMBER_KEYS:
                for arm, figure in (row.get(kind) or {}).items():
                    assert (row["case"], metric, kind, arm, figure) in known
