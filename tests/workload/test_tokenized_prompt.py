import hashlib
import importlib
import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from labkit import workload as workloads
from labkit.config import ConfigError, Experiment, from_plain
from labkit.engine import user_classes
from labkit.models import ModelDir, resolve, tokenizer
from labkit.workload import prompt_cache
from labkit.workload.requests import request_workload_kind
from labkit.workload.requests.request_workload_kind import RequestKind
from labkit.workload.sources import chat_and_agent, source_of
from labkit.workload.tokenized_prompt import Prompt


def experiment(seed=0, engine=None, **workload):
    plain = {"model": {"shape": {}}, "ablation": {"arms": {"base": {}}}, "seed": seed}
    workload = {"name": "chat", "prompts": {"source": "chat"}, **workload}
    return from_plain(Experiment, {**plain, "engine": engine or {}, "workload": workload})


def chat_prompts(**options):
    configured = experiment(**options)
    return chat_and_agent.CHAT.make(configured, resolve(configured.model))


def make_prompts(experiment):
    return source_of(experiment).make(experiment, resolve(experiment.model))


# SHA-256 over ids, token ids and output lengths, as they were when each workload was a module.
FORMER = {
    ("ragged", None, 0): "d30e3ad80d545e65bbc8c5039d293dbe",
    ("ragged", None, 7): "d30e3ad80d545e65bbc8c5039d293dbe",
    ("ragged", 2, 0): "3a582609a9cd985b26bf536cb56c9fa1",
    ("uniform", None, 0): "010bc1010736d08c778a10caf417bee6",
    ("uniform", 2, 7): "09eb78d66ae56e59f15da8559facbd4d",
    ("case_study", None, 0): "e830b0c3759c8dcd86697ed024d90686",
    ("case_study", 2, 7): "dac98c951584dcca5607863152fbcf7e",
    ("waste", None, 0): "99285f87081ae7fad90a6262c362a943",
    ("waste", 2, 7): "cdb0716fe9fadc06a88072c3a496eabc",
    ("chat", None, 0): "202d9e37f2cba7905eab4e1c9cbb0fcd",
    ("chat", 2, 7): "546cbaec42d0de6a5adca9092c20ca2c",
    ("agent", None, 0): "86969a57d7e8872b2a923c07b733b2f1",
    ("agent", 2, 7): "99eef853aaaad9e14e2c76def16eb8fc",
}


@pytest.mark.parametrize(("name", "count", "seed"), FORMER)
def test_the_prompts_of_packaged_workloads_never_change(compose_experiment, name, count, seed):
    overrides = [] if count is None else [f"workload.num_requests={count}"]
    prompts = make_prompts(compose_experiment(f"workload={name}", f"seed={seed}", *overrides))
    text = json.dumps([[p.request_id, list(p.token_ids), p.max_tokens] for p in prompts])
    assert hashlib.sha256(text.encode()).hexdigest()[:32] == FORMER[name, count, seed]


def test_derived_workload_files_change_only_their_own_keys(compose_experiment):
    whole = make_prompts(compose_experiment("workload=ragged"))
    assert make_prompts(compose_experiment("workload=ragged_8")) == whole[:8]
    assert make_prompts(compose_experiment("workload=burst")) == whole
    assert (
        make_prompts(compose_experiment("workload=uniform_4"))
        == make_prompts(compose_experiment("workload=uniform"))[:4]
    )
    assert compose_experiment("workload=burst").workload.concurrency == 32
    assert compose_experiment("workload=ragged_8").workload.name == "ragged_8"


def test_ragged_is_the_synthetic_chat_of_the_notes(compose_experiment):
    drawn = make_prompts(compose_experiment("workload=ragged"))
    assert sum(len(p.token_ids) for p in drawn) == 10_326
    assert sum(p.max_tokens for p in drawn) == 2_899


@pytest.mark.parametrize("name", ["ragged", "uniform", "case_study", "waste", "agent"])
def test_num_requests_takes_the_first_requests_and_is_limited(compose_experiment, name):
    experiment = compose_experiment(f"workload={name}")
    whole = make_prompts(experiment)
    source = source_of(experiment)
    few = replace(experiment, workload=replace(experiment.workload, num_requests=2))
    assert make_prompts(few) == whole[:2] and source.lengths(few) == source.lengths(experiment)[:2]
    assert source.identity(few) != source.identity(experiment)
    over = f"workload.num_requests={len(whole) + 1}"
    with pytest.raises(ConfigError, match=rf"{over}: {name} has only {len(whole)} requests"):
        compose_experiment(f"workload={name}", over)


