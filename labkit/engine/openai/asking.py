"""What a server is sent: a request in the words that this server understands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from labkit.config import Api, Ending, Server
from labkit.engine.base import EngineError
from labkit.engine.request import Request, SamplingParams
from labkit.models.spelling import Spelling

NEVER = -100.0  # what is added to the logit of a token that must not come
DEFAULT = SamplingParams()
KNOWN = ("temperature", "top_k", "top_p", "max_tokens", "ignore_eos", "seed")


PATHS = {Api.completions: "/v1/completions", Api.chat: "/v1/chat/completions"}


class Asking:
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
        self, server: Server, model: str, spelling: Spelling, eos_token_ids: Sequence[int]
    ) -> None:
        self.chat = server.api is Api.chat
        self.path = PATHS[server.api]
        self.respelled = 0  # prompts whose text is not the same ids again
        self._known, self._model, self._spelling = server.known, model, spelling
        self._eos_token_ids = tuple(eos_token_ids)

    def body(self, request: Request) -> dict[str, Any]:
        """Return the body of a request that streams, with usage.

        Raises
        ------
        EngineError
            It asks for what is not asked of servers.
        """
        params = request.params
        _check_known(params)
        body: dict[str, Any] = {
            "model": self._model,
            **self._prompt(request),
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
        return body | (self._full_length() if params.ignore_eos else {})

    def _prompt(self, request: Request) -> dict[str, Any]:
        if self.chat and request.messages is not None:
            return {"messages": [dict(message) for message in request.messages]}
        if self._known.token_prompts and not self.chat:
            return {"prompt": list(request.prompt_token_ids)}
        text, same = self._spelling.prompt(request.prompt_token_ids)
        self.respelled += not same
        return {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}

    def _full_length(self) -> dict[str, Any]:
        if self._known.ending is Ending.ignore_eos:
            return {"ignore_eos": True}
        if self._known.ending is Ending.logit_bias:
            return {"logit_bias": {str(token): NEVER for token in self._eos_token_ids}}
        return {}


def _check_known(params: SamplingParams) -> None:
    for item in dataclasses.fields(params):
        value: Any = getattr(params, item.name)
        if item.init and item.name not in KNOWN and value != getattr(DEFAULT, item.name):
            raise EngineError(f"{item.name}={value}: engine=openai does not ask servers for it")
