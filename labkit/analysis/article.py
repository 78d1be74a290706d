"""Articles: Markdown whose tables, numbers and figures are rendered from records.

A placeholder is a call in double braces (:mod:`labkit.analysis.article_placeholders`). Rendering
keeps it beside its result, so an article is its own source and can be rendered again: a number
becomes a link to its records with the placeholder as the link's title, and a table is put between
two comments.
"""

from __future__ import annotations

import re
from pathlib import Path

from labkit.analysis.article_placeholders import (
    ArticleBlock,
    ArticleError,
    ArticleLink,
    PlaceholderFunctions,
    require,
)
from labkit.analysis.rendering.html_report import TEMPLATES
from labkit.analysis.study_analysis import AnalysisCache
from labkit.records import RecordError

CODE = r"(?P<code>^```.*?^```\s*?$|`[^`\n]+`)"
PLACES = re.compile(
    rf"{CODE}"
    r"|^<!-- \{\{(?P<block>[^\n]*?)\}\} -->\n.*?^<!-- end -->$"
    r"|!?\[[^\]\n]*\]\([^)'\n]*'\{\{(?P<inline>[^\n]*?)\}\}'\)"
    r"|\{\{(?P<bare>[^\n]*?)\}\}",
    re.M | re.S,
)
COMMENT = re.compile(rf"{CODE}|<!--.*?-->\n*", re.M | re.S)


def render(article: Path, analysis_cache: AnalysisCache) -> str:
    """Return an article with every placeholder filled from the records as they are now.

    Raises
    ------
    ArticleError
        The file and line of the first placeholder that cannot be filled, and why.
    """
    text = article.read_text(encoding="utf-8")
    records = PlaceholderFunctions(article.resolve().parent, analysis_cache)

    def fill(place: re.Match[str]) -> str:
        if place["code"] is not None:
            return place[0]
        asked = next(filter(None, (place["block"], place["inline"], place["bare"])), "").strip()
        try:
            return _written(asked, records.fill(asked), _alone(place))
        except (ArticleError, RecordError, OSError) as error:
            line = text.count("\n", 0, place.start()) + 1
            raise ArticleError(f"{article}:{line}: {error}") from None

    return PLACES.sub(fill, text)


def _alone(place: re.Match[str]) -> bool:
    before, after = place.string[: place.start()], place.string[place.end() :]
    return (not before or before.endswith("\n")) and (not after or after.startswith("\n"))


def _written(asked: str, found: ArticleBlock | ArticleLink, alone: bool) -> str:
    if isinstance(found, ArticleBlock):
        require(alone, f"{asked}: it needs a line of its own")
        return f"<!-- {{{{ {asked} }}}} -->\n\n{found.text}\n\n<!-- end -->"
    require("'" not in asked, f"{asked}: write strings in double quotes")
    require(not {"[", "]"} & {*found.text}, f"{asked}: no brackets in a caption")
    picture = "!" if found.picture else ""
    return f"{picture}[{found.text}]({found.target} '{{{{ {asked} }}}}')"


def html(text: str) -> str:
    """Return a rendered article as a page that fetches nothing but its own pictures."""
    from jinja2 import Environment, FileSystemLoader
    from markdown_it import MarkdownIt

    plain = COMMENT.sub(lambda found: found["code"] or "", text)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(plain)
    title = next((line[2:] for line in plain.splitlines() if line.startswith("# ")), "labkit")
    pages = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    return pages.get_template("article.html.j2").render(title=title, body=body) + "\n"
