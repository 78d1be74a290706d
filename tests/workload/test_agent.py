from itertools import pairwise

import pytest

from labkit.config import ConfigError, Experiment, from_plain
from labkit.models import resolve, tokenizer
from labkit.workload.sources import agent


def experiment(seed=0, **workload):
    return from_plain(
        Experiment,
        {
            "model": {"shape": {}},
            "workload": {"name": "agent", "prompts": {"source": "agent"}, **workload},
            "ablation": {"arms": {"base": {}}},
            "seed": seed,
        },
    )


def prompts(**options):
    configured = experiment(**options)
    return agent.SOURCE.make(configured, resolve(configured.model))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_turn_begins_with_the_session_s_previous_prompt(seed):
    all_prompts = prompts(seed=seed)
    turns = [
        all_prompts[i : i + agent.SESSIONS] for i in range(0, len(all_prompts), agent.SESSIONS)
    ]
    assert len(turns) == len(agent.QUESTIONS)
    for before, after in pairwise(turns):
        for prompt in after:
            past = [p for p in before if prompt.token_ids[: len(p.token_ids)] == p.token_ids]
            assert len(past) == 1
            assert len(prompt.token_ids) > len(past[0].token_ids) + 20
    assert len({p.token_ids for p in all_prompts}) == len(all_prompts)


def test_sessions_share_only_the_instruction():
    all_prompts = prompts()
    encode = tokenizer.load(resolve(experiment().model).path).encode
    system = tuple(encode(agent.system()))
    assert 400 <= len(system) <= 700
    assert all(p.token_ids[: len(system)] == system for p in all_prompts)
    assert len({p.token_ids[len(system) : len(system) + 32] for p in all_prompts}) == agent.SESSIONS


def test_prompts_depend_on_the_seed_and_a_smaller_count_is_a_prefix():
    assert prompts() == prompts() != prompts(seed=1)
    assert prompts(num_requests=9) == prompts()[:9]
    with pytest.raises(ConfigError, match=r"workload\.num_requests=25: agent has only 24 requests"):
        prompts(num_requests=25)


def test_the_estimate_is_near_and_output_lengths_are_ragged():
    estimated = agent.SOURCE.lengths(experiment())
    all_prompts = prompts()
    assert sum(p for p, _ in estimated) == pytest.approx(
        sum(len(p.token_ids) for p in all_prompts), rel=0.2
    )
    assert [o for _, o in estimated] == [p.max_tokens for p in all_prompts]
    assert min(o for _, o in estimated) < 20 < 30 < max(o for _, o in estimated)
