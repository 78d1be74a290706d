"""Command: write the pages in docs/widgets, or with ``--check`` compare them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from docs.generators.widgets import (
    batching,
    binary_search,
    frame_picker,
    kv_layouts,
    memory_budget,
    out_of_context,
    radix_tree,
)
from docs.generators.widgets.page import PAGES, Widget

WIDGETS: tuple[Widget, ...] = (
    binary_search.WIDGET,
    kv_layouts.WIDGET,
    frame_picker.WIDGET,
    out_of_context.WIDGET,
    memory_budget.WIDGET,
    batching.WIDGET,
    radix_tree.WIDGET,
)
USAGE = "usage: python -m docs.generators.widgets [--check]"


def outdated() -> list[str]:
    """Return the names of pages that are missing, differ from the generated ones or are unknown."""
    pages = {widget.path.name: widget.html() for widget in WIDGETS}
    committed = {path.name: path.read_text("utf-8") for path in PAGES.glob("*.html")}
    return [name for name in sorted(pages | committed) if pages.get(name) != committed.get(name)]


def main(arguments: Sequence[str]) -> int:
    """Write or check the pages. Exit codes: 0; 1 if a page is out of date; 2 for a bad argument."""
    if list(arguments) not in ([], ["--check"]):
        print(USAGE, file=sys.stderr)
        return 2
    if arguments:
        names = outdated()
        for name in names:
            print(f"docs/widgets/{name} is out of date: run python -m docs.generators.widgets")
        return bool(names)
    PAGES.mkdir(exist_ok=True)
    for widget in WIDGETS:
        widget.path.write_text(widget.html(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
