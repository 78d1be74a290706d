"""Requests of a BurstGPT trace (Wang et al., 2024): arrival times in seconds, and lengths."""

from __future__ import annotations

from labkit.workload.sources.csv_trace import LengthTable

SOURCE = LengthTable(("Timestamp", "Request tokens", "Response tokens"), float).source()
