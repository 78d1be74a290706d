"""``LLM`` with every engine strategy: text, stop texts and sampling stay the same."""

import numpy as np
import pytest

from labkit.config import Model, ModelShape
from labkit.engine import LLM, SamplingParams
from labkit.engine.sampling.sampling_params import SamplingError

STRATEGIES = {
    "overlap": {"pipeline": "overlap"},
    "ngram": {"speculation": "ngram"},
    "draft": {"speculation": "draft", "draft_layers": 1},
    "overlap_bucketed": {"pipeline": "overlap", "decode_shape": "bucketed"},
    "radix": {"prefix_cache": "radix"},
    "optimistic": {"reservation": "optimistic", "blocks": 9},
}
ENGAGED = {
    "overlap": "pipeline.overlapped",
    "ngram": "spec.accepted",
    "draft": "spec.accepted",
    "overlap_bucketed": "decode_shape.bucketed",
    "radix": "prefix.hit_tokens",
    "optimistic": "preemptions",
}
REPETITIVE = "One two one two one two one two one two one two"
PROMPTS = [REPETITIVE, "A second one.", "Third", f"{REPETITIVE} three", "Again and"]
PARAMS = [
    {},
    {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 1.1, "min_p": 0.05, "top_k": 40, "frequency_penalty": 0.7},
    {"presence_penalty": 1.5, "logprobs": 0},
    {"logit_bias": {300: 1000.0}},  # the same token for ever: what was seen before comes again
]


@pytest.fixture(scope="module")
def tiny():
    from labkit.models import resolve

    shape = ModelShape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1)
    return resolve(Model(name="llm_strategies_test", shape=shape)).path


class Residues:
    """Allows, after so many tokens, the ids that leave the same remainder.

    Like a grammar, it raises an error for an output that it does not allow, or once ``limit``
    tokens are generated.
    """

    def __init__(self, limit=1000):
        self.limit = limit

    def allowed(self, output, vocab_size):
        if any(token % 5 != at % 5 for at, token in enumerate(output)):
            raise SamplingError("the output violates the rule")
        if len(output) >= self.limit:
            raise SamplingError(f"no rule after {len(output)} tokens")
        return np.arange(vocab_size) % 5 == len(output) % 5


def serve(tiny, stops=((),) * 5, constraints=(None,) * 5, **options):
    params = [
        SamplingParams(
            max_tokens=24, ignore_eos=True, stop=stop, constraint=constraint, **overrides
        )
        for overrides, stop, constraint in zip(PARAMS, stops, constraints, strict=True)
    ]
    with LLM(tiny, **{"max_num_seqs": 3, "blocks": 40, "block_size": 8} | options) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert not llm._engine.has_work()
        counters = llm.counters()
    return outputs, counters


@pytest.fixture(scope="module")
def plain(tiny):
    return serve(tiny)[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_text_and_sampling_equal_the_plain_engine_s(name, tiny, plain):
    outputs, counters = serve(tiny, **STRATEGIES[name])
    assert counters[ENGAGED[name]] > 0
    for out, expected in zip(outputs, plain, strict=True):
        assert (out.text, out.token_ids) == (expected.text, expected.token_ids)
        assert (out.logprobs is None) == (expected.logprobs is None)
        if out.logprobs is not None:
            assert len(out.logprobs) == len(out.token_ids)
            logprobs = [one.token for one in out.logprobs]
            assert logprobs == pytest.approx([one.token for one in expected.logprobs], abs=1e-4)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_stop_text_ends_each_at_the_same_place(name, tiny, plain):
    stops = [out.text[9 + i : 12 + i] for i, out in enumerate(plain)]
    outputs, _ = serve(tiny, stops, **STRATEGIES[name])
    for out, whole, stop in zip(outputs, plain, stops, strict=True):
        assert out.text == whole.text[: whole.text.index(stop)]
        assert out.finish_reason == "stop"


@pytest.fixture(scope="module")
def constrained(tiny):
    return serve(tiny, constraints=[Residues()] * 5)[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_constraint_holds_for_drafts_and_recomputed_tokens(tiny, constrained, name):
    outputs, _ = serve(tiny, constraints=[Residues()] * 5, **STRATEGIES[name])
    assert [o.token_ids for o in outputs] == [o.token_ids for o in constrained]
    for output in outputs:
        assert [token % 5 for token in output.token_ids] == [at % 5 for at in range(24)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_constraint_that_fails_ends_its_own_request_alone(tiny, constrained, name):
    failing = [Residues(), Residues(limit=7), Residues(), Residues(limit=0), Residues()]
    outputs, counters = serve(tiny, constraints=failing, **STRATEGIES[name])
    for output, expected, rule in zip(outputs, constrained, failing, strict=True):
        assert output.token_ids == expected.token_ids[: rule.limit]
        failed = rule.limit < 24
        assert output.finish_reason == ("error" if failed else expected.finish_reason)
        assert output.error == (f"no rule after {rule.limit} tokens" if failed else None)
    assert counters["requests.sampling_failed"] == 2
    assert counters["tokens.output"] == sum(len(output.token_ids) for output in outputs)


def test_log_probabilities_ignore_the_constraint(tiny, plain, constrained):
    assert [o.token_ids for o in plain] != [o.token_ids for o in constrained]
    logprobs = constrained[1].logprobs  # of the model's own distribution, which knows no constraint
    assert any(one.token < max(value for _, value in one.top) for one in logprobs)
