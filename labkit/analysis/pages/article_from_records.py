"""Articles: Markdown whose tables, numbers and figures are rendered from records.

A placeholder is a call in double braces (:mod:`labkit.analysis.pages.article_placeholders`).
Rendering keeps the placeholder beside its result, so that the article can be rendered again. A
number becomes a link to its records, with the placeholder as the link's title. A table is put
between two comments; the first comment holds the placeholder.
"""

from __future__ import annotations

import re
from pathlib import Path

from labkit.analysis.document.report_parts import templates
from labkit.analysis.pages.article_placeholders import (
    ArticleBlock,
    ArticleError,
    ArticleLink,
    PlaceholderFunctions,
    repeat_line,
    require,
)
from labkit.analysis.pages.markdown_report import markdown_html
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.records import RecordError

CODE = r"(?P<code>^```.*?^```\s*?$|`[^`\n]+`)"
PLACES = re.compile(
    rf"{CODE}"
    r"|^<!-- \{\{(?P<block>[^\n]*?)\}\} -->\n.*?^<!-- end -->$"
    r"|!?\[[^\]\n]*\]\([^)'\n]*'\{\{(?P<inline>[^\n]*?)\}\}'\)"
    r"|\{\{(?P<bare>[^\n]*?)\}\}",
    re.M | re.S,
)
# A Markdown table outside of code and placeholders, and the line after it that repeats it.
TABLES = re.compile(
    rf"{CODE}|^<!-- \{{\{{[^\n]*?\}}\}} -->\n.*?^<!-- end -->$"
    r"|(?P<table>(?:^\|[^\n]*\n)+)(?:\nRepeat it: `[^`\n]*`\n)?",
    re.M | re.S,
)
ANSWERED = re.compile(r"\{\{\s*(?:answer|value)\(\s*\"([^\"\n]+\.zip)\"|`[^`\n]*`")
TABULATED = re.compile(
    r"\{\{\s*(?:table|settings)\(\s*\"([^\"\n]+)\"|labkit\.replicate ([^\s`]+\.zip)"
)
LIST_ITEM = re.compile(r" {0,3}(?:[-*+]|\d+[.)])\s")
COMMENT = re.compile(rf"{CODE}|<!--.*?-->\n*", re.M | re.S)


def read_text(file: Path) -> str:
    """Return a file's text; raise ``ArticleError``, which names it, if it is not in UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArticleError(f"{file}: {error}") from None


def render(article: Path, analysis_cache: AnalysisCache) -> str:
    """Return an article's text with every placeholder filled from the current records.

    Raises ``ArticleError`` if a placeholder cannot be filled. The message names the file, the line
    and the reason.
    """
    text = read_text(article)
    functions = PlaceholderFunctions(article.resolve().parent, analysis_cache)

    def fill(place: re.Match[str]) -> str:
        if place["code"] is not None or _is_in_indented_code(text[: place.start()]):
            return place[0]
        call = next(filter(None, (place["block"], place["inline"], place["bare"])), "").strip()
        try:
            return _filled_placeholder(call, functions.fill(call), place)
        except (ArticleError, RecordError, OSError) as error:
            line = text.count("\n", 0, place.start()) + 1
            raise ArticleError(f"{article}:{line}: {error}") from None

    def with_repeat_line(place: re.Match[str]) -> str:
        studies = studies_named(place["table"] or "")
        if not any(map(functions.compares, studies)):
            return place[0]
        whole = functions.from_root(article, studies[0])
        return f"{place['table']}\n{repeat_line(studies[0] if len(studies) == 1 else whole)}\n"

    return TABLES.sub(with_repeat_line, PLACES.sub(fill, text))


def studies_named(table: str) -> list[str]:
    """Return the archives whose answers or values a Markdown table has, each once, in order."""
    return list(dict.fromkeys(filter(None, ANSWERED.findall(table))))


def table_archives(article: Path) -> list[Path]:
    """Return the studies of an article's tables, each once.

    A study is looked up in the article's folder and in each folder above it, as placeholders are.
    The path of one that is not there does not exist.

    Raises ``RecordError`` if the article cannot be read, or has no such table.
    """
    try:
        text = article.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{article} is neither a study nor an article: {error}") from None
    names = [named or line for named, line in TABULATED.findall(text)]
    for place in TABLES.finditer(text):
        names += studies_named(place["table"] or "")
    if not names:
        raise RecordError(f"{article}: no table of it names a study's archive")
    folder = article.resolve().parent
    paths = ([f / name for f in (folder, *folder.parents)] for name in names)
    return list(dict.fromkeys(next((p for p in own if p.exists()), own[0]) for own in paths))


def _is_in_indented_code(before: str) -> bool:
    """Whether what follows is in an indented block of code, and not in an item of a list."""
    *lines, start = before.split("\n")
    if not start.startswith(("    ", "\t")):
        return False
    block = "paragraph"
    for line in reversed(lines):
        if not line.strip():
            block = "code"
        elif LIST_ITEM.match(line):
            return False
        elif not line.startswith((" ", "\t")):
            return block == "code"
    return True


def _filled_placeholder(
    call: str, rendered: ArticleBlock | ArticleLink, place: re.Match[str]
) -> str:
    if isinstance(rendered, ArticleBlock):
        before, after = place.string[: place.start()], place.string[place.end() :]
        own_lines = before[-1:] in ("", "\n") and after[:1] in ("", "\n")
        require(own_lines, f"{call}: a table or sentence needs a line of its own")
        return f"<!-- {{{{ {call} }}}} -->\n\n{rendered.text}\n\n<!-- end -->"
    require("'" not in call, f"{call}: write strings in double quotes")
    require(not {"[", "]"} & {*rendered.text}, f"{call}: a caption must not contain [ or ]")
    picture = "!" if rendered.picture else ""
    return f"{picture}[{rendered.text}]({rendered.target} '{{{{ {call} }}}}')"


def html(text: str, max_width: str = "46rem", pictures: bool = True) -> str:
    """Return a rendered article as an HTML page. The page loads nothing but its pictures.

    ``pictures``: False for texts of others, whose pictures are not loaded.
    """
    plain = COMMENT.sub(lambda match: match["code"] or "", text)
    title = next((line[2:] for line in plain.splitlines() if line.startswith("# ")), "labkit")
    page, body = templates().get_template("article.html.j2"), markdown_html(plain, pictures)
    return str(page.render(title=title, body=body, max_width=max_width))
