"""``python -m labkit.post ARTICLE.md``: fill an article's placeholders from records.

Exit codes: 0 on success; 1 with ``--check`` if the article no longer agrees with its records; 2,
with a one-line message, if a record is missing, a name is unknown or a gate failed. Nothing is
written in that case.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from labkit.cli_errors import OneLineParser, print_error, print_notes
from labkit.records import RecordError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from labkit.analysis.article_placeholders import ArticleError

    parser = OneLineParser(
        prog="python -m labkit.post",
        description="Fill the placeholders of a Markdown article from records, in place.",
    )
    parser.add_argument("article", type=Path, metavar="ARTICLE.md", help="the article to render")
    parser.add_argument("--html", action="store_true", help="also write ARTICLE.html beside it")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the article is out of date"
    )
    options = parser.parse_args(argv)
    try:
        return post(options.article, html=options.html, check=options.check)
    except (ArticleError, RecordError, UnicodeDecodeError) as error:
        return print_error(parser.prog, error)
    except OSError as error:
        return print_error(parser.prog, f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        return 130


def post(article: Path, *, html: bool = False, check: bool = False) -> int:
    """Render an article, and its HTML page if ``html``; return the exit code."""
    from labkit.analysis import article as articles
    from labkit.analysis.rendering.report_files import write_text
    from labkit.analysis.study_analysis import AnalysisCache

    analysis_cache = AnalysisCache()
    text = articles.render(article, analysis_cache)
    print_notes("labkit.post", analysis_cache.notes())
    files = {article: text, **({article.with_suffix(".html"): articles.html(text)} if html else {})}
    stale = [
        path
        for path, content in files.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != content
    ]
    for path in stale:
        if check:
            print(
                f"{path}: no longer agrees with its records; run: python -m labkit.post {article}"
            )
        else:
            write_text(path, files[path])
            print(f"{path}: written")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