def test_chat_prompts_run_from_ten_to_fifteen_hundred_tokens():
    prompts = chat_prompts()
    lengths = sorted(len(p.token_ids) for p in prompts)
    assert len(prompts) == 64
    assert 8 <= lengths[0] <= 14
    assert 1400 <= lengths[-1] <= 1600
    assert sum(n < 100 for n in lengths) >= 16
    assert sum(100 <= n < 700 for n in lengths) >= 16
    assert sum(n >= 1000 for n in lengths) >= 16
    assert len({p.token_ids for p in prompts}) == 64
    assert all(0 <= t < 4096 for p in prompts for t in p.token_ids)


def test_chat_prompts_are_the_questions_in_the_seed_s_order():
    prompts = chat_prompts(seed=7, num_requests=12)
    decode = tokenizer.load(resolve(experiment().model).path).decode
    plan = chat_and_agent.plan(7, 12)
    assert [p.request_id for p in prompts] == [f"r{i:03d}" for i in range(12)]
    for prompt, (question, output) in zip(prompts, plan, strict=True):
        assert decode(prompt.token_ids) == chat_and_agent.questions()[question].prompt
        assert prompt.max_tokens == output
    with pytest.raises(ConfigError, match=r"workload\.num_requests=65: chat has only 64 questions"):
        chat_prompts(num_requests=65)


class CountingSource:
    """Two small prompts, and how often they were made."""

    def __init__(self):
        self.num_made = 0

    def identity(self, experiment):
        return {"kind": "test", "seed": experiment.seed, "model": "of the source"}

    def make(self, experiment, model):
        self.num_made += 1
        return (Prompt("r0", (1, 2, 3), 4), Prompt("r1", (9,), 20))

    def lengths(self, experiment):
        return [(3, 4), (1, 20)]


@pytest.fixture
def workload_cache(tmp_path, monkeypatch):
    """An empty place for prompts, with the shared model cache left where it is."""
    monkeypatch.setattr(prompt_cache.cache_entries, "root", lambda: tmp_path)
    return tmp_path / "workloads"


def test_prompts_are_made_once_and_cached_by_everything_they_depend_on(workload_cache):
    source = CountingSource()
    kind = RequestKind(source)
    model = ModelDir(Path("nowhere"), "a digest", "test", 64, ())
    first = kind._prompts(experiment(), model)
    assert kind._prompts(experiment(), model) == first and source.num_made == 1
    kind._prompts(experiment(concurrency=3), model)
    assert source.num_made == 1
    kind._prompts(experiment(seed=1), model)
    assert source.num_made == 2
    kind._prompts(experiment(), replace(model, digest="another"))
    assert source.num_made == 3
    assert len(list(workload_cache.glob("*.json"))) == 3


def test_num_requests_takes_the_first_prompts_of_an_own_source(workload_cache):
    source = CountingSource()
    kind, model = RequestKind(source), ModelDir(Path("nowhere"), "a digest", "test", 64, ())
    whole = kind._prompts(experiment(), model)
    few = experiment(num_requests=1)
    assert kind._prompts(few, model) == whole[:1] and kind.units(few) == 1
    assert source.num_made == 1
    assert kind.estimate(few).seconds < kind.estimate(experiment()).seconds
    with pytest.raises(ConfigError, match=r"workload\.num_requests=3: chat has only 2 requests"):
        kind.check(experiment(num_requests=3))


OWN_KINDS = """
from own_tokens import TOKENS
from labkit.workload.requests.request_workload_kind import RequestKind
from labkit.workload.tokenized_prompt import Prompt


class Source:
    def __init__(self, first): self.first = first
    def identity(self, experiment): return {}
    def make(self, experiment, model): return (Prompt("r0", (self.first, *TOKENS), 1),)


class One(RequestKind):
    name = "one"
    def __init__(self): super().__init__(Source(1))


class Two(RequestKind):
    name = "two"
    def __init__(self): super().__init__(Source(2))
"""


