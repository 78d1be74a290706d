import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from labkit.config import ConfigError, Engine, KVLayout, Model, ModelShape, from_plain
from labkit.config.engine.scheduler import Admission
from labkit.engine import LLM, SamplingParams, create
from labkit.engine.engine_protocol import EngineError
from labkit.engine.llm import LLM_KEYS
from labkit.engine.model.model_loader import ONE_AT_A_TIME

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny():
    from labkit.models import resolve

    shape = ModelShape(hidden_size=128, num_layers=2, vocab_size=1024, intermediate_size=256)
    return resolve(Model(name="llm_test", shape=shape)).path


@pytest.fixture(scope="module")
def llm(tiny):
    llm = LLM(tiny, max_num_seqs=4, max_num_batched_tokens=32, block_size=8, blocks=100)
    yield llm
    llm.close()


def test_generate_answers_each_prompt_in_order(llm):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = ["One.", "A second prompt that is longer than the first.", "Three"]
    together = llm.generate(prompts, params)
    assert [out.prompt for out in together] == prompts
    assert all(len(out.token_ids) == 8 and out.finish_reason == "length" for out in together)
    for prompt, out in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, params)
        assert (alone.token_ids, alone.text) == (out.token_ids, out.text)
        assert alone.text == llm._tokenizer.decode(list(alone.token_ids))


def test_kernels_use_the_cores_that_a_container_may_use(tiny):
    code = f"""
from labkit.engine import LLM
from labkit.machine import worker_environment
worker_environment.core_count = lambda: 1
LLM({str(tiny)!r}, blocks=20).close()
import numba
print(numba.config.NUMBA_NUM_THREADS, numba.get_num_threads())
"""
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_NUM_THREADS"}
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", code]
    alone = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert alone.stdout == "1 1\n"


def test_token_ids_are_prompts_too(llm):
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    ids = llm._tokenizer.encode("Some text")
    expected = llm.generate("Some text", params)[0].token_ids
    assert llm.generate(ids, params)[0].token_ids == expected
    assert [out.token_ids for out in llm.generate([ids, tuple(ids)], params)] == [expected] * 2
    assert llm.generate([], params) == []


def test_stream_yields_each_token_and_its_deltas_join_to_the_text(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 9)]
    seen = {}
    for out in llm.stream(["First", "Second"], params):
        seen.setdefault(out.request_id, []).append(out)
    assert [len(outs) for outs in seen.values()] == [5, 9]
    for outs in seen.values():
        assert [len(out.token_ids) for out in outs] == list(range(1, len(outs) + 1))
        assert "".join(out.delta for out in outs) == outs[-1].text
        assert [out.finish_reason for out in outs[:-1]] == [None] * (len(outs) - 1)


def test_leaving_a_stream_early_aborts_its_requests(llm):
    stream = llm.stream(["First", "Second"], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    counters = llm.counters()
    assert counters["blocks.allocated"] == counters["blocks.freed"]
    assert not llm._engine.has_work()


def test_a_request_that_cannot_fit_fails_alone(llm):
    big = SamplingParams(max_tokens=5000)
    good = SamplingParams(max_tokens=3, ignore_eos=True)
    first, second = llm.generate(["Hello", "Hello"], [big, good])
    assert first.finish_reason == "error" and "raise the budget" in first.error
    assert second.finish_reason == "length"


@pytest.mark.parametrize("engine", ["paged", "mlx_lm"])
def test_no_request_is_longer_than_the_models_context(tiny, tmp_path, engine):
    for name in tiny.iterdir():
        (tmp_path / name.name).symlink_to(name)
    settings = json.loads((tiny / "config.json").read_text()) | {"max_position_embeddings": 24}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with LLM(tmp_path, blocks=9) as llm:
        if engine == "mlx_lm":
            llm.close()
            options = from_plain(Engine, {"name": "mlx_lm"})
            llm._engine = create(options, tmp_path)
        fixed = SamplingParams(max_tokens=9, ignore_eos=True)
        open_end = SamplingParams(max_tokens=9, stop_token_ids=(2000,))
        params = [fixed, fixed, open_end, open_end]
        prompts = [[5] * 15, [5] * 16, [5] * 20, [5] * 24]
        outputs = llm.generate(prompts, params)
        assert [len(out.token_ids) for out in outputs] == [9, 0, 4, 0]
        expected = "16 prompt tokens and max_tokens=9 exceed the model's context of 24 tokens"
        assert expected in outputs[1].error
        assert [out.finish_reason for out in outputs] == ["length", "error"] * 2
        (scored,) = llm.score([[5] * 24])
        assert len(scored.token_ids) == 24


@pytest.fixture
def engine_config(tiny, monkeypatch):
    """Return the config of the engine that an LLM with these options creates."""

    def of(options):
        created = []
        monkeypatch.setattr("labkit.engine.llm.create", lambda *given: created.append(given))
        LLM(tiny, **options)
        return created[0][0]

    return of


def test_options_go_by_their_own_names(engine_config):
    chosen = engine_config({"max_num_seqs": 3, "block_size": 32, "resolver": "seq_map"})
    assert chosen.scheduler.max_num_seqs == 3
    assert chosen.kv.block_size == 32
    assert chosen.attention.resolver == "seq_map"
    with pytest.raises(ConfigError, match="block_sise: no such engine option; must be one of:"):
        engine_config({"block_sise": 3})
    with pytest.raises(ConfigError, match=r"^engine\.kv\.block_size=3"):
        engine_config({"block_size": 3})


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("padded", {"kv_layout": "padded"}),
        ("contiguous", {"layout": "contiguous"}),
        ("naive", {"kv_layout": KVLayout.padded, "admission": Admission.static}),
        ("paged", {"kv_layout": "paged", "max_num_seqs": 4}),
    ],
)
def test_a_layout_brings_what_its_engine_sets(engine, options, engine_config):
    """It was refused: "set engine=naive, padded, ...", which is no option of ``LLM``."""
    preset = yaml.safe_load((ROOT / "conf" / "engine" / f"{engine}.yaml").read_text())
    if "max_num_seqs" in options:
        preset["scheduler"] = {"max_num_seqs": 4}
    assert engine_config(options) == from_plain(Engine, preset)


