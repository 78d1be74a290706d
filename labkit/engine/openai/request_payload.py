"""Build request bodies for a server, with the parameters that the server understands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.config import Api, EosHandling, OpenAIServer
from labkit.engine.engine_protocol import EngineError
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.models.tokenizer import Detokenizer

SUPPRESSING_LOGIT_BIAS = -100.0  # added to the logits of tokens that must not be sampled
HASH_FACTOR = 0x9E3779B1  # Knuth's: odd, near 2**32 divided by the golden ratio
SUPPORTED_PARAMS = (
    "temperature",
    "top_k",
    "top_p",
    "max_tokens",
    "ignore_eos",
    "seed",
    "prompt_logprobs",
)


@dataclass(frozen=True, slots=True)
class RequestPayload:
    """A request's JSON body. ``same_ids``: the server reads the prompt as the request's ids."""

    request: Request
    body: bytes
    same_ids: bool


ENDPOINT_PATHS = {Api.completions: "/v1/completions", Api.chat: "/v1/chat/completions"}


class PayloadBuilder:
    """A builder of request bodies for one server.

    ``server``: the endpoint, and what the server supports. ``model``: the model's name in requests.
    ``detokenizer``: turns prompts into text for a server that takes no token ids.
    ``eos_token_ids``: the model's EOS tokens, which a request with ``ignore_eos`` must not sample.
    """

    def __init__(
        self,
        server: OpenAIServer,
        model: str,
        detokenizer: Detokenizer,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.chat = server.api is Api.chat
        self.path = ENDPOINT_PATHS[server.api]
        self._preset, self.model, self._detokenizer = server.server_preset, model, detokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._prebuilt: dict[str, RequestPayload] = {}  # by request id

    def prebuild(self, requests: Sequence[Request]) -> None:
        """Build the bodies of requests before the measurement starts."""
        self._prebuilt = {request.request_id: self._build(request) for request in requests}

    def payload(self, request: Request) -> RequestPayload:
        """Return the payload of a request.

        It asks for a stream with token usage, unless the request has ``prompt_logprobs``. Raises
        ``EngineError`` if a sampling parameter that labkit does not send to servers differs from
        its default.
        """
        prebuilt = self._prebuilt.get(request.request_id)
        if prebuilt is not None and prebuilt.request == request:
            return prebuilt
        return self._build(request)

    def _build(self, request: Request) -> RequestPayload:
        params = request.params
        for name, value in params.changed_outside(SUPPORTED_PARAMS):
            raise EngineError(
                f"{name}={value}: engine=openai does not send this parameter; leave it at its "
                "default"
            )
        if params.prompt_logprobs is not None:
            return self._build_scored(request)
        prompt, same_ids = self._prompt(request)
        body: dict[str, Any] = {
            "model": self.model,
            **prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {} if params.greedy else self._sampling_fields(params)
        if self._preset.token_ids:
            body["return_token_ids"] = True
        body |= self._ignore_eos_fields() if params.ignore_eos else {}
        return RequestPayload(request, json.dumps(body).encode(), same_ids)

    def _build_scored(self, request: Request) -> RequestPayload:
        """Build the payload for a prompt's log probabilities. vLLM generates one token or more."""
        body = {
            "model": self.model,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": request.params.prompt_logprobs,
        }
        return RequestPayload(request, json.dumps(body).encode(), True)

    def _prompt(self, request: Request) -> tuple[dict[str, Any], bool]:
        """Return the prompt's JSON fields, and ``same_ids`` (see ``RequestPayload``)."""
        if self.chat and request.messages is not None:
            return {"messages": [dict(message) for message in request.messages]}, True
        if self._preset.token_prompts and not self.chat:
            return {"prompt": list(request.prompt_token_ids)}, True
        text, same_ids = self._detokenizer.prompt_text(request.prompt_token_ids)
        if self.chat:
            return {"messages": [{"role": "user", "content": text}]}, False
        return {"prompt": text}, same_ids

    def _sampling_fields(self, params: SamplingParams) -> dict[str, Any]:
        """Return what is sampled from, also where it is all tokens: servers have other defaults."""
        fields: dict[str, Any] = {"top_p": params.top_p}
        if params.top_k or self._preset.takes_top_k:
            fields["top_k"] = params.top_k
        if self._preset.takes_top_k:
            fields["min_p"] = params.min_p
        if params.seed is not None and self._preset.batches_seeds:
            fields["seed"] = _seed_of_31_bits(params.seed)
        return fields

    def _ignore_eos_fields(self) -> dict[str, Any]:
        if self._preset.eos_handling is EosHandling.ignore_eos:
            return {"ignore_eos": True}
        if self._preset.eos_handling is EosHandling.logit_bias:
            return {
                "logit_bias": {str(token): SUPPRESSING_LOGIT_BIAS for token in self._eos_token_ids}
            }
        return {}


def _seed_of_31_bits(seed: int) -> int:
    """Return a seed that every server takes; it depends on both halves of ``seed``.

    The upper half is the experiment's seed, the lower one the request's index. Requests of one
    experiment keep different seeds.
    """
    return ((seed >> 32) * HASH_FACTOR ^ seed) % (1 << 31)
