"""Requests of Azure's public LLM inference traces (Patel et al., 2024; Stojkovic et al., 2025).

``TIMESTAMP`` is a date and time with up to seven decimals of a second, with or without an offset
from UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime

from labkit.workload.sources.csv_trace import LengthTable


def _seconds(text: str) -> float:
    time = datetime.fromisoformat(text.strip())
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


SOURCE = LengthTable(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _seconds).source()
