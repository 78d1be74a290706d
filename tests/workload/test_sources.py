"""Where prompts come from: a list, a file, a trace, chance, a class; and files that are wrong."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from labkit.config import Ablation, ConfigError, Experiment, Model, ModelShape, Workload
from labkit.engine.user_classes import UserClassError
from labkit.models import resolve, tokenizer
from labkit.workload import sources
from labkit.workload.requests.request_workload_kind import KIND
from labkit.workload.sources import bounded_reader, source_of
from labkit.workload.tokenized_prompt import Prompt


def make_prompts(experiment):
    return source_of(experiment).make(experiment, resolve(experiment.model))


@pytest.fixture
def file(tmp_path, compose_experiment):
    """Return what composes a workload from a file of such lines."""

    def compose(lines, *overrides, source="file"):
        path = tmp_path / "requests.jsonl"
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(text))
        words = ["workload.prompts.source=" + source, f"workload.prompts.path='{path}'"]
        return compose_experiment("workload.name=mine", *words, *overrides)

    return compose


LINES = [
    '\ufeff{"prompt": "Hello there", "max_tokens": 3, "timestamp": 0, "session": "a"}',
    "",
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]},
]


def test_lines_of_a_file_are_requests(file):
    experiment = file(LINES, "workload.prompts.output={kind:fixed,tokens:9}")
    first, second = make_prompts(experiment)
    decode = tokenizer.load(resolve(experiment.model).path).decode
    assert decode(first.token_ids) == "Hello there" and first.max_tokens == 3
    assert (first.session, first.timestamp_ms) == ("a", 0)
    assert decode(second.token_ids) == "Be brief.\n\nWhy?\n\nAssistant:" and second.max_tokens == 9
    assert [n for _, n in source_of(experiment).lengths(experiment)] == [3, 9]


def test_another_text_is_another_set_of_prompts(file):
    experiment = file([{"prompt": "Hello"}])
    before = source_of(experiment).identity(experiment)
    after = file([{"prompt": "Good day"}])
    assert before != source_of(after).identity(after)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"prompt": "Hi", "max_token": 3},
            "no key 'max_token'; the keys are: prompt, messages, max_tokens",
        ),
        ({"prompt": "Hi", "max_tokens": 0}, r"max_tokens=0: must be 1 to 1048576 \(tokens\)"),
        ({"prompt": "Hi", "max_tokens": "9"}, "max_tokens='9': must be of type int"),
        ({"prompt": "Hi", "max_tokens": True}, "max_tokens=True: must be of type int"),
        (
            {"prompt": "Hi", "timestamp": -1},
            r"timestamp=-1\.0: must be 0 to 2592000000 \(milliseconds\)",
        ),
        ({"x" * 100_000: 3}, "no key 'x{200}...'; the keys are"),
        ({"prompt": 5}, "prompt=5: must be of type str"),
        ({"prompt": ""}, "prompt has 0 characters; it must have 1 to"),
        ({"prompt": "x" * ((4 << 20) + 1)}, "prompt has 4194305 characters; it must have"),
        ({}, "prompt: set either prompt or messages"),
        ({"messages": "Hi"}, "messages: must be a list, not 'Hi'"),
        ({"messages": [{"role": "me", "content": "x"}]}, r"messages\[0\].role=me: must be sys"),
        ("[1, 2]", "is not a JSON object"),
        ('{"prompt": "a", "prompt": "b"}', "is not valid JSON: it has the key 'prompt' twice"),
        ('{"prompt": "Hi"', "is not valid JSON: Expecting"),
        ('{"timestamp": NaN, "prompt": "x"}', "is not valid JSON: JSON has no NaN"),
        ('{"prompt": "\\ud800"}', "prompt is not valid Unicode"),
        ("[" * 100_000, "is not valid JSON: maximum recursion"),
    ],
)
def test_an_error_in_a_file_names_file_line_and_allowed_values(file, line, message):
    with pytest.raises(ConfigError, match=r"requests\.jsonl, line 2:? " + message) as error:
        file([{"prompt": "Fine"}, line])
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def large_file(folder):
    """Return a file of 256 MiB and a byte, which takes no space."""
    path = folder / "large.jsonl"
    with path.open("wb") as file:
        file.truncate((256 << 20) + 1)
    return path


def test_a_missing_empty_or_binary_file_is_refused(file, compose_experiment, tmp_path):
    with pytest.raises(ConfigError, match=r"requests\.jsonl has no requests"):
        file(["", "  "])
    (tmp_path / "bytes").write_bytes(b'{"prompt": "\xff"}')
    for path, expected in (
        (tmp_path / "none.jsonl", "No such file"),
        (tmp_path, "not a file"),
        (tmp_path / "bytes", "not UTF-8 at byte 12"),
        (large_file(tmp_path), r"has 268,435,457 bytes; it must have at most 268,435,456"),
    ):
        with pytest.raises(ConfigError, match=expected):
            compose_experiment("workload.prompts.source=file", f"workload.prompts.path='{path}'")


def test_listed_requests_are_checked_like_those_of_a_file(compose_experiment):
    words = ["workload.prompts.source=listed"]
    with pytest.raises(
        ConfigError, match=r"workload\.prompts\.listed\[1\]\.max_tokens=0: must be 1 to"
    ):
        compose_experiment(*words, "workload.prompts.listed=[{prompt:A},{prompt:B,max_tokens:0}]")
    with pytest.raises(ConfigError, match=r"source=listed: workload\.prompts\.listed is empty"):
        compose_experiment(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prompts.source=fil"], r"workload\.prompts\.source=fil: must be chat, agent, listed"),
        (["prompts.source=file"], r"prompts\.source=file: set workload\.prompts\.path"),
        (["prompts.path=x"], r"workload\.prompts\.path=x: .*source=chat does not read it"),
        (
            ["prompts.prefix_tokens=5"],
            r"workload\.prompts\.prefix_tokens=5: .*source=chat does not",
        ),
        (["prompts.input.tokens=5"], r"workload\.prompts\.input: .*source=chat does not read it"),
        (["prompts.output.kind=uniform"], r"workload\.prompts\.output\.low=null: kind=uniform nee"),
        (["prompts.output.sigma=1"], r"workload\.prompts\.output\.sigma=1\.0: kind=fixed does not"),
        (["arrivals.kind=poisson"], r"arrivals\.kind=poisson: set workload\.arrivals\.rate"),
        (["arrivals.rate=2"], r"workload\.arrivals\.rate=2\.0: .*kind=closed does not read it"),
        (["arrivals.kind=trace"], r"arrivals\.kind=trace: workload\.prompts\.source=chat has no"),
        (
            ["arrivals.kind=poisson", "arrivals.rate=2"],
            r"workload\.concurrency=16: .*do not wait .* workload\.concurrency=null$",
        ),
        (["concurrency=null"], r"workload\.concurrency=null: .*closed needs a number of clients"),
        (["limits.ttft_ms=0"], r"workload\.limits\.ttft_ms=0\.0: must be above 0"),
        (["kind=chat"], r"workload\.kind=chat: must be kernel, requests, headroom, video, scoring"),
        (["kind=nowhere:Kind"], r"workload\.kind=nowhere:Kind: ModuleNotFoundError"),
    ],
)
def test_a_mistake_in_a_workload_names_its_key(compose_experiment, words, message):
    with pytest.raises(ConfigError, match=message):
        compose_experiment(*(f"workload.{word}" for word in words))


TRACED = ["workload.arrivals.kind=trace", "workload.concurrency=null"]


def test_a_trace_needs_the_timestamp_of_every_request_that_is_served(file, compose_experiment):
    lines = [{"prompt": "A", "timestamp": 0}, "", {"prompt": "B"}]
    with pytest.raises(ConfigError, match=r"requests\.jsonl, line 3: timestamp is missing, which"):
        file(lines, *TRACED)
    file(lines, *TRACED, "workload.num_requests=1")
    listed = ["prompts.source=listed", "prompts.listed=[{prompt:A,timestamp:0},{prompt:B}]"]
    with pytest.raises(ConfigError, match=r"workload\.prompts\.listed\[1\]: timestamp is missing"):
        compose_experiment(*(f"workload.{word}" for word in listed), *TRACED)


OWN_TIMES = """
from labkit.workload.requests.request_workload_kind import RequestKind
class Source:
    def lengths(self, experiment): return [(2, 3), (2, 3)]
