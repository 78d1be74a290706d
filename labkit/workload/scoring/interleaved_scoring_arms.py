"""Scoring in turns: in every round all arms score the same windows, in random order.

Before a round the baseline scores its windows once more, unmeasured. These log probabilities are
the reference of the round, so only one round's reference is in memory at a time. The baseline's
process sends the ``SENT_TOP`` likeliest tokens of each position to arms in other processes: 1,035
bytes per position in base64, about 1 MB for a round of 1,024 tokens.
After a round, each arm retains of every token its log probability (4 bytes) and, in windows of 256
tokens, 3 bytes of its window's score.
"""

from __future__ import annotations

import base64
import hashlib
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.config import MAX_PROMPT_LOGPROBS, Workload
from labkit.engine import InferenceEngine, Request, SamplingParams
from labkit.engine.engine_protocol import EngineError, PromptLogprobs, Remote
from labkit.models.tokenizer import Tokenizer
from labkit.records import CaseRecord, counter_registry
from labkit.records.kl_histogram import encode_histogram
from labkit.records.metric_registry import measured
from labkit.workload.output_digest import array_outputs
from labkit.workload.scoring.prediction_distance import PredictionDistance, prediction_distance
from labkit.workload.tokenized_prompt import Prompt
from labkit.workload.turn_order import Part, TurnOrder
from labkit.workload.workload_protocols import InvalidOutput, Measurement, TurnContext

# Tokens per position whose log probabilities are compared one by one. With 64 the KL divergence of
# 4-bit weights (smollm2, vocabulary 49,152) is 20 % too small, with 1,024 5 %, with 4,096 1.3 %.
REFERENCE_TOP = 4096
SENT_TOP = 64  # those that are sent to other processes, with ids and float64 log probabilities
# The arrays of the baseline that ``prediction_distance`` needs, as they are sent (base64).
SENT_ARRAYS = {"tokens": "<f8", "top": "<f8", "top_ids": "<i4"}
NUM_WORST = 10  # number of worst places that are recorded with their text
CONTEXT_TOKENS = 12  # before and after such a place
WAIT_S = 0.05  # maximum wait for a server's response in one step
OTHER_WINDOWS = (
    "the arm and the baseline score different windows: workload.kind=scoring compares arms whose "
    "models have the same tokenizer, and that have the same workload options"
)


@dataclass(frozen=True, slots=True)
class WindowScore:
    """An arm's score of one window, as the record holds it.

    Log likelihoods and KL divergences from the baseline are sums in nats. All scores stay in memory
    during a run, and dicts would take more of it.
    """

    window: str  # the window's id
    tokens: int  # that are predicted
    nll: float
    kl_sum: float
    kl_histogram: str  # :mod:`labkit.records.kl_histogram`
    same_top1: int
    probability_change_squared: float


