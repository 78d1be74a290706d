"""The baseline's log probabilities of a round, sent to arms that have processes of their own.

For each position, the ids and the float64 log probabilities of the ``SENT_TOP`` likeliest tokens
are sent. This takes 1,035 bytes per position in base64, so the message for a round of 1,024 tokens
takes about 1 MB.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.engine.engine_protocol import PromptLogprobs
from labkit.workload.measurement import InvalidOutput
from labkit.workload.tokenized_prompt import Prompt
from labkit.workload.turn_order import TurnOrder

SENT_TOP = 64


def exchange_reference(
    order: TurnOrder, windows: Sequence[Prompt], own: Sequence[PromptLogprobs] | None
) -> list[PromptLogprobs]:
    """Exchange messages between the arms' processes; return the baseline's log probabilities.

    ``windows``: the windows of the round. ``own``: the log probabilities of this process's arm if
    this arm is the baseline, else None. Raises ``InvalidOutput`` if the baseline's process has
    ended, or it scores other windows.
    """
    encoded = None if own is None else [_encoded(part) for part in own]
    value = {"windows": _digest(windows), "reference": encoded}
    gathered, _ = order.gather([value])
    sent = next((value for value in gathered if value["reference"] is not None), None)
    if sent is None:
        raise InvalidOutput("the baseline's process has ended, so there is no reference")
    if sent["windows"] != value["windows"]:
        raise InvalidOutput(OTHER_WINDOWS)
    return [_decoded(part) for part in sent["reference"]]


OTHER_WINDOWS = (
    "the arm and the baseline score different windows: workload.kind=scoring compares arms whose "
    "models have the same tokenizer, and that have the same workload options"
)


def _digest(windows: Sequence[Prompt]) -> str:
    text = repr([(window.request_id, window.token_ids) for window in windows])
    return hashlib.sha256(text.encode()).hexdigest()


def _encoded(part: PromptLogprobs) -> dict[str, Any]:
    """Return the arrays of the baseline that ``prediction_distance`` needs, as JSON types."""
    return {
        "tokens": _text(part.tokens, "<f8"),
        "top": _text(part.top, "<f8"),
        "top_ids": _text(part.top_ids, "<i4"),
    }


def _decoded(part: dict[str, Any]) -> PromptLogprobs:
    tokens = _array(part["tokens"], "<f8")
    rows = len(tokens)
    top, top_ids = _array(part["top"], "<f8"), _array(part["top_ids"], "<i4")
    return PromptLogprobs(
        tokens, top_ids.reshape(rows, -1), top.reshape(rows, -1), np.zeros((rows, 0))
    )


def _text(values: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


def _array(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype)
