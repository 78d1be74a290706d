"""Hook of MkDocs: gathers the pages of the site, and generates those of the API reference.

The site has the README as the front page, ``docs``, the reports of the committed studies, and each
file that a page links to. Every page keeps its path in the repository, so that links between pages
work. An article is in the site as Markdown only, and a report as HTML only, because MkDocs would
write both forms to the same file. ``make docs`` builds the site, and fails if a link is broken.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]
STUDIES = "outputs/reference"
FRONT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
PAGE_SUFFIXES = (".md", ".html", ".png", ".svg", ".ipynb", ".css")
REPORT_LINK = re.compile(r"(\]\([^)\s]*/report)\.md")
LINK = re.compile(r"\]\(<?([^)\s>]+)")
PLACEHOLDER = re.compile(r" '\{\{.*?\}\}'")  # title of a link in an article (labkit.post)
# Tabs of the site, and their pages below docs.
TABS = {
    "Use": (
        "workloads.md", "sweeps.md", "studies.md", "steps.md", "why.md", "regression.md",
        "judge.md", "replication.md", "python.md", "extending.md", "server.md", "opponents.md",
        "parallel.md", "video.md", "scale.md", "quantised.md", "gguf.md", "architectures.md",
        "hybrid-models.md",
    ),
    "Experiments": ("experiments.md", "levers.md", "sensitivity.md"),
    "Articles": (
        "articles/index.md", "articles/one-launch.md", "articles/kv-caches.md",
        "articles/memory-budget.md", "articles/batching-and-paging.md",
        "articles/decode-serving.md", "articles/mini-engine.md", "articles/video.md",
        "articles/servers.md",
        "articles.md",
    ),
    "Figures": ("widgets.md", "binary-search.md", "structures.md"),
    "Statistics": ("statistics.md", "statistical-methods.md"),
    "Inside": ("inside.md",),
    "Lists": ("options.md", "metrics.md", "counters.md"),
}  # fmt: skip


def on_config(config: Any) -> Any:
    """Gather the pages into ``build/docs``, from which MkDocs builds the site."""
    target = ROOT / "build" / "docs"
    shutil.rmtree(target, ignore_errors=True)
    gather(target)
    config["docs_dir"] = str(target)
    config["nav"] = navigation(target)
    return config


def gather(target: Path) -> None:
    """Copy the pages and what they link to, and write the pages of the API reference."""
    studies = [path for path in (ROOT / STUDIES).rglob("*") if path.suffix not in (".md", ".zip")]
    docs = [path for path in (ROOT / "docs").rglob("*") if path.suffix in PAGE_SUFFIXES]
    unwanted = {ROOT / "docs" / "generators", ROOT / "docs" / "articles"}
    docs = [path for path in docs if path.suffix == ".md" or not unwanted & set(path.parents)]
    for path in (*(ROOT / name for name in FRONT), *docs, *studies):
        _copy(path, target)
    for page in list(target.rglob("*.md")):
        text = REPORT_LINK.sub(r"\1.html", PLACEHOLDER.sub("", page.read_text("utf-8")))
        page.write_text(text, encoding="utf-8")
        for path in linked_files(text, ROOT / page.relative_to(target)):
            _copy(path, target)
    for name, text in reference_pages().items():
        page = target / "reference" / name
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf-8")


def _copy(path: Path, target: Path) -> None:
    copy = target / path.relative_to(ROOT)
    if path.is_file() and not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def linked_files(text: str, page: Path) -> Iterator[Path]:
    """Yield the files of the repository to which a page links."""
    for link in LINK.findall(text):
        path = (page.parent / unquote(link.partition("#")[0])).resolve()
        if "://" not in link and path.is_file() and ROOT in path.parents:
            yield path


def packages() -> dict[str, list[str]]:
    """Return the modules of each package of labkit, by the package's dotted name."""
    modules: dict[str, list[str]] = {}
    for path in sorted((ROOT / "labkit").rglob("*.py")):
        *package, name = path.relative_to(ROOT).with_suffix("").parts
        if name not in ("__init__", "__main__") and "__pycache__" not in package:
            modules.setdefault(".".join(package), []).append(name)
    return modules


def reference_pages() -> dict[str, str]:
    """Return the pages of the API reference by file name."""
    pages = {
        f"{package}.md": "\n".join(
            [f"# {package}", "", *(f"::: {package}.{module}\n" for module in modules)]
        )
        for package, modules in packages().items()
    }
    lines = [f"- [`{package}`]({package}.md)" for package in packages()]
    title = "# API reference\n\nEvery public name, from its docstring. Where to begin:\n\n"
    starts = (
        "- [`labkit.engine`](labkit.engine.md): `LLM`, `SamplingParams`, the engine's parts\n"
        "- [`labkit.analysis`](labkit.analysis.md): `load`, verdicts and their statistics\n"
        "- [Classes of your own](../docs/extending.md)\n\n## Packages\n\n"
    )
    return {"index.md": title + starts + "\n".join(lines) + "\n", **pages}


def navigation(target: Path) -> list[Any]:
    """Return the navigation: a tab for each of ``TABS``, the studies and the API reference."""
    tabs: list[Any] = [{"labkit": ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]}]
    for title, pages in TABS.items():
        entries: list[Any] = [f"docs/{page}" for page in pages]
        if title == "Experiments":
            reports = sorted((target / STUDIES).glob("*/report.html"))
            entries += [{page.parent.stem: str(page.relative_to(target))} for page in reports]
        tabs.append({title: entries})
    reference = [{package: f"reference/{package}.md"} for package in packages()]
    return [*tabs, {"API": ["reference/index.md", *reference]}]
