"""Extension of griffe: roles such as ``:class:`Record``` become plain code in the API reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|mod|func|meth|data|attr|exc):`(~?)\.?([^`]+)`")


class DocstringRoles(griffe.Extension):
    """Replaces roles of Sphinx, because mkdocstrings would show their markup."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that was just loaded."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(_code, obj.docstring.value)


def _code(match: re.Match[str]) -> str:
    """Return a role's target as code: the last name after a tilde, else the whole path."""
    hidden, path = match.groups()
    return f"`{path.rpartition('.')[2] if hidden else path}`"
