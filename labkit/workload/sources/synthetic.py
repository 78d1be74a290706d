"""Random token ids: prompts and answers of drawn lengths, shared beginnings, sessions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from labkit.config import Experiment, Prompts, to_plain
from labkit.models import ModelDir
from labkit.workload import request_lengths
from labkit.workload.tokenized_prompts import Prompt, take_first

GROUP, ANSWER = 4, 5  # streams of the seed


class Synthetic:
    """The first ``workload.num_requests`` of ``workload.prompts.requests``.

    Lengths of prompts, lengths of answers and then token ids are drawn, in this order, from one
    stream; so a smaller number is the beginning of a larger. Sessions stand one after the other,
    group by group in turn. A turn begins with the whole turn before and stand-ins for its answer:
    random ids, not what the model says, so that all arms are asked the same.
    """

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        """Name what decides the prompts."""
        prompts = experiment.workload.prompts
        asked = {**to_plain(prompts), "seed": _seed(experiment)}
        return {**asked, "count": len(take_first(experiment, range(prompts.requests)))}

    def make(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        """Draw them below the model's vocabulary size."""
        seed, prompts = _seed(experiment), experiment.workload.prompts
        rng = np.random.default_rng(seed)
        drawn = _drawn(prompts, rng)
        ids = _turns(prompts, drawn, rng, seed, model.vocab_size)
        sessions = [index // prompts.turns for index in range(prompts.requests)]
        return tuple(
            Prompt(
                f"r{index:03d}", next(ids), output, f"s{session:03d}" if prompts.turns > 1 else None
            )
            for index, (session, (_, output)) in enumerate(
                zip(take_first(experiment, sessions), drawn, strict=False)
            )
        )

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        """Return the exact lengths."""
        prompts = experiment.workload.prompts
        drawn = _drawn(prompts, np.random.default_rng(_seed(experiment)))
        found, past = [], 0
        for index, (prompt, output) in enumerate(drawn):
            past = (past if index % prompts.turns else prompts.prefix_tokens) + prompt
            found.append((past, output))
            past += output
        return take_first(experiment, found)


def _seed(experiment: Experiment) -> int:
    own = experiment.workload.prompts.seed
    return experiment.seed if own is None else own


def _drawn(prompts: Prompts, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Draw every request's own prompt tokens, then every answer's."""
    own = request_lengths.draw(prompts.input, rng, prompts.requests)
    return list(zip(own, request_lengths.draw(prompts.output, rng, prompts.requests), strict=True))


def _turns(
    prompts: Prompts,
    drawn: Sequence[tuple[int, int]],
    rng: np.random.Generator,
    seed: int,
    vocab_size: int,
) -> Iterator[tuple[int, ...]]:
    """Yield every request's token ids, drawn when they are asked for."""
    answers = np.random.default_rng([seed, ANSWER])
    past: list[int] = []
    for index, (prompt, output) in enumerate(drawn):
        if index % prompts.turns == 0:
            group = index // prompts.turns % prompts.prefix_groups
            shared = np.random.default_rng([seed, GROUP, group])
            past = shared.integers(0, vocab_size, prompts.prefix_tokens).tolist()
        past += rng.integers(0, vocab_size, prompt).tolist()
        yield tuple(past)
        if prompts.turns > 1:
            past += answers.integers(0, vocab_size, output).tolist()


SOURCE = Synthetic()
