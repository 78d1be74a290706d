"""Extension of griffe: roles such as ``:class:`Record``` become plain code in the API reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|mod|func|meth|data|attr|exc):`(~?)\.?([^`]+)`")


class DocstringRoles(griffe.Extension):
    """Replaces roles of Sphinx, which mkdocstrings would show as they are written."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that was just loaded."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(_code, obj.docstring.value)


def _code(match: re.Match[str]) -> str:
    """Return ``Record`` for a role with a tilde, which hides the path, else the whole path."""
    hidden, path = match.groups()
    return f"`{path.rpartition('.')[2] if hidden else path}`"