def test_prompts_of_an_own_class_are_those_of_its_code_now(workload_cache, tmp_path, monkeypatch):
    """Two classes have the same identity, and a module beside theirs is edited."""
    (tmp_path / "own_kinds.py").write_text(OWN_KINDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = ModelDir(Path("nowhere"), "a digest", "test", 64, ())

    def ids(name):
        configured = experiment(kind=f"own_kinds:{name}")
        (prompt,) = workloads.kind_of(configured)._prompts(configured, model)
        return prompt.token_ids

    for tokens in ((5,), (6, 7)):
        (tmp_path / "own_tokens.py").write_text(f"TOKENS = {tokens}\n")
        for module in ("own_kinds", "own_tokens"):
            sys.modules.pop(module, None)
        importlib.invalidate_caches()
        assert [ids("One"), ids("Two")] == [(1, *tokens), (2, *tokens)]
        assert ids("One") == (1, *tokens)
    assert len(list(workload_cache.glob("*.json"))) == 4


def test_prompts_of_an_installed_class_are_those_of_its_version(monkeypatch):
    identities = []
    for version in ("1.2", "1.3"):
        versions = {"plug-in": version}
        monkeypatch.setattr(user_classes, "installed_versions", lambda module, v=versions: v)
        identities.append(request_workload_kind._class_identity("json:Kind"))
    assert identities[0] != identities[1] and "plug-in" in str(identities[0])


RAGGED = {
    "name": "ragged",
    "prompts": {
        "source": "synthetic",
        "requests": 32,
        "input": {"kind": "lognormal", "median": 300, "sigma": 0.8, "low": 16, "high": 1500},
        "output": {"kind": "lognormal", "median": 60, "sigma": 0.7, "low": 8, "high": 256},
        "seed": 0,
    },
}


def test_prepare_refuses_a_pool_in_which_a_request_could_never_be_served():
    tokens = max(map(sum, source_of(experiment(**RAGGED)).lengths(experiment(**RAGGED)))) - 1
    needed = -(-tokens // 16) + 1
    workloads.prepare(experiment(**RAGGED, engine={"budget": {"blocks": needed}}))
    with pytest.raises(
        ConfigError, match=f"budget.blocks={needed - 1} .* needs {needed} KV blocks"
    ):
        workloads.prepare(experiment(**RAGGED, engine={"budget": {"blocks": needed - 1}}))
    with pytest.raises(ConfigError, match=r"budget.bytes=1048576 \(\d+ KV blocks\)"):
        workloads.prepare(experiment(**RAGGED, engine={"budget": {"bytes": 1 << 20}}))
    with pytest.raises(ConfigError, match="resolver=identity"):
        workloads.prepare(experiment(**RAGGED, engine={"attention": {"resolver": "identity"}}))


def test_prepare_refuses_a_request_that_is_longer_than_the_models_context(monkeypatch):
    tokens = max(map(sum, source_of(experiment(**RAGGED)).lengths(experiment(**RAGGED))))
    plain = request_workload_kind.resolve
    for context, refused in ((tokens, False), (tokens - 1, True)):
        monkeypatch.setattr(
            request_workload_kind, "resolve", lambda m, n=context: replace(plain(m), max_context=n)
        )
        message = rf"has a context of {context} tokens: request r\d+ of workload=ragged has \d+"
        with pytest.raises(ConfigError, match=message) if refused else nullcontext():
            workloads.prepare(experiment(**RAGGED))


def test_the_estimate_counts_tokens_and_needs_no_model(workload_cache):
    a, b, c = (
        workloads.estimate(experiment(**RAGGED, num_requests=n, concurrency=m))
        for n, m in ((32, 16), (8, 16), (32, 1))
    )
    assert a.seconds > b.seconds and c.seconds > a.seconds and a.bytes > c.bytes
    guessed = [prompt for prompt, _ in chat_and_agent.CHAT.lengths(experiment())]
    assert sum(guessed) == pytest.approx(sum(len(p.token_ids) for p in chat_prompts()), rel=0.2)
    assert not workload_cache.exists()


def test_preparing_imports_neither_mlx_nor_an_engine():
    code = (
        "import sys; from labkit import workload; from tests_experiment import experiments; "
        "[workload.prepare(e) or workload.estimate(e) for e in experiments]; "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('mlx', 'numba', 'hydra') "
        "or m.startswith('labkit.engine.') and not m.removeprefix('labkit.engine.').startswith("
        "('memory_budget', 'model.dtype_resolution', 'user_classes')) "
        "and m != 'labkit.engine.model']; print(bad)"
    )
    source = (
        "from labkit.config import Experiment, from_plain\n"
        "experiments = [from_plain(Experiment, {'model': {'shape': {}}, 'workload': w, "
        "'ablation': {'arms': {'base': {}}}}) for w in ({}, {'prompts': {'source': 'synthetic'}}, "
        "{'prompts': {'source': 'listed', 'listed': [{'prompt': 'Hello'}]}}, "
        "{'prompts': {'source': 'agent'}}, "
        "{'kind': 'kernel', 'cases': [{'name': 'd', 'decode': 1, 'context': 1}]})]\n"
    )
    code = code.replace("from tests_experiment import experiments; ", f"exec({source!r}); ")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_requests_are_submitted_in_an_order_that_mixes_lengths():
    lengths = [len(p.token_ids) for p in chat_prompts()]
    direction_changes = sum((b > a) != (c > b) for (a, b), (_, c) in pairwise(pairwise(lengths)))
    assert direction_changes > 30


def test_a_prompt_needs_tokens():
    with pytest.raises(ValueError, match="request r0"):
        Prompt("r0", (), 3)
