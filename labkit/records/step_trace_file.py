"""The file of a traced run: the steps of its engine, beside the run's record.

``traces/SHA256.json.gz`` in a cell's folder is JSON, compressed, named by the SHA-256 of the
compressed bytes. The record's note ``step_trace`` names the file, so the record's own digest covers
the trace. All runs of a traced cell trace their steps; only those of the first block store a file.

The JSON is an object:

``schema_version``
    1.
``block_size``, ``num_blocks``, ``token_bytes``
    Tokens of a KV block, blocks of the pool including the null block (both null in a layout without
    blocks), and bytes of one token's keys and values.
``steps_total``
    Steps of the run. ``steps`` has the first of them.
``requests``
    Objects with ``id`` and ``prompt_tokens``. Everywhere else a request is an index in this list.
``steps``
    Objects, in the order of scheduling:

    ``chunks``            [request, first token, tokens, 1 if prefill, 1 if it samples]
    ``drafts``            [request, draft tokens, accepted draft tokens]
    ``cu_seqlens_q``      prefix sums of the query lengths, padding rows included
    ``padding``           tokens computed for no request
    ``blocks``            [request, n, ids]: the first n entries of its block table stay, ids follow
    ``released``          requests whose memory was released since the previous step
    ``preempted``         requests that were preempted since the previous step
    ``lingering``         finished requests whose rows a static batch still computes
    ``slots``             [request, tokens that its memory can hold], in a layout without blocks
    ``waiting``           number of requests in the waiting queue
    ``free_blocks``, ``evictable_blocks``      null in a layout without blocks
    ``reserved_bytes``, ``used_bytes``         KV memory after scheduling, before the step computes
    ``times_us``          by part of the step: [start, duration] in us from the first step on the
                          arm's clock, which stops while other arms run
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.records.atomic_write import atomic_write
from labkit.records.run_record import RecordError, require
from labkit.records.study_archive import StudyPath

SCHEMA_VERSION = 1
MAX_TRACE_BYTES = 256 << 20  # of the JSON
PARTS = ("schedule", "draft", "build", "plan", "forward", "sample", "update")
DIGEST = re.compile("[0-9a-f]{64}")
# Keys of a step. ROWS: lists of rows that begin with a request, and the length of a row.
ROWS = {"chunks": 5, "drafts": 3, "blocks": 3, "slots": 2}
NUMBER_ROWS = ("chunks", "drafts", "slots")
REQUESTS = ("released", "preempted", "lingering")
NUMBERS = ("padding", "waiting", "reserved_bytes", "used_bytes")
BLOCK_COUNTS = ("free_blocks", "evictable_blocks")


def write_step_trace(cell_dir: Path, trace: Mapping[str, Any]) -> dict[str, Any]:
    """Write a run's trace by rename and return the note for its record."""
    body = {"schema_version": SCHEMA_VERSION, **trace}
    content = gzip.compress(json.dumps(body, separators=(",", ":")).encode(), 6, mtime=0)
    digest = hashlib.sha256(content).hexdigest()
    path = cell_dir / "traces" / f"{digest}.json.gz"
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return {
        "file": f"{path.parent.name}/{path.name}",
        "sha256": digest,
        "bytes": len(content),
        **step_counts(trace),
    }


def step_counts(trace: Mapping[str, Any]) -> dict[str, int]:
    """Return the note for a run whose trace is not stored: steps traced and steps in total."""
    return {"steps": len(trace["steps"]), "steps_total": trace["steps_total"]}


def read_step_trace(cell_dir: StudyPath, note: Mapping[str, Any]) -> dict[str, Any]:
    """Read and check the trace that a record's note names.

    Raises ``RecordError`` if the file is missing, edited or damaged, or is not a trace of this
    schema version.
    """
    digest = str(note.get("sha256"))
    require(
        DIGEST.fullmatch(digest) is not None,
        f"{cell_dir}: a record's note step_trace names no trace's SHA-256",
    )
    path = cell_dir / "traces" / f"{digest}.json.gz"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}") from None
    require(
        hashlib.sha256(content).hexdigest() == digest,
        f"{path} was edited after it was written (its SHA-256 is not its name); restore it",
    )
    try:
        data = json.loads(_unpack(content))
        _check(data)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise RecordError(f"{path} is not a valid trace: {error}") from None
    return dict(data)


def _unpack(content: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(content, MAX_TRACE_BYTES)
    except zlib.error as error:
        raise RecordError(str(error)) from None
    require(unpacker.eof, f"it is truncated, or has more than {MAX_TRACE_BYTES >> 20} MiB")
    return text


def _check(data: Any) -> None:
    version = data["schema_version"]
    require(version == SCHEMA_VERSION, f"schema_version is {version!r}, not {SCHEMA_VERSION}")
    _check_numbers(data["token_bytes"], data["steps_total"])
    for optional in (data["block_size"], data["num_blocks"]):
        _check_numbers(*[] if optional is None else [optional])
    for request in data["requests"]:
        require(isinstance(request["id"], str), "a request has no id")
        _check_numbers(request["prompt_tokens"])
    for number, step in enumerate(data["steps"]):
        try:
            _check_step(step, len(data["requests"]), data["num_blocks"] or 0)
        except (TypeError, LookupError, ValueError, AttributeError) as error:
            raise RecordError(f"step {number}: {error}") from None


def _check_step(step: Mapping[str, Any], requests: int, num_blocks: int) -> None:
    named = [row[0] for name in ROWS for row in step[name]]
    named += [request for name in REQUESTS for request in step[name]]
    _check_numbers(*named, below=requests)
    for name, length in ROWS.items():
        require(
            all(len(row) == length for row in step[name]),
            f"{name}: a row does not have {length} items",
        )
    _check_numbers(*[number for name in NUMBER_ROWS for row in step[name] for number in row])
    for _, shared, ids in step["blocks"]:
        _check_numbers(shared)
        _check_numbers(*ids, below=num_blocks)
    _check_numbers(*step["cu_seqlens_q"], *[step[name] for name in NUMBERS])
    _check_numbers(*[step[name] for name in BLOCK_COUNTS if step[name] is not None])
    for part, (start, duration) in step["times_us"].items():
        known = part in PARTS and all(type(us) in (int, float) for us in (start, duration))
        require(
            known and min(start, duration) >= 0,
            f"times_us: {part!r} is unknown, or its times are not numbers from 0",
        )


def _check_numbers(*values: Any, below: float = math.inf) -> None:
    """Raise ``RecordError`` unless all values are integers of at least 0 and below ``below``."""
    for value in values:
        require(
            type(value) is int and 0 <= value < below,
            f"{value!r} must be an integer with 0 <= value < {below}",
        )
