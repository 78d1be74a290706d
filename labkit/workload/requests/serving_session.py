"""A serving session: warm up one engine, serve all requests once and compute the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.config import CacheState, Workload
from labkit.engine.engine_protocol import (
    EngineError,
    InferenceEngine,
    PipelinedEngine,
    Remote,
    StepReport,
    StepTiming,
    StepTracing,
    TokenCounting,
)
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.models.tokenizer import Detokenizer
from labkit.records import CaseRecord, Metric
from labkit.workload.output_digest import text_digest, token_digest, token_texts
from labkit.workload.requests import arrivals
from labkit.workload.requests.load_generator import ClientPool, Clock, LoadGenerator, Wait
from labkit.workload.requests.memory_timeline import MemoryTimeline
from labkit.workload.requests.post_run_profiling import ClockedServing
from labkit.workload.requests.serving_metrics import (
    ServedRequest,
    counted_metrics,
    outcome_notes,
    rectangle_notes,
    request_metrics,
    request_notes,
    sending_metrics,
    serving_metrics,
    sharing_notes,
)
from labkit.workload.tokenized_prompt import Prompt
from labkit.workload.workload_protocols import InvalidOutput, Measurement

# With arrivals at a rate or from a trace, the number of requests in flight is unknown beforehand.
PACED_STREAMS = 16


@dataclass(eq=False)
class ServingSession:
    """A request workload on one loaded engine, which ``close`` closes.

    ``prompts``: in the order of submission. ``seed``: of the warm-up's token ids, the arrivals and
    every request's random stream. ``vocab_size``: exclusive upper bound of the warm-up's token ids.
    ``detokenizer``: converts token ids to text for the record; None: the record has only ids.
    ``model_digest``: of the model's weights and tokenizer, for the record. ``block_size``: tokens
    in a block of the engine's prefix cache. ``clock`` returns seconds, ``wait`` sleeps for a number
    of seconds.
    """

    engine: InferenceEngine
    prompts: Sequence[Prompt]
    workload: Workload
    _: KW_ONLY
    seed: int
    vocab_size: int
    detokenizer: Detokenizer | None = None
    model_digest: str | None = None
    block_size: int = 16
    clock: Clock = time.perf_counter
    wait: Wait = time.sleep

    def __post_init__(self) -> None:
        self._token_counting = self.engine if isinstance(self.engine, TokenCounting) else None
        self._remote = self.engine if isinstance(self.engine, Remote) else None
        self._step_trace: StepReport | None = None

    def warm_up(self) -> None:
        """Serve ``workload.warmup`` requests, then clear the cache and the counters.

        These requests have the lengths of the first measured ones but random token ids. With
        ``workload.cache_state=warm`` all requests are then served once, so that their prefixes are
        cached. For a server, the overhead of the client is measured as well.
        """
        rng = np.random.default_rng([self.seed, 2])
        shapes = self.prompts[: self.workload.warmup]
        prompts = [
            Prompt(
                f"warm-up {index}",
                tuple(rng.integers(0, self.vocab_size, len(shape.token_ids)).tolist()),
                shape.max_tokens,
            )
            for index, shape in enumerate(shapes)
        ]
        self._serve(prompts)
        self.engine.clear_cache()
        if self.workload.cache_state is CacheState.warm:
            self._serve(self.prompts)
        if self._remote is not None:
            self._remote.prepare_requests(self._requests(self.prompts), self._overhead_streams())
        self.engine.reset_counters()

    def _overhead_streams(self) -> int:
        """Return the number of concurrent requests with which a client's overhead is measured."""
        number, workload = len(self.prompts), self.workload
        limit = PACED_STREAMS if workload.arrivals.is_paced else workload.concurrency
        return min(limit or number, number)

    def measure(self, heartbeat: Callable[[str], None]) -> Measurement:
        generator = self.start(heartbeat)
        generator.run()
        return self.measurement(generator)

    def start(self, heartbeat: Callable[[str], None]) -> LoadGenerator:
        """Return a load generator for all requests. It has submitted nothing yet.

        Raises ``EngineError`` if ``workload.step_trace`` is set, and the engine cannot trace its
        steps.
        """
        limit = self.workload.step_trace
        if limit is not None:
            if not isinstance(self.engine, StepTracing):
                raise EngineError(
                    f"workload.step_trace={limit}: engine.name={self.engine.name} has no method "
                    "trace_steps; set workload.step_trace=null for this arm"
                )
            self._step_trace = self.engine.trace_steps(limit, self.clock)
        due = arrivals.due(self.workload.arrivals, self.prompts, self.seed)
        return self._drive(self.prompts, heartbeat, due)

    @property
    def has_clocks(self) -> bool:
        return isinstance(self.engine, StepTiming)

    def start_clocked(self, heartbeat: Callable[[str], None]) -> ClockedServing:
        """Return the same requests, to be served again with clocks on the parts of every step.

        The measurement must be over, and the session must have clocks.
        """
        from labkit.engine.runner.step_clocks import ClockedEngine

        assert isinstance(self.engine, StepTiming)
        if self.workload.cache_state is not CacheState.warm:
            self.engine.clear_cache()
        due = arrivals.due(self.workload.arrivals, self.prompts, self.seed)
        clocks = self.engine.time_steps(self.clock)
        engine: Any = ClockedEngine(self.engine, clocks, self.clock, self.wait)
        generator = self._drive(self.prompts, heartbeat, due, engine, engine.wait)
        return ClockedServing(clocks, generator, sum(p.max_tokens for p in self.prompts))

    @property
    def is_remote(self) -> bool:
        """Whether the engine is a server, so that a step only receives responses."""
        return self._remote is not None

    def computed_tokens(self) -> float:
        """Return the engine's counter of computed tokens, or 0 if it has none.

        This is called after every step. A server has no such counter, and reading the others of its
        client would tokenise every finished answer each time.
        """
        if self._token_counting is not None:
            return self._token_counting.computed_tokens()
        return 0.0 if self.is_remote else self.engine.counters().get("tokens.computed", 0.0)

    def drain(self) -> None:
        if isinstance(self.engine, PipelinedEngine):
            self.engine.drain()

    def measurement(
        self, generator: LoadGenerator, stalled_s: NDArray[np.float64] | None = None
    ) -> Measurement:
        """Return the measurement of a load generator whose requests have all ended.

        ``stalled_s``: seconds that each step lost to a stall, [steps]. The metrics exclude this
        time. The metrics that include it are in a case's notes as ``as_measured``. Raises
        ``InvalidOutput`` if a request has fewer tokens than its ``max_tokens``, or no request was
        served. Raises ``EngineError`` if the engine is a server that labkit started, and it has
        ended.
        """
        if self._remote is not None:
            self._remote.check_running()
        _check_complete(generator)
        counters = {name: float(value) for name, value in self.engine.counters().items()}
        cases = self._cases(generator.entries, counters, generator.cpu_s)
        notes: dict[str, Any] = {}
        if stalled_s is not None:
            notes["stalls"] = {
                "steps": int((stalled_s > 0).sum()),
                "seconds": round(float(stalled_s.sum()), 6),
                "of_s": round(float(generator.step_seconds().sum()), 6),
            }
            if stalled_s.any():
                entries = generator.entries_without(stalled_s)
                without = self._cases(entries, counters, generator.cpu_s)
                both = zip(without, cases, strict=True)
                cases = [
                    replace(case, notes={**case.notes, "as_measured": _first_repeats(measured)})
                    for case, measured in both
                ]
        served = [entry for entry in generator.entries if entry.outcome == "served"]
        notes |= {
            "cache_state": self.workload.cache_state.value,
            "model_digest": self.model_digest,
            "sharing": sharing_notes(
                self.prompts,
                self.block_size,
                warm=self.workload.cache_state is CacheState.warm,
                unshared=self.workload.prompts.unshared,
            ),
            "rectangle": rectangle_notes([(r.prompt_tokens, len(r.tokens)) for r in served]),
            # The engine's decisions at load; a user's engine may have none.
            "engine": dict(getattr(self.engine, "notes", {})),
            "timeline": generator.timeline.report(),
        }
        trace = None if self._step_trace is None else self._step_trace.report()
        return Measurement(cases=tuple(cases), counters=counters, notes=notes, step_trace=trace)

    def _cases(
        self, entries: Sequence[ServedRequest], counters: Mapping[str, float], cpu_s: float
    ) -> list[CaseRecord]:
        """Return one case for all requests and, with ``workload.per_request``, one per request."""
        peak_kv_bytes = counters.get("peak_kv_bytes")
        metrics = (
            *serving_metrics(entries, peak_kv_bytes, limits=self.workload.limits),
            *sending_metrics(entries),
            *counted_metrics(counters),
        )
        traffic = outcome_notes(
            entries, self.workload, rate_unit=arrivals.rate_unit(self.prompts), cpu_s=cpu_s
        )
        together = CaseRecord(
            case="all",
            metrics=self._marked(metrics),
            outputs=outputs_of(entries, self.detokenizer),
            notes={"requests": request_notes(entries), "traffic": traffic},
        )
        if not self.workload.per_request:
            return [together]
        per_request = (
            CaseRecord(
                case=served.request_id,
                metrics=self._marked(request_metrics(served)),
                outputs=outputs_of([served], self.detokenizer),
            )
            for served in entries
            if served.outcome == "served"
        )
        return [together, *per_request]

    def _marked(self, metrics: Iterable[Metric]) -> tuple[Metric, ...]:
        """Mark the workload's primary metric, which only records of a user's own kind tell."""
        primary = self.workload.serving_metric
        return tuple(replace(metric, primary=metric.name == primary) for metric in metrics)

    def close(self) -> None:
        self.engine.close()

    def _serve(self, prompts: Sequence[Prompt]) -> None:
        generator = self._drive(prompts, lambda text: None)
        generator.run()
        _check_complete(generator)

    def _drive(
        self,
        prompts: Sequence[Prompt],
        heartbeat: Callable[[str], None],
        due: Sequence[float] | None = None,
        engine: InferenceEngine | None = None,
        wait: Wait | None = None,
    ) -> LoadGenerator:
        """Return a load generator for ``prompts``, in a closed loop if ``due`` is None.

        A warm-up of requests that arrive at a rate or from a trace has ``PACED_STREAMS`` clients.
        """
        warms_up = due is None and self.workload.arrivals.is_paced
        return LoadGenerator(
            engine or self.engine,
            self._requests(prompts),
            clients=ClientPool(
                [prompt.session for prompt in prompts],
                due,
                PACED_STREAMS if warms_up else self.workload.concurrency,
                self.workload.stagger_ms / 1e3,
            ),
            clock=self.clock,
            wait=wait or self.wait,
            heartbeat=heartbeat,
            timeline=MemoryTimeline(self.engine, getattr(self.engine, "process_memory", None)),
        )

    def _requests(self, prompts: Sequence[Prompt]) -> list[Request]:
        w = self.workload
        sampling = SamplingParams(
            temperature=w.temperature, top_k=w.top_k, top_p=w.top_p, ignore_eos=w.ignore_eos
        )
        requests = []
        for index, prompt in enumerate(prompts):
            seed = (self.seed << 32) + index
            params = replace(sampling, max_tokens=prompt.max_tokens, seed=seed)
            requests.append(
                Request(prompt.request_id, prompt.token_ids, params, messages=prompt.messages)
            )
        return requests