class Timed(Source):
    def timestamps_ms(self, experiment): return [0.0, 3000.0]
class Untimed(Source):
    def timestamps_ms(self, experiment): return [0.0, None]
class Kind(RequestKind):
    name = "mine"
    def __init__(self): super().__init__(self.own())
class Plain(Kind): own = Source
class Right(Kind): own = Timed
class Wrong(Kind): own = Untimed
class Chat(RequestKind): name = "mine"
"""


def test_an_own_source_may_have_timestamps(compose_experiment, tmp_path, monkeypatch):
    from labkit import workload

    (tmp_path / "own_times.py").write_text(OWN_TIMES)
    monkeypatch.syspath_prepend(str(tmp_path))
    right = compose_experiment("workload.kind=own_times:Right", *TRACED)
    assert workload.kind_of(right)._last_arrival_s(right, 2) == 3.0
    for name, message in (
        ("Plain", r": its prompt source has no method timestamps_ms\(\), which"),
        ("Wrong", r", timestamps_ms\(\)\[1\]: timestamp is missing, which"),
        ("Chat", r", timestamps_ms\(\)\[0\]: timestamp is missing, which"),
    ):
        with pytest.raises(ConfigError, match=f"workload.kind=own_times:{name}{message}"):
            compose_experiment(f"workload.kind=own_times:{name}", *TRACED)


TRACE = [
    {"timestamp": 0, "input_length": 1300, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 100, "input_length": 1024, "output_length": 6, "hash_ids": [7, 8]},
    {"timestamp": 200, "input_length": 600, "output_length": 1, "hash_ids": [7, 3]},
    {"timestamp": 300, "input_length": 600, "output_length": 1},
]


def common(a, b):
    """Count the tokens with which both begin."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
    )