@dataclass(slots=True)
class ScoringArm:
    """One arm: its engine, and what it has scored so far.

    ``logprobs`` holds the log probabilities of all tokens so far in one block of memory, because
    many small arrays would keep the memory of each round's large arrays from being used again.
    ``worst``: positions where the arm's prediction is far from the baseline's, with their text, as
    the record holds them. ``unmeasured``: what references have added to the engine's counters.
    """

    engine: InferenceEngine
    workload: Workload
    tokenizer: Tokenizer
    rates: list[float] = field(default_factory=list)  # tokens per second, by round
    windows: list[WindowScore] = field(default_factory=list)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    worst: list[dict[str, Any]] = field(default_factory=list)
    unmeasured: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def server(self) -> Remote | None:
        return self.engine if isinstance(self.engine, Remote) else None

    def score(
        self, windows: Sequence[Prompt], top: int, ids: Sequence[NDArray[np.int32]] | None = None
    ) -> list[PromptLogprobs]:
        """Score windows together; return their log probabilities in the same order.

        ``top``: the number of likeliest tokens to return per position. ``ids``: for each window,
        token ids per position whose log probabilities are returned too. A server returns its
        ``MAX_PROMPT_LOGPROBS`` likeliest tokens instead. Raises ``InvalidOutput`` if the engine
        refused a window, or returned no log probabilities for it.
        """
        results: dict[str, PromptLogprobs] = {}
        server = self.server
        if server is not None:
            top, ids = MAX_PROMPT_LOGPROBS, None
        for index, window in enumerate(windows):
            params = SamplingParams(
                prompt_logprobs=top,
                prompt_logprob_ids=None if ids is None else ids[index],
                max_tokens=1,
                ignore_eos=True,
            )
            self.engine.submit(Request(window.request_id, window.token_ids, params))
        while self.engine.has_work():
            if server is not None:
                server.wait(WAIT_S)
            for event in self.engine.step():
                if event.error is not None:
                    raise InvalidOutput(event.error)
                if event.prompt_logprobs is not None:
                    results[event.request_id] = event.prompt_logprobs
        missing = next((w.request_id for w in windows if w.request_id not in results), None)
        if missing is not None:
            raise InvalidOutput(f"{missing}: the engine returned no log probabilities")
        return [results[window.request_id] for window in windows]

    def reference(self, windows: Sequence[Prompt], top: int) -> list[PromptLogprobs]:
        """Score windows like ``score``, but keep the work out of ``counters``."""
        before = self.engine.counters()
        scored = self.score(windows, top)
        for name, value in self.engine.counters().items():
            self.unmeasured[name] += value - before.get(name, 0.0)
        return scored

    def counters(self) -> dict[str, float]:
        """Return the counters of the measured passes; levels, such as peaks, are of all passes."""
        return {
            name: value if counter_registry.is_level(name) else value - self.unmeasured[name]
            for name, value in self.engine.counters().items()
        }

    def add(
        self, window: Prompt, baseline: PromptLogprobs, scored: PromptLogprobs
    ) -> PredictionDistance:
        """Compare the arm's scores of a window with the baseline's, and record the result.

        Raises ``InvalidOutput`` if a KL divergence is infinite: the arm gives a token that the
        baseline predicts no chance.
        """
        distance = prediction_distance(baseline, scored)
        try:
            histogram = encode_histogram(distance.kl)
        except ValueError as error:
            raise InvalidOutput(f"{window.request_id}: {error}") from None
        score = WindowScore(
            window.request_id,
            len(distance.kl),
            -float(distance.logprobs.sum()),
            float(distance.kl.sum()),
            histogram,
            int(distance.same_top1.sum()),
            float((distance.probability_change**2).sum()),
        )
        self.windows.append(score)
        self.logprobs.frombytes(distance.logprobs.astype(np.float32).tobytes())
        self._add_worst(window, distance, baseline, scored)
        return distance

    def _add_worst(
        self,
        window: Prompt,
        distance: PredictionDistance,
        baseline: PromptLogprobs,
        scored: PromptLogprobs,
    ) -> None:
        text, tokens = self.tokenizer.decode, window.token_ids
        least = self.worst[-1]["kl"] if len(self.worst) == NUM_WORST else 0.0
        for row in np.argsort(-distance.kl)[:NUM_WORST].tolist():
            if distance.kl[row] <= least:
                break
            at = row + 1
            place = {
                "kl": float(distance.kl[row]),
                "window": window.request_id,
                "position": at,
                "before": text(tokens[max(0, at - CONTEXT_TOKENS) : at]),
                "token": text(tokens[at : at + 1]),
                "after": text(tokens[at + 1 : at + 1 + CONTEXT_TOKENS]),
                "baseline_top1": text([int(baseline.top_ids[row, 0])]),
                "arm_top1": text([int(scored.top_ids[row, 0])]),
            }
            self.worst.append(place)
        self.worst = sorted(self.worst, key=lambda place: -place["kl"])[:NUM_WORST]