@pytest.mark.parametrize("layout", ["padded", "contiguous"])
def test_every_layout_generates_the_same_tokens(layout, llm, tiny):
    params, prompts = SamplingParams(max_tokens=4, ignore_eos=True), ["One.", "Two, and more"]
    with LLM(tiny, kv_layout=layout, max_num_seqs=2, blocks=40) as other:
        outputs = other.generate(prompts, params)
        assert other.counters()[f"layout.{layout}"] > 0
    assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(prompts, params)]


@pytest.mark.parametrize("layout", [["padded"], "ring", None])
def test_what_is_no_layout_is_refused_in_one_line(layout, engine_config):
    with pytest.raises(ConfigError, match=r"^kv\.layout=.*: must be one of: padded, conti"):
        engine_config({"kv_layout": layout})


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("which engine=paged cannot do; set engine=mlx_lm",
         'which kv_layout="paged" cannot do; generate with mlx_lm itself'),
        ("a slot; set engine=mlx_lm engine.scheduler.max_num_seqs=1",
         "a slot; generate with mlx_lm itself"),
        (ONE_AT_A_TIME, "run mlx_lm's server, which computes one request at a time"),
    ],
)  # fmt: skip
def test_advice_to_choose_an_engine_is_written_for_llm(tiny, monkeypatch, text, advice):
    def refuse(*_):
        raise EngineError(text)

    with pytest.raises(ConfigError, match=r'holds float32; set kv_layout="paged"$'):
        LLM(tiny, kv_layout="padded", kv_dtype="float16")
    monkeypatch.setattr("labkit.engine.llm.create", refuse)
    with pytest.raises(EngineError) as caught:
        LLM(tiny)
    assert str(caught.value) == advice


def key_of(name):
    """Return the key that an option of ``LLM`` sets, from the error about its value."""
    with pytest.raises(ConfigError) as caught:
        LLM("nowhere", **{name: {}})
    return re.split("[=:]", str(caught.value))[0]


@pytest.mark.parametrize("key", LLM_KEYS)
def test_every_option_has_its_key_s_name_and_the_last_name_no_other_s(key):
    """``dtype`` was engine.kv.dtype, and engine.dtype had no name."""
    last = key.rpartition(".")[2]
    assert key_of(key.replace(".", "_")) == key
    assert key_of(last) == (last if last in LLM_KEYS else key)


def test_a_name_of_two_options_is_refused(monkeypatch):
    monkeypatch.setattr(
        "labkit.engine.llm.LLM_KEYS", ("size", "kv.size", "kv.policy", "budget.policy", "kv.page")
    )
    with pytest.raises(ConfigError) as caught:
        LLM("nowhere", policy=1)
    assert str(caught.value) == (
        "policy: several engine options have this name; write kv_policy or budget_policy"
    )
    with pytest.raises(
        ConfigError, match=r"one of: budget_policy, kv_policy, kv_size, page, size$"
    ):
        LLM("nowhere", pages=1)


