import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from labkit import workload as workloads
from labkit.config import ConfigError, Experiment, from_plain
from labkit.models import ModelDir, resolve, tokenizer
from labkit.workload import chat, prompts, ragged
from labkit.workload.prompts import Prompt
from labkit.workload.requests import RequestKind


def experiment(kind="chat", seed=0, engine=None, **workload):
    return from_plain(
        Experiment,
        {
            "engine": engine or {},
            "model": {"shape": {}},
            "workload": {"name": kind, "kind": kind, **workload},
            "ablation": {"arms": {"base": {}}},
            "seed": seed,
        },
    )


def chat_prompts(**options):
    asked = experiment(**options)
    return chat.ChatSource().make(asked, resolve(asked.model))


def test_ragged_is_the_synthetic_chat_of_the_notes():
    drawn = ragged.draw(4096)
    assert sum(len(p.token_ids) for p in drawn) == 10_326
    assert sum(p.max_tokens for p in drawn) == 2_899
    rng = np.random.default_rng(0)
    rng.lognormal(np.log(300), 0.8, 32)
    rng.lognormal(np.log(60), 0.7, 32)
    assert [t for p in drawn for t in p.token_ids] == rng.integers(0, 4096, 10_326).tolist()
    assert ragged.draw(4096) == drawn


def test_ragged_takes_the_first_so_many_and_never_more_than_there_are():
    source = ragged.RaggedSource()
    model = resolve(experiment("ragged").model)
    assert source.make(experiment("ragged", num_requests=5), model) == ragged.draw(4096)[:5]
    with pytest.raises(ConfigError, match=r"workload\.num_requests=33: ragged has 32"):
        source.make(experiment("ragged", num_requests=33), model)


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [("uniform", [(128, 128)] * 16), ("case_study", [(3000, 64), (500, 64), (10, 64)])],
)
def test_requests_of_stated_lengths_have_them_and_ids_of_their_own(kind, lengths):
    asked = experiment(kind, seed=7)
    model = resolve(asked.model)
    source = workloads.kind_of(asked)._source
    made = source.make(asked, model)
    assert [(len(p.token_ids), p.max_tokens) for p in made] == lengths == [*source.lengths(asked)]
    assert len({p.token_ids for p in made}) == len({p.request_id for p in made}) == len(made)
    assert all(0 <= token < 4096 for p in made for token in p.token_ids)
    assert source.make(experiment(kind), model) == made
    assert source.make(experiment(kind, num_requests=2), model) == made[:2]
    assert source.identity(experiment(kind, num_requests=2)) != source.identity(asked)
    with pytest.raises(ConfigError, match=rf"workload\.num_requests=17: {kind} has {len(made)}"):
        source.make(experiment(kind, num_requests=17), model)


def test_chat_prompts_run_from_ten_to_fifteen_hundred_tokens():
    made = chat_prompts()
    lengths = sorted(len(p.token_ids) for p in made)
    assert len(made) == 64
    assert 8 <= lengths[0] <= 14
    assert 1400 <= lengths[-1] <= 1600
    assert sum(n < 100 for n in lengths) >= 16
    assert sum(100 <= n < 700 for n in lengths) >= 16
    assert sum(n >= 1000 for n in lengths) >= 16
    assert len({p.token_ids for p in made}) == 64
    assert all(0 <= t < 4096 for p in made for t in p.token_ids)


def test_chat_prompts_are_the_questions_in_the_seed_s_order():
    made = chat_prompts(seed=7, num_requests=12)
    decode = tokenizer.load(resolve(experiment().model).path).decode
    plan = chat.plan(7, 12)
    assert [p.request_id for p in made] == [f"r{i:03d}" for i in range(12)]
    for prompt, (question, output) in zip(made, plan, strict=True):
        assert decode(prompt.token_ids) == chat.questions()[question].prompt
        assert prompt.max_tokens == output
    with pytest.raises(ConfigError, match=r"workload\.num_requests=65: chat has 64"):
        chat_prompts(num_requests=65)


class CountingSource:
    """Two small prompts, and how often they were made."""

    def __init__(self):
        self.made = 0

    def identity(self, experiment):
        return {"kind": "test", "seed": experiment.seed}

    def make(self, experiment, model):
        self.made += 1
        return (Prompt("r0", (1, 2, 3), 4), Prompt("r1", (9,), 20))

    def lengths(self, experiment):
        return [(3, 4), (1, 20)]


