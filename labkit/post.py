"""``python -m labkit.post ARTICLE.md ...``: fill the placeholders of articles from records.

Exit codes: 0 on success; 1 with ``--check`` if an article no longer agrees with its records; 2,
with a one-line message, if a record is missing, a name is unknown or a gate failed. Nothing is
written in that case.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from labkit.cli.program_base import Program, print_notes
from labkit.records import RecordError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from labkit.analysis.pages.article_placeholders import ArticleError

    parser = Program(
        prog="python -m labkit.post",
        description="Fill the placeholders of Markdown articles from records, in place.",
    )
    parser.add_argument(
        "articles", type=Path, nargs="+", metavar="ARTICLE.md", help="an article to render"
    )
    parser.add_argument("--html", action="store_true", help="also write ARTICLE.html beside it")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if an article is out of date"
    )

    def body(options: argparse.Namespace) -> int:
        return post(options.articles, html=options.html, check=options.check)

    return parser.run(argv, body, refused=(ArticleError, RecordError))


def post(paths: Sequence[Path], *, html: bool = False, check: bool = False) -> int:
    """Render articles, and the HTML page of each if ``html``; return the exit code."""
    from labkit.analysis.pages import article_from_records
    from labkit.analysis.pages.article_placeholders import ArticleError
    from labkit.analysis.studies.study_analysis import AnalysisCache

    pages: dict[Path, Path] = {}
    for path in paths if html else ():
        if path.suffix.lower() == ".html":  # some disks do not tell letters' cases apart
            raise ArticleError(
                f"{path}: --html would overwrite it; name the article {path.stem}.md"
            )
        other = pages.setdefault(path.with_suffix(".html"), path)
        if other != path:
            raise ArticleError(f"{path}: --html would overwrite the page of {other}; rename one")
    analysis_cache = AnalysisCache()
    texts = {path: article_from_records.render(path, analysis_cache) for path in paths}
    print_notes("labkit.post", analysis_cache.notes())
    stale = False
    for article, text in texts.items():
        files = {article: text}
        if html:
            files[article.with_suffix(".html")] = article_from_records.html(text)
        for file, content in files.items():
            stale |= _update(file, content, article, check)
    return int(check and stale)


def _update(file: Path, content: str, article: Path, check: bool) -> bool:
    """Write a file whose content differs, or say so if ``check``; return whether it differs."""
    from labkit.analysis.pages.article_from_records import read_text
    from labkit.analysis.pages.report_files import write_text

    if file.is_file() and read_text(file) == content:
        return False
    if check:
        page = " --html" if file != article else ""
        print(
            f"{file}: no longer agrees with its records; run: python -m labkit.post {article}{page}"
        )
    else:
        write_text(file, content)
        print(f"{file}: written")
    return True


if __name__ == "__main__":
    sys.exit(main())
