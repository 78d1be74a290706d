"""Every module that a page or a picture names exists, and the pictures are the generator's."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from docs.generators import article_pictures, fragmentation, run_diagrams
from labkit.experiment.worker import turn_protocol

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = re.compile(r"(?<![\w./-])(?:labkit|conf|tests|benchmarks)/[\w./~-]*\w")
DOTTED = re.compile(r"(?<![\w./-])labkit(?:\.[A-Za-z_]\w*)+")


def missing_names(text):
    """Return the paths and dotted names in a text that lead nowhere.

    A part in capitals stands for a name of the reader's: only the folder above it must exist.
    """
    for path in PATH.findall(text):
        if not (ROOT / re.sub(r"/?[^/]*\b[A-Z]{2}.*", "", path)).exists():
            yield path
    for name in DOTTED.findall(text):
        if not exists(name):
            yield name


def exists(name):
    """Return whether a dotted name is a module, or a public name of one."""
    *parents, last = name.split(".")
    path = ROOT.joinpath(*parents, last)
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    return exists(".".join(parents)) and hasattr(import_module(".".join(parents)), last)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_a_page_names_exists(page):
    assert list(missing_names(page.read_text("utf-8"))) == []


@pytest.mark.parametrize("name", run_diagrams.PICTURES)
def test_a_picture_is_the_generator_s_and_its_modules_exist(name):
    committed = (run_diagrams.FOLDER / name).read_text("utf-8")
    assert committed == run_diagrams.PICTURES[name](), "python -m docs.generators.run_diagrams"
    assert "labkit/experiment" in committed and list(missing_names(committed)) == []


@pytest.mark.parametrize("name", article_pictures.PICTURES)
def test_a_picture_of_an_article_is_the_generator_s(name):
    committed = (article_pictures.FOLDER / name).read_text("utf-8")
    assert committed == article_pictures.PICTURES[name](), (
        "python -m docs.generators.article_pictures"
    )


def test_the_picture_of_fragmentation_shows_a_refusal_beside_enough_free_rows():
    committed = (article_pictures.FOLDER / "fragmentation.svg").read_text("utf-8")
    assert committed == fragmentation.picture(), "python -m docs.generators.fragmentation"
    moment = fragmentation.refused()
    assert moment.free >= moment.needed > moment.largest
    rows = sum(cache.rows for cache in moment.caches)
    assert rows + moment.free == fragmentation.CAPACITY and moment.blocks * 16 < rows + 64
    for before in fragmentation.moments():
        if not before.fits:
            break
        assert before.largest >= before.needed


@pytest.mark.parametrize(
    ("pick", "frames"), [(0, [0]), (3, [0, 3]), (5, [0, 3, 5, 6]), (15, [10, 13, 15, 16])]
)
def test_a_frame_is_decoded_from_its_references(pick, frames):
    assert article_pictures.needed(2 * article_pictures.GOP, pick) == frames


def test_the_picture_of_turns_has_the_messages_of_the_protocol():
    documented = set(re.findall(r'^ {4,}(?: {28})?\["(\w+)"', turn_protocol.__doc__, re.M))
    shown = {text.split('"')[1] for _, _, text in run_diagrams.messages() if text.startswith("[")}
    assert documented - shown == {"parts", "end"}  # of workloads with rounds
    assert shown < documented
