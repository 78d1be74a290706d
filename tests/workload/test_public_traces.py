"""Files of ShareGPT, vLLM's custom dataset, BurstGPT and Azure: requests, limits and mistakes."""

import json

import pytest

from labkit.config import ConfigError
from labkit.models import resolve, tokenizer
from labkit.workload.sources import bounded_reader, source_of

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


def make_prompts(experiment):
    return source_of(experiment).make(experiment, resolve(experiment.model))


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
