"""A server's answer to a request for the log probabilities of a prompt, in one JSON body.

The format is vLLM's ``prompt_logprobs``: a list with one object per prompt token, and null for the
first token. An object maps token ids to entries with a log probability. It has entries for the
prompt token itself and for the likeliest tokens at its position.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.engine.engine_protocol import NO_TOKEN, PromptLogprobs, StreamEvent
from labkit.engine.openai.http_client import CompletedResponse
from labkit.engine.openai.sse_decoder import TokenUsage, parse_usage
from labkit.engine.openai.streamed_response import error_event
from labkit.engine.request import Request

WRONG_SHAPE = "the response has no prompt_logprobs of the prompt that was sent"


@dataclass(slots=True)
class ScoredResponse:
    """The response to a request with ``prompt_logprobs``. It is not streamed.

    ``usage``: the server's token counts, if the response has them.
    """

    request: Request
    usage: TokenUsage | None = None

    def final_event(self, completed: CompletedResponse) -> StreamEvent:
        """Return the request's only event: an error event if the response lacks the scores."""
        if completed.error is not None:
            return error_event(self.request, completed.at, completed.error)
        try:
            body = json.loads(b"".join(part.data for part in completed.parts))
            logprobs = self._logprobs(body["choices"][0]["prompt_logprobs"])
            self.usage = parse_usage(body.get("usage"))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return error_event(self.request, completed.at, WRONG_SHAPE)
        return StreamEvent(
            self.request.request_id,
            NO_TOKEN,
            "length",
            received=completed.at,
            prompt_logprobs=logprobs,
        )

    def _logprobs(self, positions: list[Mapping[str, Mapping[str, Any]] | None]) -> PromptLogprobs:
        """Return vLLM's objects as arrays, with as many likeliest tokens as were requested.

        Raises ``ValueError``, ``KeyError``, ``TypeError`` if a position is missing, or has fewer
        tokens than requested.
        """
        prompt, top = self.request.prompt_token_ids, self.request.params.prompt_logprobs or 0
        count = len(prompt) - 1
        own = np.empty(count)
        ids, values = np.empty((count, top), np.int32), np.empty((count, top))
        for row, (token, position) in enumerate(zip(prompt[1:], positions[1:], strict=True)):
            logprobs = {int(key): float(item["logprob"]) for key, item in (position or {}).items()}
            own[row] = logprobs[token]
            if len(logprobs) < top:
                raise ValueError(f"a position has {len(logprobs)} of {top} log probabilities")
            likeliest = sorted(logprobs, key=lambda key: (-logprobs[key], key))[:top]
            ids[row], values[row] = likeliest, [logprobs[key] for key in likeliest]
        if not np.isfinite(own).all() or not np.isfinite(values).all():
            raise ValueError("a log probability is not a finite number")
        return PromptLogprobs(own, ids, values, np.empty((count, 0)))