def test_prompts_of_a_trace_share_the_blocks_that_their_hashes_share(file):
    experiment = file(TRACE, source="trace")
    prompts = make_prompts(experiment)
    ids = [prompt.token_ids for prompt in prompts]
    assert list(map(len, ids)) == [1300, 1024, 600, 600]
    assert [p.max_tokens for p in prompts] == [5, 6, 1, 1]
    assert [p.timestamp_ms for p in prompts] == [0, 100, 200, 300]
    assert (common(ids[0], ids[1]), common(ids[0], ids[2]), common(ids[0], ids[3])) == (
        1024,
        512,
        0,
    )
    assert make_prompts(experiment) == prompts
    assert make_prompts(file(TRACE, "workload.prompts.seed=4", source="trace")) != prompts


@pytest.mark.parametrize("scale", [0.1, 0.37, 0.0005])
def test_a_scaled_trace_shares_the_same_fraction(file, scale):
    experiment = file(TRACE, f"workload.prompts.length_scale={scale}", source="trace")
    prompts = make_prompts(experiment)
    ids = [prompt.token_ids for prompt in prompts]
    lengths = source_of(experiment).lengths(experiment)
    assert [(len(p.token_ids), p.max_tokens) for p in prompts] == lengths
    assert lengths[0] == (max(1, round(1300 * scale)), max(1, round(5 * scale)))
    assert common(ids[0], ids[1]) == max(1, round(1024 * scale))
    assert common(ids[0], ids[2]) == max(1, round(512 * scale))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_length": 0}, "input_length=0: must be 1 to"),
        ({"timestamp": None}, "timestamp is missing"),
        (
            {"hash_ids": [1, 2]},
            r"hash_ids has 2 ids for input_length=1300; it must have 3 \(one per 512",
        ),
        ({"hash_ids": [1, 2, -3]}, "hash_ids: every id must be 0 to"),
        ({"hash_ids": 4}, "hash_ids: must be a list, not 4"),
        (
            {"text": "x"},
            "no key 'text'; the keys are: timestamp, input_length, output_length, hash_ids",
        ),
    ],
)
def test_a_mistake_in_a_trace_is_one_line(file, changes, message):
    with pytest.raises(ConfigError, match=r"requests\.jsonl, line 1: " + message):
        file([TRACE[0] | changes], source="trace")


def test_too_many_prompt_tokens_are_refused(file):
    long = {"timestamp": 0, "input_length": 1_000_000, "output_length": 1}
    with pytest.raises(
        ConfigError, match="about 21,000,000 prompt tokens, but may have at most 20,000,000"
    ):
        file([long] * 21, source="trace")
    file([long] * 21, "workload.num_requests=3", source="trace")


SESSIONS = [
    "workload=shared_prefixes",
    "workload.prompts.requests=12",
    "workload.prompts.turns=3",
    "workload.prompts.prefix_groups=2",
]