def test_the_type_computed_in_and_that_of_the_kv_cache_are_two_options(engine_config):
    chosen = engine_config({"dtype": "float16", "backend": "gather"})
    assert (chosen.dtype.value, chosen.kv.dtype.value) == ("float16", "float32")
    chosen = engine_config({"kv_dtype": "float16"})
    assert (chosen.dtype.value, chosen.kv.dtype.value) == ("model", "float16")
    with pytest.raises(ConfigError, match=r"^kv_block_size: block_size sets engine.kv.block_size"):
        engine_config({"block_size": 8, "kv_block_size": 16})


def test_a_failed_step_ends_every_stream_and_each_says_so(llm, monkeypatch):
    def fail(batch):
        raise RuntimeError("no more")

    first = llm.stream("First", LONG)
    next(first)
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine._loop._launcher, "run_model", fail)
        with pytest.raises(RuntimeError, match="no more"):
            llm.generate("Second", LONG)
    with pytest.raises(EngineError, match="lost: a step failed, or the LLM was closed"):
        next(first)
    assert idle(llm) and llm._live == {}
    assert len(llm.generate("Third", LONG)[0].token_ids) == 30


@pytest.mark.parametrize(
    "name", ["name", "blas", "threads", "memory_limit", "mlx_tf32", "server_url"]
)
def test_process_wide_settings_are_not_options(name, tmp_path):
    with pytest.raises(
        ConfigError, match=f"^{name}: no such engine option; must be one of: "
    ) as caught:
        LLM(tmp_path, **{name: 1})
    assert "\n" not in str(caught.value)
    assert name not in str(caught.value).split("must be one of: ")[1].split(", ")


def test_the_numbers_of_parameters_and_prompts_must_agree(llm):
    with pytest.raises(EngineError, match="equally many, not 2 and 1"):
        llm.generate(["a", "b"], [SamplingParams()])


def idle(llm):
    """Whether nothing is left in the engine."""
    counters = llm.counters()
    return not llm._engine.has_work() and counters["blocks.allocated"] == counters["blocks.freed"]


LONG = SamplingParams(max_tokens=30, ignore_eos=True)


def test_a_stop_text_ends_the_request_in_the_engine(llm):
    whole = llm.generate("Once", LONG)[0]
    stop = whole.text[8:11]
    at = whole.text.index(stop)
    before = llm.counters()["tokens.output"]
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop=stop)
    outputs = list(llm.stream(["Once", "Twice"], [params, LONG]))
    stopped = [out for out in outputs if out.prompt == "Once"]
    assert (stopped[-1].text, stopped[-1].finish_reason) == (whole.text[:at], "stop")
    assert "".join(out.delta for out in stopped) == whole.text[:at]
    assert all(whole.text[:at].startswith(out.text) for out in stopped)
    assert len(stopped) < 30
    assert llm.counters()["tokens.output"] - before == len(outputs) == len(stopped) + 30
    assert idle(llm)


def test_several_tokens_of_a_request_in_one_step(llm, monkeypatch):
    """As speculation gives them: what comes after a stop text in the same step is dropped."""
    whole = llm.generate("Once", LONG)[0]
    at = whole.text.index(whole.text[8:11])
    stop = SamplingParams(max_tokens=30, ignore_eos=True, stop=[whole.text[8:11]])
    step = llm._engine.step
    monkeypatch.setattr(
        llm._engine, "step", lambda: list(itertools.chain.from_iterable(step() for _ in range(4)))
    )
    (out,) = llm.generate("Once", stop)
    assert (out.text, out.finish_reason) == (whole.text[:at], "stop")
    assert out.token_ids == whole.token_ids[: len(out.token_ids)]
    assert llm.generate("Once", LONG)[0].text == whole.text
    assert idle(llm)


def test_the_lower_priority_is_served_first(tiny):
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with LLM(tiny, max_num_seqs=1, queue="priority", blocks=50) as llm:

        def order(priority):
            outputs = llm.stream(["One", "Two", "Three"], params, priority)
            return [int(output.request_id) % 3 for output in outputs if output.finish_reason]

        assert order([1, 0, -1]) == [2, 1, 0]
        assert order(np.array([1, 0, 1])) == [1, 0, 2]
        assert order(7) == [0, 1, 2]
        llm.generate(["One", "Two"], params, priority=[3, 2])
        assert llm.counters()["queue.priority"] == 2 + 1 + 1


@pytest.mark.parametrize(
    ("priority", "reason"),
    [
        (1, '^priority=1: the queue is fcfs; set queue="priority" or a class of your own$'),
        ([0, -3], "^priority=-3: the queue is fcfs"),
        ([0], "prompts and priorities must be equally many, not 2 and 1"),
        (None, "^priority: None is not an integer"),
        (["high", 0], "^priority: 'high' is not an integer"),
        (np.array([[0, 1]]), r"^priority: array\(\[0, 1\]\) is not an integer"),
    ],
)
def test_a_priority_that_would_change_nothing_is_refused(llm, priority, reason):
    for call in (llm.generate, llm.stream):
        with pytest.raises(EngineError, match=reason) as caught:
            call(["One", "Two"], priority=priority)
        assert "\n" not in str(caught.value)
    assert len(llm.generate(["One", "Two"], SamplingParams(max_tokens=1), priority=[0, 0])) == 2


