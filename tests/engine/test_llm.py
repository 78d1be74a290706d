import pytest

from labkit.config import ConfigError, Model, ModelShape
from labkit.engine import LLM, SamplingParams
from labkit.engine.base import EngineError
from labkit.engine.llm import as_list, engine_config


@pytest.fixture(scope="module")
def tiny():
    from labkit.model import resolve

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


def test_token_ids_are_prompts_too(llm):
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    ids = llm._tokenizer.encode("Some text")
    expected = llm.generate("Some text", params)[0].token_ids
    assert llm.generate(ids, params)[0].token_ids == expected
    assert [out.token_ids for out in llm.generate([ids, tuple(ids)], params)] == [expected] * 2


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


def test_options_go_by_their_own_names():
    chosen = engine_config({"max_num_seqs": 3, "block_size": 32, "resolver": "seq_map"})
    assert chosen.scheduler.max_num_seqs == 3
    assert chosen.kv.block_size == 32
    assert chosen.attention.resolver == "seq_map"
    with pytest.raises(ConfigError, match="block_sise: no such engine option; there are"):
        engine_config({"block_sise": 3})
    with pytest.raises(ConfigError, match=r"engine\.kv\.block_size=3"):
        engine_config({"block_size": 3})
    with pytest.raises(ConfigError, match="blas: no such engine option"):
        engine_config({"blas": "stock"})


def test_what_counts_as_one_prompt():
    assert as_list("a") == ["a"]
    assert as_list(["a", "b"]) == ["a", "b"]
    assert as_list([1, 2]) == [[1, 2]]
    assert as_list([[1], [2]]) == [[1], [2]]
    assert as_list([]) == []


def test_as_many_parameters_as_prompts(llm):
    with pytest.raises(EngineError, match="2 prompts but 1 sampling parameters"):
        llm.generate(["a", "b"], [SamplingParams()])