def _check_complete(generator: LoadGenerator) -> None:
    """Check that served requests have all their tokens, and that at least one was served."""
    for request, entry in zip(generator.requests, generator.entries, strict=True):
        # A server's count of tokens is checked by its client.
        if entry.outcome == "served" and entry.counted is None:
            _check_length(request, entry)
    unserved = [entry for entry in generator.entries if entry.outcome != "served"]
    if generator.requests and len(unserved) == len(generator.requests):
        first = unserved[0]
        error = str(first.error).removeprefix(f"request {first.request_id}: ")
        raise InvalidOutput(f"no request was served; request {first.request_id}: {error}")


def _check_length(request: Request, entry: ServedRequest) -> None:
    expected = request.params.max_tokens
    if entry.finish == "length" and len(entry.tokens) != expected:
        raise InvalidOutput(
            f"request {entry.request_id} ended with {len(entry.tokens)} of {expected} tokens"
        )
    if entry.finish != "length" and request.params.ignore_eos:
        raise InvalidOutput(
            f"request {entry.request_id} ended with finish reason {entry.finish}, although its "
            "length is fixed (workload.ignore_eos=true)"
        )


def _first_repeats(case: CaseRecord) -> dict[str, float]:
    return {metric.name: metric.repeats[0] for metric in case.metrics}