def test_synthetic_sessions_share_their_group_s_beginning_and_build_on_themselves(
    compose_experiment,
):
    experiment = compose_experiment(*SESSIONS)
    prompts = make_prompts(experiment)
    assert [(len(p.token_ids), p.max_tokens) for p in prompts] == [
        *KIND.source(experiment).lengths(experiment)
    ]
    assert [p.session for p in prompts] == [f"s{i:03d}" for i in range(4) for _ in range(3)]
    ids = [p.token_ids for p in prompts]
    for turn in (1, 2, 4, 5):
        before = prompts[turn - 1]
        assert ids[turn][: len(before.token_ids)] == before.token_ids
        assert len(ids[turn]) >= len(before.token_ids) + before.max_tokens + 32
    assert common(ids[0], ids[6]) == 256 and common(ids[0], ids[3]) < 8
    assert make_prompts(compose_experiment(*SESSIONS, "seed=5")) != prompts


@pytest.mark.parametrize(
    ("words", "sessions"),
    [
        (["workload=agent"], 6),
        (["workload=agent", "workload.num_requests=4"], 4),
        (["workload=ragged"], 32),
        (SESSIONS, 4),
        ([*SESSIONS, "workload.num_requests=4"], 2),
    ],
)
def test_a_plan_waits_for_the_sessions_that_arrive(compose_experiment, words, sessions):
    rate = ["arrivals.kind=constant", "arrivals.rate=0.5", "concurrency=null"]
    experiment = compose_experiment(*words, *(f"workload.{word}" for word in rate))
    assert KIND._last_arrival_s(experiment, KIND.units(experiment)) == sessions / 0.5


def test_a_request_without_a_session_counts_as_one(file):
    experiment = file([{"prompt": "Hi", "session": name} for name in ("a", None, "b", "a", None)])
    assert source_of(experiment).num_sessions(experiment) == 4


def test_unshared_prompts_have_the_same_lengths_and_no_common_prefix(compose_experiment):
    experiment = compose_experiment(*SESSIONS)
    model = resolve(experiment.model)
    shared = KIND._prompts(experiment, model)
    alone = KIND._prompts(compose_experiment(*SESSIONS, "workload.prompts.unshared=true"), model)
    assert [len(p.token_ids) for p in alone] == [len(p.token_ids) for p in shared]
    assert len({p.token_ids[0] for p in alone}) == len(alone)
    assert all(a.token_ids[1:] == s.token_ids[1:] for a, s in zip(alone, shared, strict=True))


def test_a_user_s_workload_kind_may_have_its_own_source(compose_experiment, tmp_path, monkeypatch):
    (tmp_path / "my_kind.py").write_text(
        "from labkit.workload.tokenized_prompt import Prompt\n"
        "from labkit.workload.requests.request_workload_kind import RequestKind\n"
        "class Source:\n"
        "    def identity(self, experiment): return {'mine': 1}\n"
        "    def make(self, experiment, model): return (Prompt('a', (1, 2), 3),)\n"
        "    def lengths(self, experiment): return [(2, 3)]\n"
        "class Kind(RequestKind):\n"
        "    name = 'mine'\n"
        "    def __init__(self): super().__init__(Source())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from labkit import workload

    experiment = compose_experiment("workload.kind=my_kind:Kind")
    kind = workload.kind_of(experiment)
    assert kind.source(experiment).lengths(experiment) == [(2, 3)]
    assert np.isfinite(workload.estimate(experiment).seconds)


def test_the_shared_prefix_draws_from_the_whole_vocabulary(compose_experiment):
    words = [
        "source=synthetic",
        "prefix_tokens=100000",
        "requests=1",
        "input={kind:fixed,tokens:1}",
    ]
    experiment = compose_experiment(
        "workload.name=mine", *(f"workload.prompts.{word}" for word in words)
    )
    (request,) = make_prompts(experiment)
    assert set(request.token_ids[:-1]) == set(range(resolve(experiment.model).vocab_size))


def own_experiment(num_requests=None):
    return Experiment(
        ablation=Ablation(arms={"base": {}}),
        model=Model(shape=ModelShape()),
        workload=Workload(name="own", kind="mine.kinds:Kind", num_requests=num_requests),
    )


def returned(method, value, num_requests=None):
    """Return the result of a method of a source that returns ``value``."""
    source = SimpleNamespace(**{"make" if method == "prompts" else method: lambda *_: value})
    arguments = (own_experiment(num_requests), *([None] if method == "prompts" else []))
    return getattr(sources, method)(source, *arguments)


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


SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Which bird is the smallest?"},
            {"from": "gpt", "value": "The bee hummingbird, of about two grams."},
            {"from": "human", "value": "And the largest?"},
            {"from": "gpt", "value": "The ostrich."},
        ],
    },
    {"id": "b", "conversations": [{"from": "human", "value": "Nobody answers this."}]},
    {
        "id": "c",
        "conversations": [
            {"from": "user", "value": "Count to three, père ✓"},
            {"from": "assistant", "value": "One, two, three."},
        ],
    },
]
CUSTOM = [
    {"prompt": "Name a river.", "output_tokens": 7, "source": "ours"},
    {"prompt": "Name two lakes and the country that each lies in."},
]
BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,,1.5,ChatGPT,472,18,490,Conversation log\n"
    "45,,0.1,ChatGPT,1087,0,1087,Conversation log\n"
    "118.5,,2.0,GPT-4,417,276,693,API log\n"
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
)


