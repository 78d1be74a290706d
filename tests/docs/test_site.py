"""The site of the documentation has every page, and fetches nothing from elsewhere."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from headless_browser import CHROMIUM, DESKTOP, PHONE, HeadlessBrowser

from docs.generators import site

ROOT = Path(__file__).parents[2]
WITHOUT_MKDOCS = "mkdocs is not installed (pip install 'mlx-labkit[docs]')"


def entries(nav):
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from entries(value) if isinstance(value, list) else [value]


def test_the_navigation_has_every_page_and_every_page_exists(tmp_path):
    site.gather(tmp_path)
    listed = list(entries(site.navigation(tmp_path)))
    assert len(listed) == len(set(listed))
    assert all((tmp_path / page).is_file() for page in listed)
    pages = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.md")}
    assert pages == {page for page in listed if page.endswith(".md")}
    reports = sorted((ROOT / "outputs" / "reference").glob("*/report.html"))
    assert [f"outputs/reference/{p.parent.name}/report.html" for p in reports] == [
        page for page in listed if page.endswith(".html")
    ]
    widgets = {p.name for p in (ROOT / "docs" / "widgets").glob("*.html")}
    assert widgets == {p.name for p in (tmp_path / "docs" / "widgets").iterdir()}


def test_what_pages_link_to_is_gathered(tmp_path):
    site.gather(tmp_path)
    for path in ("labkit/metal/kernels/resolve.metal", "docs/recompute_statistics.py"):
        assert (tmp_path / path).read_bytes() == (ROOT / path).read_bytes()
    page = (tmp_path / "docs" / "articles" / "one-launch.md").read_text("utf-8")
    assert "{{ value(" not in page and "](../../outputs/reference/seq_map.report/" in page
    readme = (tmp_path / "README.md").read_text("utf-8")
    assert "](outputs/reference/seq_map.report/report.html)" in readme
    assert not list((tmp_path / "docs").rglob("generators"))


def test_every_module_has_a_place_in_the_reference():
    named = re.findall(r"^::: (\S+)$", "\n".join(site.reference_pages().values()), re.M)
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "labkit").rglob("*.py")
        if not path.stem.startswith("__")
    }
    assert len(named) == len(set(named)) and set(named) == modules


def test_no_shape_in_a_docstring_is_read_as_a_link():
    # Markdown takes [lines][columns] for a link to "columns", and the site is not built.
    shape, code = re.compile(r"\][\[(]"), re.compile(r"``.*?``|`[^`]*`", re.S)
    modules = sorted((ROOT / "labkit").rglob("*.py"))
    assert len(modules) > 300
    assert [
        (path.name, text)
        for path in modules
        for text in re.findall(r'^ *"""(.*?)"""', path.read_text("utf-8"), re.S | re.M)
        if shape.search(code.sub("", text))
    ] == []


@pytest.mark.skipif(importlib.util.find_spec("griffe") is None, reason=WITHOUT_MKDOCS)
def test_roles_become_code():
    from docs.generators.docstring_roles import ROLE, _code

    text = "Return :class:`Record`, see :mod:`~labkit.records.study_archive` or :func:`.load`."
    assert ROLE.sub(_code, text) == "Return `Record`, see `study_archive` or `load`."


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason=WITHOUT_MKDOCS)
def test_the_site_is_built_without_a_broken_link_and_fetches_nothing(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    loads = re.compile(r"<(?:script|img|iframe)[^>]*src=\"https?:|<link[^>]*href=\"https?:")
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 60
    assert [page for page in pages if loads.search(page.read_text("utf-8"))] == []
    search = (tmp_path / "search" / "search_index.json").read_text("utf-8")
    assert "max_num_batched_tokens" in search and "labkit.engine.block_pool" in search
    if CHROMIUM:
        assert unreadable(tmp_path, ("index.html", "reference/labkit.engine.html")) == []


def unreadable(folder, names):
    """Return the texts with too little contrast, and pages that are wider than the window."""
    problems = set()
    with HeadlessBrowser(folder / "profile") as browser:
        for name in names:
            for size, scheme in ((s, c) for s in (DESKTOP, PHONE) for c in ("light", "dark")):
                browser.open(folder / name, size, scheme)
                problems |= {(name, size, scheme, text) for text in browser.problems()}
    return [one for one in sorted(problems) if one[-1].startswith(("contrast", "the page"))]
