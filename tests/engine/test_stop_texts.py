"""Stop texts: detected at any split of the text, and never shown in part."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.engine.output_processor import StopTexts


def run(pieces, stops):
    """What is shown piece by piece, and whether a stop text was hit."""
    reader, shown = StopTexts(stops), []
    for piece in pieces:
        shown.append(reader.add(piece))
        if reader.matched:
            return shown, True
    return [*shown, reader.finish()], False


def expected(text, stops):
    """The text before the stop text that is complete first, by looking at every prefix."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


def cuts(text):
    """Every way to cut a text into pieces."""
    for flags in itertools.product((False, True), repeat=max(0, len(text) - 1)):
        pieces, start = [], 0
        for i, is_cut in enumerate(flags, 1):
            if is_cut:
                pieces.append(text[start:i])
                start = i
        yield [*pieces, text[start:]]


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("ab<end>cd", ["<end>"], "ab"),
        ("ab<en<end>", ["<end>"], "ab<en"),
        ("<end>", ["<end>"], ""),
        ("ababac!", ["abac"], "ab"),
        ("aab", ["ab"], "a"),
        ("abcd", ["bcd", "c"], "ab"),  # "c" is complete before "bcd" is
        ("abc!", ["c", "bc", "abc"], ""),  # complete together: the longest
        ("a\n\nb", ["\n\n"], "a"),
        ("no stop ", ["stop!"], "no stop "),
    ],
)
def test_the_shown_text_does_not_depend_on_its_pieces(text, stops, shown):
    for pieces in cuts(text):
        deltas, hit = run(pieces, stops)
        assert "".join(deltas) == shown
        assert hit == (shown != text)


SMALL = st.text("ab", min_size=1, max_size=4)


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(SMALL, max_size=3))
def test_the_text_before_the_first_stop_text_is_shown_and_nothing_else(pieces, stops):
    text = "".join(pieces)
    deltas, hit = run(pieces, stops)
    assert ("".join(deltas), hit) == expected(text, stops)


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(SMALL, min_size=1, max_size=3))
def test_no_part_of_a_coming_stop_text_is_ever_shown(pieces, stops):
    reader, shown, consumed = StopTexts(stops), "", ""
    for piece in pieces:
        shown, consumed = shown + reader.add(piece), consumed + piece
        if reader.matched:
            return
        # Whatever comes next: what is shown is a prefix of what will be shown.
        for stop, keep in itertools.product(stops, range(5)):
            future, _ = expected(consumed + stop[-keep:], stops)
            assert future.startswith(shown)
        # And nothing is held back without need.
        held_back = consumed[len(shown) :]
        assert held_back == "" or any(stop.startswith(held_back) for stop in stops)


class ReadCounter(str):
    """A stop text that counts how many of its characters are compared."""

    def __new__(cls, text):
        counter = super().__new__(cls, text)
        counter.num_read = 0
        return counter

    def __getitem__(self, index):
        self.num_read += 1
        return super().__getitem__(index)

    def startswith(self, text):
        self.num_read += len(text)
        return super().startswith(text)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("a" * 2000 + "b", ("a" * 2000 + "c") * 3),
        ("ab" * 1000 + "c", "ab" * 3000),
        ("a" * 1000 + "b" + "a" * 1000, ("a" * 1000 + "b" + "a" * 999 + "c") * 3),
    ],
)
def test_the_time_for_a_long_stop_text_is_linear(stop, text):
    counted = ReadCounter(stop)
    assert run(text, [counted]) == run(text, [stop])
    assert counted.num_read <= 6 * len(text)


def test_without_stop_texts_a_piece_is_returned_as_it_is():
    reader = StopTexts(())
    assert [reader.add("a"), reader.add(""), reader.finish()] == ["a", "", ""]
