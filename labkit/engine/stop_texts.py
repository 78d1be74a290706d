"""Texts that end a request, found in a stream of pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Looks for the first stop text; holds back what may be the beginning of one.

    What is returned for a text does not depend on how it is cut into pieces: the stop
    text that is complete first ends it, the longest of those that end together.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def add(self, piece: str) -> str:
        """Take more text; return what is certainly before any stop text."""
        if not self._stops:
            return piece
        text, self._held = self._held + piece, ""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit = True
            return text[: min(found)[1]]
        shown = len(text) - self._begun(text)
        self._held = text[shown:]
        return text[:shown]

    def _begun(self, text: str) -> int:
        """Return how many characters at the end may be the beginning of a stop text."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for count in range(longest, 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0

    def finish(self) -> str:
        """Return what was held back: no stop text came of it."""
        held, self._held = self._held, ""
        return held
