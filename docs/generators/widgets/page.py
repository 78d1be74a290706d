"""A widget's page: one HTML file with its styles, its data and its scripts inside."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

ASSETS = Path(__file__).parent / "assets"
PAGES = Path(__file__).parents[2] / "widgets"


@dataclass(frozen=True)
class Widget:
    """An interactive figure.

    Parameters
    ----------
    name
        Stem of the page and of its assets: ``NAME.html`` is the body and ``NAME.js`` draws.
    functions
        Stems of the assets that mirror functions of Python, ``STEM.functions.js``.
    title, source
        Heading of the page; a sentence that names the article.
    mirrored
        Text (HTML) for the reader: which Python code the functions mirror.
    data
        Returns what the page takes from labkit, as JSON values.
    text_page
        Stem of a page in ``docs`` with the same facts, for readers without JavaScript.
    """

    name: str
    title: str
    source: str
    mirrored: str
    functions: tuple[str, ...]
    data: Callable[[], dict[str, Any]]
    text_page: str = ""

    @property
    def path(self) -> Path:
        """The committed page."""
        return PAGES / f"{self.name}.html"

    def html(self) -> str:
        """Return the page."""
        data, environment = self.data(), _environment()
        functions = [f"{stem}.functions.js" for stem in self.functions]
        scripts = ["page.js", *functions, f"{self.name}.js"]
        return environment.get_template("page.html.j2").render(
            widget=self,
            css=environment.get_template("page.css").render(),
            body=environment.get_template(f"{self.name}.html").render(data=data),
            # "<" could end the script element.
            data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
            scripts=[(ASSETS / script).read_text("utf-8") for script in scripts],
        )


def _environment() -> jinja2.Environment:
    """Return an environment without autoescape: all of its text is labkit's own."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
