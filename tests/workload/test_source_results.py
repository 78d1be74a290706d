"""What a prompt source of the user's own returns: in the types of a workload, or refused."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from labkit.config import Ablation, ConfigError, Experiment, Model, ModelShape, Workload
from labkit.engine.user_classes import UserClassError
from labkit.workload import source_results
from labkit.workload.tokenized_prompt import Prompt


def experiment(num_requests=None):
    return Experiment(
        ablation=Ablation(arms={"base": {}}),
        model=Model(shape=ModelShape()),
        workload=Workload(name="own", kind="mine.kinds:Kind", num_requests=num_requests),
    )


def returned(method, value, num_requests=None):
    """Return the result of a method of a source that returns ``value``."""
    source = SimpleNamespace(**{"make" if method == "prompts" else method: lambda *_: value})
    arguments = (experiment(num_requests), *([None] if method == "prompts" else []))
    return getattr(source_results, method)(source, *arguments)


def test_generators_and_numpy_s_numbers_are_what_a_workload_needs():
    ids = tuple(np.arange(3))
    made = [Prompt("a", ids, np.int64(4), timestamp_ms=np.int64(5)), Prompt("b", (7,), 2)]
    expected = (Prompt("a", (0, 1, 2), 4, timestamp_ms=5.0), made[1])
    for prompts in (made, iter(made)):
        result = returned("prompts", prompts)
        assert result == expected and json.dumps([asdict(prompt) for prompt in result])
    pairs = [(np.int64(3), 4), (1.5, 2)]
    for lengths in (pairs, iter(pairs)):
        assert returned("lengths", lengths) == [(3, 4), (1, 2)]
    assert returned("timestamps_ms", iter([np.float32(2), None])) == [2.0, None]
    assert returned("identity", {"mine": 1}) == {"mine": 1}


def test_num_requests_takes_the_first():
    assert returned("lengths", [(3, 4), (1, 2)], 1) == [(3, 4)]
    assert returned("timestamps_ms", [1.0, None], 1) == [1.0]
    with pytest.raises(ConfigError, match=r"workload.num_requests=3: own has only 2 requests"):
        returned("lengths", [(3, 4), (1, 2)], 3)


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("prompts", (), r"make\(\) must return an item for each request, and returned none"),
        ("prompts", 3, r"make\(\) must return a sequence, not int"),
        ("prompts", ["hello"], r"make\(\) must return Prompts, not str"),
        ("prompts", [Prompt("a", (1.5,), 2)], r"make\(\) must return Prompts whose numbers are"),
        ("lengths", None, r"lengths\(\) must return a sequence, not NoneType"),
        ("lengths", [], r"lengths\(\) must return an item for each request"),
        ("lengths", [3, 4], r"lengths\(\) must return pairs of numbers"),
        ("lengths", [(3, None)], r"lengths\(\) must return pairs of numbers"),
        ("timestamps_ms", ["now"], r"timestamps_ms\(\) must return numbers of milliseconds"),
        ("identity", {"seed": np.int64(1)}, r"identity\(\) must return a dict of JSON types"),
    ],
)
def test_a_wrong_result_is_one_line_that_names_the_method(method, value, message):
    with pytest.raises(UserClassError, match=rf"^workload.kind=mine.kinds:Kind: {message}") as one:
        returned(method, value)
    assert "\n" not in str(one.value) and one.value.path == "mine.kinds:Kind"