@pytest.fixture
def compose(tmp_path, compose_experiment):
    """Return a function that composes a workload whose prompts come from a file with this text."""

    def compose_with(source, text, *overrides):
        path = tmp_path / "trace"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        words = [f"workload.prompts.source={source}", f"workload.prompts.path='{path}'"]
        return compose_experiment("workload.name=mine", *words, *overrides)

    return compose_with


def test_a_sharegpt_request_is_the_first_question_and_the_length_of_its_answer(compose):
    experiment = compose("sharegpt", json.dumps(SHAREGPT, indent=2))
    first, second = make_prompts(experiment)
    reader = tokenizer.load(resolve(experiment.model).path)
    assert reader.decode(first.token_ids) == "Which bird is the smallest?"
    assert reader.decode(second.token_ids) == "Count to three, père ✓"
    answers = [SHAREGPT[0]["conversations"][2]["value"], SHAREGPT[2]["conversations"][1]["value"]]
    assert [p.max_tokens for p in (first, second)] == [len(reader.encode(a)) for a in answers]
    assert (
        len(make_prompts(compose("sharegpt", json.dumps(SHAREGPT), "workload.num_requests=1"))) == 1
    )


def test_items_that_do_not_fit_into_a_chunk_are_read_whole(compose, monkeypatch):
    monkeypatch.setattr(bounded_reader, "CHUNK_CHARACTERS", 7)
    assert len(make_prompts(compose("sharegpt", json.dumps(SHAREGPT, indent=2)))) == 2


def test_the_end_of_a_large_file_is_not_read(compose):
    text = json.dumps(SHAREGPT[:1])[:-1] + ", " + "[" * 10
    assert len(make_prompts(compose("sharegpt", text, "workload.num_requests=1"))) == 1
    with pytest.raises(ConfigError, match="item 2 is not valid JSON, perhaps cut"):
        compose("sharegpt", text)


def test_a_custom_request_has_its_output_tokens_or_the_workloads(compose):
    text = "\n".join(map(json.dumps, CUSTOM))
    words = ["workload.prompts.output={kind:fixed,tokens:9}"]
    experiment = compose("vllm_custom", text, *words)
    first, second = make_prompts(experiment)
    decode = tokenizer.load(resolve(experiment.model).path).decode
    assert decode(first.token_ids) == "Name a river."
    assert (first.max_tokens, second.max_tokens) == (7, 9)
    assert first.messages == ({"role": "user", "content": "Name a river."},)


@pytest.mark.parametrize(
    ("source", "text", "lengths", "times"),
    [
        ("burstgpt", BURSTGPT, [(472, 18), (417, 276)], [0.0, 113_500.0]),
        ("azure", AZURE, [(374, 44), (396, 109)], [0.0, 4314.579]),
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2024-05-10 00:00:00.25+00:00,3,4\n2024-05-10 02:00:01.5+02:00,5,6\n",
            [(3, 4), (5, 6)],
            [0.0, 1250.0],
        ),
    ],
)
def test_a_table_gives_lengths_and_times_from_its_first_request(
    compose, source, text, lengths, times
):
    experiment = compose(source, text, "workload.arrivals.kind=trace", "workload.concurrency=null")
    prompts = make_prompts(experiment)
    assert [(len(p.token_ids), p.max_tokens) for p in prompts] == lengths
    assert source_of(experiment).lengths(experiment) == lengths
    assert [p.timestamp_ms for p in prompts] == pytest.approx(times, abs=2e-3)
    shorter = compose(source, text, "workload.prompts.length_scale=0.5")
    assert [len(p.token_ids) for p in make_prompts(shorter)] == [round(n / 2) for n, _ in lengths]


HEADER = AZURE.splitlines()[0] + "\n"
DAY = "2023-11-16 18:15:46,"


