"""Prompts of random token ids, with drawn lengths, shared prefixes and sessions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from labkit.config import Experiment, Prompts, to_plain
from labkit.models import ModelDir
from labkit.workload.tokenized_prompt import Prompt, draw_lengths, prompts_seed, take_first

GROUP, ANSWER = 4, 5  # numbers of the random streams of shared prefixes and of answers


class SyntheticSource:
    """Random prompts: the first ``workload.num_requests`` of ``workload.prompts.requests``.

    All prompt lengths, then all output lengths, then the token ids are drawn from one stream. So
    ``workload.num_requests`` selects the first prompts of a list that does not depend on it. All
    turns of a session come before those of the next session. The sessions' shared prefixes
    alternate between the prefix groups. A turn's prompt begins with the previous turn's prompt,
    followed by random ids in place of the model's answer, so that all arms get the same prompts.
    """

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        prompts = experiment.workload.prompts
        options = {**to_plain(prompts), "seed": prompts_seed(experiment)}
        return {**options, "count": len(take_first(experiment, range(prompts.requests)))}

    def make(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        seed, prompts = prompts_seed(experiment), experiment.workload.prompts
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

    def num_sessions(self, experiment: Experiment) -> int:
        """Return the number of sessions; the last may have fewer turns than the others."""
        prompts = experiment.workload.prompts
        return len(take_first(experiment, range(prompts.requests))[:: prompts.turns])

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        prompts = experiment.workload.prompts
        drawn = _drawn(prompts, np.random.default_rng(prompts_seed(experiment)))
        lengths, past = [], 0
        for index, (prompt, output) in enumerate(drawn):
            past = (past if index % prompts.turns else prompts.prefix_tokens) + prompt
            lengths.append((past, output))
            past += output
        return take_first(experiment, lengths)


def _drawn(prompts: Prompts, rng: np.random.Generator) -> list[tuple[int, int]]:
    own = draw_lengths(prompts.input, rng, prompts.requests)
    return list(zip(own, draw_lengths(prompts.output, rng, prompts.requests), strict=True))


def _turns(
    prompts: Prompts,
    drawn: Sequence[tuple[int, int]],
    rng: np.random.Generator,
    seed: int,
    vocab_size: int,
) -> Iterator[tuple[int, ...]]:
    """Yield each request's prompt token ids. Ids are drawn only as the iterator advances."""
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


SOURCE = SyntheticSource()
