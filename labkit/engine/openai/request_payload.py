"""What a server is sent: a request in the words that this server understands."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.config import Api, Ending, Opponent
from labkit.engine.engine_protocol import EngineError
from labkit.engine.request import Request, SamplingParams
from labkit.models.detokenizer import Detokenizer

SUPPRESSING_LOGIT_BIAS = -100.0  # what is added to the logit of a token that must not come
DEFAULT_PARAMS = SamplingParams()
SUPPORTED_PARAMS = ("temperature", "top_k", "top_p", "max_tokens", "ignore_eos", "seed")


@dataclass(frozen=True, slots=True)
class RequestPayload:
    """A request's body as JSON, and whether its prompt is the same token ids to the server."""

    request: Request
    body: bytes
    same: bool


ENDPOINT_PATHS = {Api.completions: "/v1/completions", Api.chat: "/v1/chat/completions"}


class PayloadBuilder:
    """Writes requests for one server.

    Parameters
    ----------
    server
        Which endpoint, and what is known of the server.
    model
        What requests call the model.
    spelling
        Writes prompts as text where the server takes no ids.
    eos_token_ids
        The model's end tokens.
    """

    def __init__(
        self, server: Opponent, model: str, spelling: Detokenizer, eos_token_ids: Sequence[int]
    ) -> None:
        self.chat = server.api is Api.chat
        self.path = ENDPOINT_PATHS[server.api]
        self._known, self._model, self._spelling = server.known, model, spelling
        self._eos_token_ids = tuple(eos_token_ids)
        self._written: dict[str, RequestPayload] = {}

    def write(self, requests: Sequence[Request]) -> None:
        """Write the bodies of requests that will be sent, so that it takes no time then."""
        self._written = {one.request_id: self._write(one) for one in requests}

    def written(self, request: Request) -> RequestPayload:
        """Return a request that streams, with usage, as it is sent.

        Raises
        ------
        EngineError
            It asks for what is not asked of servers.
        """
        known = self._written.get(request.request_id)
        return known if known and known.request == request else self._write(request)

    def _write(self, request: Request) -> RequestPayload:
        params = request.params
        _check_supported(params)
        prompt, same = self._prompt(request)
        body: dict[str, Any] = {
            "model": self._model,
            **prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if params.top_k:
            body["top_k"] = params.top_k
        if params.top_p < 1:
            body["top_p"] = params.top_p
        if not params.greedy and params.seed is not None:
            body["seed"] = params.seed % (1 << 31)
        if self._known.token_ids:
            body["return_token_ids"] = True
        body |= self._full_length() if params.ignore_eos else {}
        return RequestPayload(request, json.dumps(body).encode(), same)

    def _prompt(self, request: Request) -> tuple[dict[str, Any], bool]:
        """Return a prompt, and whether the server reads the same token ids, as far as is known."""
        if self.chat and request.messages is not None:
            return {"messages": [dict(message) for message in request.messages]}, True
        if self._known.token_prompts and not self.chat:
            return {"prompt": list(request.prompt_token_ids)}, True
        text, same = self._spelling.prompt(request.prompt_token_ids)
        if self.chat:
            return {"messages": [{"role": "user", "content": text}]}, False
        return {"prompt": text}, same

    def _full_length(self) -> dict[str, Any]:
        if self._known.ending is Ending.ignore_eos:
            return {"ignore_eos": True}
        if self._known.ending is Ending.logit_bias:
            return {
                "logit_bias": {str(token): SUPPRESSING_LOGIT_BIAS for token in self._eos_token_ids}
            }
        return {}


def _check_supported(params: SamplingParams) -> None:
    for item in dataclasses.fields(params):
        value: Any = getattr(params, item.name)
        if (
            item.init
            and item.name not in SUPPORTED_PARAMS
            and value != getattr(DEFAULT_PARAMS, item.name)
        ):
            raise EngineError(f"{item.name}={value}: engine=openai does not ask servers for it")