@pytest.fixture
def workload_cache(tmp_path, monkeypatch):
    """An empty place for prompts, with the shared model cache left where it is."""
    monkeypatch.setattr(prompts.cache, "root", lambda: tmp_path)
    return tmp_path / "workloads"


def test_prompts_are_made_once_and_named_by_what_decides_them(workload_cache):
    source = CountingSource()
    kind = RequestKind(source)
    model = ModelDir(Path("nowhere"), "a digest", "test", 64, ())
    first = kind._prompts(experiment(), model)
    assert kind._prompts(experiment(), model) == first and source.made == 1
    kind._prompts(experiment(concurrency=3), model)
    assert source.made == 1
    kind._prompts(experiment(seed=1), model)
    assert source.made == 2
    kind._prompts(experiment(), replace(model, digest="another"))
    assert source.made == 3
    assert len(list(workload_cache.glob("*.json"))) == 3


@pytest.mark.parametrize("damage", [b"", b'{"requests": [{"id": "r0"}]}', b'{"requests": 3}'])
def test_a_damaged_cache_file_is_made_again(workload_cache, damage):
    def make():
        return (Prompt("r0", (1, 2), 3),)

    key = prompts.prompt_key({"a": 1})
    prompts.stored(key, make)
    path = workload_cache / f"{key}.json"
    path.write_bytes(damage)
    assert prompts.stored(key, make) == make()
    assert json.loads(path.read_bytes())["requests"][0]["token_ids"] == [1, 2]


def test_a_prompt_needs_tokens():
    with pytest.raises(ValueError, match="request r0"):
        Prompt("r0", (), 3)


def test_prepare_refuses_a_pool_in_which_a_request_could_never_be_served():
    largest = max(ragged.draw(4096), key=lambda p: len(p.token_ids) + p.max_tokens)
    tokens = len(largest.token_ids) + largest.max_tokens - 1
    needed = -(-tokens // 16) + 1
    workloads.prepare(experiment("ragged", engine={"budget": {"blocks": needed}}))
    with pytest.raises(ConfigError, match=f"budget.blocks={needed - 1}: .* needs {needed} blocks"):
        workloads.prepare(experiment("ragged", engine={"budget": {"blocks": needed - 1}}))
    with pytest.raises(ConfigError, match=r"budget.bytes=1048576 \(\d+ KV blocks\)"):
        workloads.prepare(experiment("ragged", engine={"budget": {"bytes": 1 << 20}}))
    with pytest.raises(ConfigError, match="resolver=identity"):
        workloads.prepare(experiment("ragged", engine={"attention": {"resolver": "identity"}}))


def test_the_estimate_counts_tokens_and_needs_no_model(workload_cache):
    a, b, c = (
        workloads.estimate(experiment("ragged", num_requests=n, concurrency=m))
        for n, m in ((32, 16), (8, 16), (32, 1))
    )
    assert a.seconds > b.seconds and c.seconds > a.seconds and a.bytes > c.bytes
    guessed = [prompt for prompt, _ in chat.ChatSource().lengths(experiment())]
    assert sum(guessed) == pytest.approx(sum(len(p.token_ids) for p in chat_prompts()), rel=0.2)
    assert not workload_cache.exists()


def test_preparing_imports_neither_mlx_nor_an_engine_but_what_its_memory_needs():
    code = (
        "import sys; from labkit import workload; from tests_experiment import made; "
        "[workload.prepare(e) or workload.estimate(e) for e in made]; "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('mlx', 'numba', 'hydra') "
        "or m.startswith('labkit.engine.') and not m.removeprefix('labkit.engine.').startswith("
        "('budget', 'dtype', 'plugins')) and m not in ('labkit.engine.attention', "
        "'labkit.engine.attention.spec', 'labkit.engine.attention.elements')]; "
        "print(bad)"
    )
    source = (
        "from labkit.config import Experiment, from_plain\n"
        "made = [from_plain(Experiment, {'model': {'shape': {}}, 'workload': w, "
        "'ablation': {'arms': {'base': {}}}}) for w in ({'kind': 'chat'}, {'kind': 'ragged'}, "
        "{'kind': 'uniform'}, {'kind': 'agent'}, "
        "{'kind': 'kernel', 'cases': [{'name': 'd', 'decode': 1, 'context': 1}]})]\n"
    )
    code = code.replace("from tests_experiment import made; ", f"exec({source!r}); ")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_requests_are_submitted_in_an_order_that_mixes_lengths():
    lengths = [len(p.token_ids) for p in chat_prompts()]
    turns = sum((b > a) != (c > b) for (a, b), (_, c) in pairwise(pairwise(lengths)))
    assert turns > 30
