"""Workloads in which each request is a case, with its latency and the cost of its row."""

import pytest
from serving_stubs import Clock, StubEngine

from labkit.config import ConfigError, Workload
from labkit.workload.requests.serving_session import ServingSession
from labkit.workload.sources import source_of
from labkit.workload.sources.text_requests import TextRequest
from labkit.workload.tokenized_prompt import Prompt


class StaticEngine(StubEngine):
    """Steps of one second; both requests begin at once, and rows stay until both have ended."""

    def __init__(self, clock):
        super().__init__(clock, lambda step, live: 1.0)
        self.ended = []

    def step(self):
        events = super().step()
        self.ended += [event.request_id for event in events if event.finish_reason]
        self.ended = self.ended if self.live else []
        return events

    def lingering_requests(self):
        return self.ended


@pytest.mark.parametrize("per_request", [True, False])
def test_each_request_is_a_case_with_its_latency_and_its_row(per_request):
    clock = Clock()
    prompts = [Prompt("short", (1, 2), 2), Prompt("long", (1, 2), 6)]
    workload = Workload(name="test", per_request=per_request, concurrency=2, warmup=0)
    session = ServingSession(
        StaticEngine(clock), prompts, workload, seed=0, vocab_size=9, clock=clock
    )
    session.warm_up()
    whole, *own = session.measure(lambda text: None).cases
    primary = [m.name for m in whole.metrics if m.primary]
    assert whole.case == "all" and primary == ([] if per_request else ["total_tok_s"])
    num_repeats = {case.case: {m.name: m.repeats for m in case.metrics} for case in own}
    expected = {
        # Two steps for its tokens and four more in which its row was computed in vain.
        "short": {"e2e_ms": (2000.0,), "row_steps": (6.0,)},
        "long": {"e2e_ms": (6000.0,), "row_steps": (6.0,)},
    }
    assert num_repeats == (expected if per_request else {})
    for case in own:
        assert [m.name for m in case.metrics if m.primary] == ["e2e_ms"]
        (output,) = case.outputs["requests"]
        assert output["id"] == case.case
        assert len(output["tokens"]) == {"short": 2, "long": 6}[case.case]


def test_the_questions_name_their_requests_in_the_articles_order(compose_experiment, monkeypatch):
    class Words:
        template = template_error = None

        def encode_turns(self, turns):
            return list(range(len("".join(turns).split())))

    monkeypatch.setattr("labkit.models.tokenizer.load", lambda path: Words())

    class Model:
        path = None

    experiment = compose_experiment("workload=waste", "workload.num_requests=3")
    prompts = source_of(experiment).make(experiment, Model())
    questions = [one.prompt for one in experiment.workload.prompts.listed]
    assert [p.request_id for p in prompts] == questions[:3]
    assert [len(p.token_ids) for p in prompts] == [6, 11, 9]
    assert [p.max_tokens for p in prompts] == [2, 159, 3]


def test_a_conversation_of_one_question_is_named_by_it():
    one = TextRequest(("\n\nWhy?\n\nAssistant:",), 3, ({"role": "user", "content": "Why?"},))
    assert one.name == "Why?"
    assert TextRequest(("a", "b"), 3, ({"role": "user", "content": "a"},) * 2).name == "ab"
    assert TextRequest(("Why",), 3).name == "Why"


def test_two_requests_of_one_text_cannot_both_be_cases(compose_experiment):
    twice = "workload.prompts.listed=[{prompt:Hello},{prompt:Hello,max_tokens:3}]"
    words = ["workload.prompts.source=listed", twice]
    assert len(source_of(compose_experiment(*words)).lengths(compose_experiment(*words))) == 2
    with pytest.raises(ConfigError, match=r"per_request=true .* two have the same text"):
        compose_experiment(*words, "workload.per_request=true")