@pytest.mark.parametrize(
    ("source", "text", "message"),
    [
        ("azure", BURSTGPT, r"trace, line 1: there is no column 'TIMESTAMP'; it must be a CSV"),
        ("azure", "", "trace, line 1: there is no column"),
        ("azure", HEADER, "trace has no requests"),
        ("azure", HEADER + "yesterday,1,2\n", "line 2: TIMESTAMP is 'yesterday', not a time"),
        ("azure", HEADER + DAY + "1\n", "line 2 has only 2 values"),
        ("azure", HEADER + DAY + "-1,2\n", "line 2: ContextTokens is '-1', not a whole number"),
        ("azure", HEADER + DAY + "nan,2\n", "line 2: ContextTokens is 'nan', not a whole"),
        ("azure", HEADER + DAY + "1e300,2\n", "line 2: ContextTokens is '1e300', not a"),
        ("azure", HEADER + DAY + "9999999,2\n", "line 2: input_length=9999999: must be 1"),
        ("azure", HEADER + "x" * 70_000, "line 2 has more than 65,536 characters"),
        ("azure", HEADER + '"' + "\n" * 9, "trace, line .*: unexpected end of data"),
        ("azure", HEADER.encode() + b"\xff\n", "trace is not UTF-8"),
        ("azure", HEADER + DAY + "1,2\n2022-01-01,1,2\n", "line 3: timestamp=-.*: must be 0 to"),
        ("burstgpt", BURSTGPT.replace("118.5", "inf"), "line 4: Timestamp is 'inf', not a time"),
        ("burstgpt", BURSTGPT.replace("417", "4.5"), "line 4: Request tokens is '4.5', not a"),
        ("sharegpt", "{}", "trace is not a JSON array"),
        ("sharegpt", "", "trace is not a JSON array"),
        ("sharegpt", "[]", "trace has no requests"),
        ("sharegpt", "[3]", "item 1 is not an object with a list 'conversations'"),
        ("sharegpt", '[{"conversations": 3}]', "item 1 is not an object with a list 'conv"),
        ("sharegpt", '[{"conversations": [1, 2]}]', "item 1: a turn is not an object with"),
        ("sharegpt", '[{"conversations": []} {}]', "is not a JSON array .a comma or "),
        ("sharegpt", '[{"conversations": []}, ]', "item 2 is not valid JSON"),
        ("sharegpt", "[" * 100_000, "item 1 is not valid JSON: maximum recursion"),
        ("sharegpt", "[NaN]", "item 1 is not valid JSON, perhaps cut: JSON has no NaN"),
        ("sharegpt", b'["\xff"]', "trace is not UTF-8"),
        ("vllm_custom", '{"output_tokens": 3}', "line 1: prompt is missing"),
        ("vllm_custom", '{"prompt": ""}', "line 1: messages has 0 characters; it must have 1"),
        ("vllm_custom", '{"prompt": "x", "output_tokens": 0}', "line 1: output_tokens=0: must be"),
        ("vllm_custom", '{"prompt": ["x"]}', "line 1: prompt=.*: must be of type str"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_its_place(compose, source, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_prompts(compose(source, text))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_an_item_that_never_ends_is_refused_before_it_fills_the_memory(compose, monkeypatch):
    monkeypatch.setattr(bounded_reader, "CHUNK_CHARACTERS", 1 << 10)
    monkeypatch.setattr(bounded_reader, "MAX_ITEM_CHARACTERS", 1 << 14)
    with pytest.raises(ConfigError, match="item 1 is not valid JSON, or has more than 16,384 char"):
        compose("sharegpt", '["' + "x" * (1 << 18))


def test_more_requests_than_a_workload_may_have_name_the_option(compose, monkeypatch):
    monkeypatch.setattr(bounded_reader, "MAX_REQUESTS", 1)
    with pytest.raises(ConfigError, match=r"more than 1 requests; set workload\.num_requests"):
        compose("azure", AZURE)


@pytest.mark.parametrize("source", ["sharegpt", "vllm_custom", "burstgpt", "azure"])
def test_a_missing_file_or_a_folder_is_one_line(compose_experiment, source, tmp_path):
    for path, expected in ((tmp_path / "none", "No such file"), (tmp_path, "not a file")):
        words = [f"workload.prompts.source={source}", f"workload.prompts.path='{path}'"]
        with pytest.raises(ConfigError, match=expected):
            compose_experiment(*words)