class InterleavedScoring:
    """Arms that score the same windows in turns; see ``InterleavedArms``.

    ``arms``: the arms. ``close`` closes their engines. ``windows``: the windows, each with an id of
    its own. ``context``: see ``TurnContext``. Its ``baseline`` is the arm that the others are
    compared with, or None if that arm is in another process.
    """

    def __init__(
        self, arms: Sequence[ScoringArm], windows: Sequence[Prompt], context: TurnContext
    ) -> None:
        self._arms = tuple(arms)
        self._windows = windows
        self._context = context
        self._order = context.turn_order
        self._top = SENT_TOP if self._order.other_processes else REFERENCE_TOP
        self._reference_width = 0  # tokens per position
        self._rest: list[float] = []  # the mean probability outside the reference, by window

    def warm_up(self) -> None:
        """Let every arm score the first ``workload.warmup`` windows, unmeasured."""
        for index, arm in enumerate(self._arms):
            with self._context.turn(index):
                arm.score(self._windows[: arm.workload.warmup], self._top)
                arm.engine.reset_counters()

    prepare = warm_up

    def measure(self, heartbeat: Callable[[str], None]) -> list[Measurement]:
        """Score all windows in rounds of ``workload.concurrency``; see ``InterleavedArms``.

        Raises ``EngineError`` if the baseline has a process of its own that does not take turns
        with this one.
        """
        if self._context.baseline is None and self._context.granted is None:
            raise EngineError(
                "workload.kind=scoring needs the baseline in the same process or in a process that "
                "takes turns with this one; this process has neither"
            )
        noun = "window" if len(self._windows) == 1 else "windows"
        together = self._arms[0].workload.concurrency or len(self._windows)
        for start in range(0, len(self._windows), together):
            self._round(tuple(self._windows[start : start + together]))
            done = min(start + together, len(self._windows))
            heartbeat(f"{done} of {len(self._windows)} {noun}")
        return [self._measurement(arm) for arm in self._arms]

    def _round(self, windows: Sequence[Prompt]) -> None:
        reference = self._reference(windows)
        self._rest += [
            max(0.0, float(1 - np.exp(part.top).sum(axis=1).mean())) for part in reference
        ]
        ids = [part.top_ids for part in reference]
        self._reference_width = ids[0].shape[1]
        tokens = sum(len(window.token_ids) for window in windows)
        turns = Part(windows[0].request_id, 1, tuple(range(len(self._arms))))
        for now in self._order.rounds([turns]):
            for index, _ in now.turns:
                arm = self._arms[index]
                with self._context.turn(index):
                    begin = time.perf_counter()
                    scored = arm.score(windows, 1, ids)
                    arm.rates.append(tokens / (time.perf_counter() - begin))
                    # In the turn, so that an invalid output is this arm's failure.
                    for window, base, part in zip(windows, reference, scored, strict=True):
                        arm.add(window, base, part)

    def _reference(self, windows: Sequence[Prompt]) -> list[PromptLogprobs]:
        """Return the baseline's log probabilities of a round's windows.

        If arms have processes of their own, every arm scores the windows. If only the baseline did,
        only its caches and threads would be warm in the turns that follow.
        """
        baseline, alone = self._context.baseline, self._order.other_processes
        index = 0 if alone else baseline
        assert index is not None, "checked by measure"
        with self._context.turn(index):
            own = self._arms[index].reference(windows, self._top)
        if not alone:
            return own
        return exchange_reference(self._order, windows, None if baseline is None else own)

    def _measurement(self, arm: ScoringArm) -> Measurement:
        logprobs = np.frombuffer(arm.logprobs, np.float32)[:, None, None]
        outputs = array_outputs(logprobs)
        # How many tokens per position are compared one by one; of a server, at most.
        compared = self._top if arm.server is None else MAX_PROMPT_LOGPROBS
        notes = {
            "scoring": {
                "reference_top": min(compared, self._reference_width),
                "reference_rest": float(np.mean(self._rest)),
                "windows": [asdict(score) for score in arm.windows],
                "worst": arm.worst,
            }
        }
        metric = measured("total_tok_s", tuple(arm.rates), primary=True)
        case = CaseRecord("all", metrics=(metric,), outputs=outputs, notes=notes)
        values = {outputs["digest"]: logprobs}
        return Measurement((case,), arm.counters(), values=values)

    def close(self) -> None:
        for arm in self._arms:
            arm.engine.close()


def exchange_reference(
    order: TurnOrder, windows: Sequence[Prompt], own: Sequence[PromptLogprobs] | None
) -> list[PromptLogprobs]:
    """Exchange messages between the arms' processes; return the baseline's log probabilities.

    ``windows``: the windows of the round. ``own``: the log probabilities of this process's arm if
    this arm is the baseline, else None. Raises ``InvalidOutput`` if the baseline's process has
    ended, or it scores other windows.
    """
    text = repr([(window.request_id, window.token_ids) for window in windows])
    encoded = None if own is None else [_encoded(part) for part in own]
    value = {"windows": hashlib.sha256(text.encode()).hexdigest(), "reference": encoded}
    gathered, _ = order.gather([value])
    sent = next((value for value in gathered if value["reference"] is not None), None)
    if sent is None:
        raise InvalidOutput("the baseline's process has ended, so there is no reference")
    if sent["windows"] != value["windows"]:
        raise InvalidOutput(OTHER_WINDOWS)
    return [_decoded(part) for part in sent["reference"]]


def _encoded(part: PromptLogprobs) -> dict[str, str]:
    return {
        name: base64.b64encode(getattr(part, name).astype(dtype).tobytes()).decode()
        for name, dtype in SENT_ARRAYS.items()
    }


def _decoded(part: dict[str, str]) -> PromptLogprobs:
    tokens, top, top_ids = (
        np.frombuffer(base64.b64decode(part[name]), dtype) for name, dtype in SENT_ARRAYS.items()
    )
    rows = len(tokens)
    return PromptLogprobs(
        tokens, top_ids.reshape(rows, -1), top.reshape(rows, -1), np.zeros((rows, 0))
    )
