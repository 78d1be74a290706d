"""Record a step's results in the states of its requests, and make the events of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.engine.engine_protocol import NO_TOKEN, FinishReason, TokenEvent
from labkit.engine.request import RequestState
from labkit.engine.sampling.prompt_logprobs import ScoredPart, concatenate
from labkit.engine.sampling.sampler import Sampled


def record_scored(state: RequestState, part: ScoredPart) -> None:
    """Append the log probabilities of a step's prompt rows, unless they are recorded already.

    Raises ``RuntimeError`` if earlier rows are missing.
    """
    if part.start > state.num_scored_rows:
        raise RuntimeError(
            f"request {state.request_id}: prompt rows {state.num_scored_rows} to {part.start} were "
            "not scored"
        )
    if part.start == state.num_scored_rows:
        state.scored_parts.append(part.logprobs)
        state.num_scored_rows += len(part.logprobs.tokens)


def append_sampled(
    state: RequestState, results: Sequence[Sampled], eos_token_ids: frozenset[int]
) -> list[TokenEvent]:
    """Append sampled tokens, up to one that ends the request, and return their events.

    All but the first token of ``results`` are accepted drafts, which are computed already. A
    request whose next token could not be sampled ends with an error event.
    """
    events = []
    prompt_logprobs = None
    if state.scored_parts and not state.num_output_tokens:
        prompt_logprobs = concatenate(state.scored_parts)
        state.scored_parts = []
    state.num_output_placeholders -= 1
    state.num_computed_tokens += len(results) - 1
    for result in results:
        if result.error is not None:
            events.append(TokenEvent(state.request_id, NO_TOKEN, "error", error=result.error))
            break
        state.token_ids.append(result.token)
        reason = _finish_reason(state, eos_token_ids)
        events.append(
            TokenEvent(
                state.request_id,
                result.token,
                reason,
                result.margin,
                logprobs=result.logprobs,
                num_cached_tokens=state.num_cached_tokens,
                prompt_logprobs=prompt_logprobs,
            )
        )
        prompt_logprobs = None
        if reason is not None:
            break
    return events


def _finish_reason(state: RequestState, eos_token_ids: frozenset[int]) -> FinishReason | None:
    params, token = state.request.params, state.token_ids[-1]
    if token in params.stop_token_ids:
        return "stop"
    if not params.ignore_eos and token in eos_token_ids:
        return "stop"
    return "length" if state.num_output_tokens >= params.max_tokens else None
