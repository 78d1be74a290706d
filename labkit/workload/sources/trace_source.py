"""Requests of recorded traces: lengths and arrival times, without texts.

The formats are those of Mooncake (Qin et al., FAST 2025: JSON lines), whose hashes of 512-token
blocks are known too, of BurstGPT (Wang et al., 2024: CSV), and of Azure's public LLM inference
traces (Patel et al., 2024; Stojkovic et al., 2025: CSV). Each block's tokens are drawn from the
seed and the block's hash, so prompts share exactly the prefixes that they shared when the trace was
recorded. Prompts without hashes share nothing. A request of a CSV file whose prompt or output has
no tokens failed when the trace was recorded, and is left out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from labkit.config import ConfigError, Experiment, count_text, require
from labkit.config.option import Group, option
from labkit.config.requests import MAX_LENGTH_TOKENS, MAX_TIMESTAMP_MS
from labkit.models import ModelDir
from labkit.workload.sources import bounded_reader
from labkit.workload.tokenized_prompt import Prompt, prompts_seed, take_first

HASH_BLOCK_TOKENS = 512  # prompt tokens that one hash covers
SEED_STREAM = 8  # number of this source's random stream, used together with the seed
MAX_COUNT = 10**12  # a larger number is a mistake, and its digits would fill the message


@dataclass
class TraceLine(Group):
    """One request of a trace. ``hash_ids`` has one id per 512 prompt tokens, or is empty."""

    timestamp: float | None = option(None, ge=0, le=MAX_TIMESTAMP_MS, unit="milliseconds")
    input_length: int | None = option(None, ge=1, le=MAX_LENGTH_TOKENS, unit="tokens")
    output_length: int | None = option(None, ge=1, le=MAX_LENGTH_TOKENS, unit="tokens")
    hash_ids: list[int] = option(factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("timestamp", "input_length", "output_length"):
            require(getattr(self, name) is not None, f"{name} is missing")
        blocks = -(-(self.input_length or 0) // HASH_BLOCK_TOKENS)
        require(
            len(self.hash_ids) in (0, blocks),
            f"hash_ids has {count_text(len(self.hash_ids), 'id')} for input_length="
            f"{self.input_length}; it must have {blocks} (one per "
            f"{HASH_BLOCK_TOKENS} tokens) or none",
        )
        require(
            all(0 <= hash_id < 1 << 63 for hash_id in self.hash_ids),
            "hash_ids: every id must be 0 to 2**63 - 1",
        )


@dataclass(frozen=True)
class TraceSource:
    """The first ``workload.num_requests`` requests of a trace, with scaled lengths.

    ``read`` returns all requests of the trace, or at least the first ones that the workload needs.
    """

    read: Callable[[Experiment], Sequence[TraceLine]]

    def _lines(self, experiment: Experiment) -> Sequence[TraceLine]:
        return take_first(experiment, self.read(experiment))

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        lines = hashlib.sha256(repr(self._lines(experiment)).encode()).hexdigest()
        scale = experiment.workload.prompts.length_scale
        return {
            "source": experiment.workload.prompts.source,
            "lines": lines,
            "scale": scale,
            "seed": prompts_seed(experiment),
        }

    def make(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        lines, lengths = self._lines(experiment), self.lengths(experiment)
        scale = experiment.workload.prompts.length_scale
        requests = []
        for index, (line, (prompt, output)) in enumerate(zip(lines, lengths, strict=True)):
            # A line without hashes shares no blocks.
            keys = [[0, h] for h in line.hash_ids] or [[1, index]]
            ids: list[int] = []
            for place, key in enumerate(keys):
                end = round((place + 1) * HASH_BLOCK_TOKENS * scale) if line.hash_ids else prompt
                count = max(0, min(max(1, end), prompt) - len(ids))
                rng = np.random.default_rng([prompts_seed(experiment), SEED_STREAM, *key])
                ids += rng.integers(0, model.vocab_size, count).tolist()
            requests.append(Prompt(f"r{index:03d}", tuple(ids), output, None, line.timestamp))
        return tuple(requests)

    def timestamps_ms(self, experiment: Experiment) -> list[float | None]:
        return [line.timestamp for line in self._lines(experiment)]

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        scale = experiment.workload.prompts.length_scale

        def scaled(tokens: int | None) -> int:
            return max(1, round((tokens or 0) * scale))

        lines = self._lines(experiment)
        lengths = [(scaled(line.input_length), scaled(line.output_length)) for line in lines]
        longest = max(map(sum, lengths))
        require(
            longest <= MAX_LENGTH_TOKENS,
            f"workload.prompts.length_scale={scale}: a request would have {longest:,} tokens, "
            f"but may have at most {MAX_LENGTH_TOKENS:,}",
        )
        return lengths


def _table(columns: tuple[str, str, str], seconds: Callable[[str], float]) -> TraceSource:
    """Return the source of a trace that is a CSV file.

    ``columns``: names of the columns of arrival times, prompt tokens and output tokens.
    ``seconds``: converts the text of an arrival time to seconds since any origin; raises
    ``ValueError`` if the text is not a time.
    """

    def requests(path: str) -> Iterator[TraceLine]:
        """Yield a file's requests, timed from the first; raise ``ConfigError`` at a bad line."""
        start: float | None = None
        for where, texts in bounded_reader.table_rows(path, columns):
            time, prompt, output = map(_number, texts, (seconds, float, float))
            if not math.isfinite(time):
                raise ConfigError(f"{where}: {columns[0]} is {texts[0][:40]!r}, not a time")
            for name, text, value in zip(columns[1:], texts[1:], (prompt, output), strict=True):
                if not (0 <= value <= MAX_COUNT and value.is_integer()):
                    raise ConfigError(
                        f"{where}: {name} is {text[:40]!r}, not a whole number of 0 or more"
                    )
            if not (prompt and output):
                continue
            start = time if start is None else start
            try:
                yield TraceLine(round((time - start) * 1e3, 3), int(prompt), int(output))
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None

    return TraceSource(lambda e: bounded_reader.first_requests(e, requests))


def _number(text: str, read: Callable[[str], float]) -> float:
    try:
        return read(text)
    except ValueError:
        return math.nan


def _azure_seconds(text: str) -> float:
    """Read a date and time with up to seven decimals, with or without an offset from UTC."""
    time = datetime.fromisoformat(text.strip())
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


MOONCAKE = TraceSource(lambda e: bounded_reader.read_json_lines(e, TraceLine))
BURSTGPT = _table(("Timestamp", "Request tokens", "Response tokens"), float)
AZURE = _table(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure_seconds)
