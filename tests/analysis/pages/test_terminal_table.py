"""Terminal tables never break a word or a number; without room they become records."""

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from labkit.analysis.pages.terminal_report import GAP, TerminalColumn, terminal_table

COLUMNS = [
    TerminalColumn("metric", "metric", False),
    TerminalColumn("base", "base", True),
    TerminalColumn("delta of\nchunked_prefill\n%", "delta of chunked_prefill (%)", True),
    TerminalColumn("adjusted\n95 % CI, %", "adjusted 95 % CI (%)", True),
    TerminalColumn("verdict", "verdict", False),
]
ROWS = [
    ["total_tok_s", "12,345.6", "+12.3", "−1,234.5, +1,234.5", "inconclusive"],
    ["", "12,345.6", "+12.3", "−1.2, +3.4", "better"],
    ["ttft_excl_first_token_p99_ms", "1.0", "−0.4", "–", "a long phrase that may be wrapped"],
]


def printed(width, columns=COLUMNS, rows=ROWS):
    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(terminal_table(columns, [[Text(c) for c in row] for row in rows], width))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_every_word_and_number_is_whole(width):
    text = printed(width)
    words = re.split(r"\s+", text)
    for row in ROWS:
        assert row[0] in words or not row[0]
        assert all(number in text for number in row[1:4])
        assert all(word in words for word in row[4].split())
    assert max(map(len, text.splitlines())) <= width


def test_a_table_without_room_becomes_records():
    assert "metric" in printed(100).split("\n")[3] and "delta of chunked_prefill" not in printed(
        100
    )
    records = printed(80)
    assert "  delta of chunked_prefill (%): +12.3\n" in records
    assert records.count("total_tok_s") == 1  # the next line belongs to it too


def test_widths_share_what_is_left():
    def widths(room, *texts):
        columns = [TerminalColumn("", "", False) for _ in texts]
        made = terminal_table(columns, [list(map(Text, texts))], room + GAP * len(texts))
        return [column.width for column in made.columns]

    long = " ".join(["abcd"] * 8)
    assert widths(20, "abc", long) == [3, 17]
    assert widths(17, "abc abc abc", long) == [8, 9]
    assert widths(100, "abc a", "abcd a") == [5, 6]
    assert not hasattr(terminal_table([COLUMNS[0]], [[Text("abcdefgh")]], 9), "columns")