def test_streams_read_alternately_share_the_engine(llm):
    alone = [llm.generate(prompt, LONG)[0].token_ids for prompt in ("First", "Second")]
    alternating = zip(llm.stream("First", LONG), llm.stream("Second", LONG), strict=True)
    *_, (first, second) = alternating
    assert [first.token_ids, second.token_ids] == alone
    outer = llm.stream("First", LONG)
    next(outer)
    (inner,) = llm.generate("Second", LONG)
    *_, out = outer
    assert [out.token_ids, inner.token_ids] == alone
    assert idle(llm)


def test_ctrl_c_waits_for_the_step_and_leaves_the_engine_usable(llm, monkeypatch, ctrl_c):
    expected = llm.generate("First", LONG)[0].token_ids
    step, finished = llm._engine.step, []

    def interrupted():
        if len(finished) == 3:
            signal.raise_signal(signal.SIGINT)
        events = step()
        finished.append(len(events))
        return events

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["First", "Second"], LONG)
    assert len(finished) == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert idle(llm)
    assert llm.generate("First", LONG)[0].token_ids == expected


def test_an_exception_in_a_step_leaves_the_engine_usable(llm, monkeypatch):
    def fail():
        raise RuntimeError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "step", fail)
        with pytest.raises(RuntimeError, match="no more"):
            llm.generate(["First", "Second"], LONG)
    assert idle(llm)


def test_scores_are_the_log_probabilities_of_the_texts_own_tokens(llm):
    first, second = llm.score(["Once upon a time", [5, 6, 7]], top=2)
    assert second.token_ids == (5, 6, 7)
    assert first.logprobs.top.shape == (len(first.token_ids) - 1, 2)
    assert first.perplexity == pytest.approx(math.exp(-first.logprobs.tokens.mean()))
    with pytest.raises(EngineError, match="text 1: a score needs 2 or more tokens, not 1"):
        llm.score([[5, 6], [5]])


def test_a_scored_token_has_the_log_probability_that_it_had_when_sampled(llm):
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)
    (output,) = llm.generate("One.", params)
    (score,) = llm.score([[*output.prompt_token_ids, *output.token_ids]])
    sampled = [entry.token for entry in output.logprobs]
    assert score.logprobs.tokens[-8:] == pytest.approx(sampled, abs=1e-5)


def test_log_probabilities_come_with_each_token(llm):
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=3)
    with_logprobs, without = llm.generate(["First", "First"], [params, LONG])
    assert without.logprobs is None and len(with_logprobs.logprobs) == 5
    for token, token_logprobs in zip(with_logprobs.token_ids, with_logprobs.logprobs, strict=True):
        assert (
            token_logprobs.top[0] == (token, token_logprobs.token) and len(token_logprobs.top) == 3
        )


@pytest.mark.parametrize(
    ("prompts", "params", "reason"),
    [
        (5, None, "5: a prompt is a text or a list of token ids"),
        (["a", 5], None, "5: a prompt is a text or a list of token ids"),
        ([1, "a"], None, "a prompt is a text or a list of token ids"),
        ([1, 2.5], None, "a prompt is a text or a list of token ids"),
        ([[3, -1]], None, "token id -1: must be 0 or more"),
        (["a", "b\ud800"], None, r"'b\\ud800': the text is not valid Unicode"),
        (["\ud800" * 10_000], None, "the text is not valid Unicode"),
        (["a"], {"max_tokens": 3}, "equally many, not 1 and 2"),
        ("a", [{"max_tokens": 3}], "sampling parameters must be SamplingParams"),
    ],
)
def test_invalid_arguments_are_refused_at_once_in_one_line(llm, prompts, params, reason):
    if isinstance(params, dict):
        params = [params, params]
    for call in (llm.generate, llm.stream):
        with pytest.raises(EngineError, match=reason) as caught:
            call(prompts, params)
        assert "\n" not in str(caught.value)
    assert idle(llm)


def test_a_with_block_closes_the_engine(tiny):
    with LLM(tiny, max_num_seqs=2, max_num_batched_tokens=32, blocks=50) as llm:
        stream = llm.stream("First", LONG)
        next(stream)
    with pytest.raises(EngineError, match="lost: a step failed, or the LLM was closed"):
        list(stream)


def test_a_directory_that_is_no_model_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="does not exist") as caught:
        LLM(tmp_path)
    assert "\n" not in str(caught.value)