def outputs_of(
    entries: Sequence[ServedRequest], detokenizer: Detokenizer | None = None
) -> dict[str, Any]:
    """Return every request's tokens with their logit margins (5 significant digits).

    With ``detokenizer``, the text of each id is added, and a digest of every request's text for the
    comparison with servers that send only text. The overall digest covers only the token ids. If a
    server sent text for any request, return every request's text instead.
    """
    if any(entry.text is not None for entry in entries):
        return _text_outputs(entries)
    outputs: dict[str, Any] = {
        "kind": "tokens",
        "digest": token_digest((r.request_id, r.tokens) for r in entries),
        "requests": [
            {
                "id": r.request_id,
                "tokens": list(r.tokens),
                "margins": _margins(r.margins),
                "finish": r.finish,
            }
            for r in entries
        ],
    }
    if detokenizer is not None:
        for request in outputs["requests"]:
            text = detokenizer.normalized_text(request["tokens"])
            request["text_digest"] = text_digest(text)
        tokens = (token for r in entries for token in r.tokens)
        if spelled := token_texts(detokenizer.tokenizer, tokens):
            outputs["pieces"] = spelled
    return outputs


def _text_outputs(served: Sequence[ServedRequest]) -> dict[str, Any]:
    """Return every request's text and its digest. Equal texts are weaker evidence than tokens."""
    digests = [(r.request_id, text_digest(r.text or "")) for r in served]
    return {
        "kind": "text",
        "digest": text_digest(repr(digests)),
        "requests": [
            {"id": r.request_id, "text": r.text or "", "text_digest": digest, "finish": r.finish}
            for r, (_, digest) in zip(served, digests, strict=True)
        ],
    }


def _margins(margins: Sequence[float | None]) -> list[float] | None:
    known = [float(f"{margin:.5g}") for margin in margins if margin is not None]
    return known if len(known) == len(margins) else None
