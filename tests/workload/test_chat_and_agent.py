"""Prompts about packaged texts: questions and sessions of agents, with and without a template."""

import json
import shutil
from collections import Counter
from itertools import pairwise
from statistics import quantiles

import pytest

from labkit.config import ConfigError, Experiment, Model, from_plain
from labkit.models import resolve, tokenizer
from labkit.workload.sources import chat_and_agent, source_of

TEXTS = sorted((chat_and_agent.PACKAGE_DIR / "texts").glob("*.md"))
SESSIONS = chat_and_agent.SESSIONS
TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message.role }}\n{{ message.content }}<|eos|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


def experiment(source="agent", seed=0, path=None, **workload):
    plain = {
        "model": {"name": "local", "path": str(path)} if path else {"shape": {}},
        "workload": {"name": source, "prompts": {"source": source}, **workload},
        "ablation": {"arms": {"base": {}}},
        "seed": seed,
    }
    return from_plain(Experiment, plain)


def make_prompts(*options, **more):
    configured = experiment(*options, **more)
    return source_of(configured).make(configured, resolve(configured.model))  # not what is cached


@pytest.fixture(scope="module")
def plain_dir():
    return resolve(from_plain(Model, {"shape": {}})).path


@pytest.fixture
def chat_dir(plain_dir, tmp_path):
    folder = shutil.copytree(plain_dir, tmp_path / "with_template")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def check_turns(prompts, more_tokens):
    """Check that every turn's prompt begins with that of its session's previous turn."""
    turns = [prompts[i : i + SESSIONS] for i in range(0, len(prompts), SESSIONS)]
    assert len(turns) == len(chat_and_agent.TURN_QUESTIONS)
    for before, after in pairwise(turns):
        for prompt in after:
            past = [p for p in before if prompt.token_ids[: len(p.token_ids)] == p.token_ids]
            assert len(past) == 1
            assert len(prompt.token_ids) > len(past[0].token_ids) + more_tokens


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_turn_begins_with_the_session_s_previous_prompt(seed):
    prompts = make_prompts(seed=seed)
    check_turns(prompts, 20)
    assert len({p.token_ids for p in prompts}) == len(prompts)


def test_sessions_share_only_the_instruction():
    all_prompts = make_prompts()
    encode = tokenizer.load(resolve(experiment().model).path).encode
    system = tuple(encode(chat_and_agent.system()))
    assert 400 <= len(system) <= 700
    assert all(p.token_ids[: len(system)] == system for p in all_prompts)
    assert len({p.token_ids[len(system) : len(system) + 32] for p in all_prompts}) == SESSIONS


def test_prompts_depend_on_the_seed_and_a_smaller_count_is_a_prefix():
    assert make_prompts() == make_prompts() != make_prompts(seed=1)
    assert make_prompts(num_requests=9) == make_prompts()[:9]
    with pytest.raises(ConfigError, match=r"workload\.num_requests=25: agent has only 24 requests"):
        make_prompts(num_requests=25)


def test_the_estimate_is_near_and_output_lengths_are_ragged():
    estimated = chat_and_agent.AGENT.lengths(experiment())
    all_prompts = make_prompts()
    assert sum(p for p, _ in estimated) == pytest.approx(
        sum(len(p.token_ids) for p in all_prompts), rel=0.2
    )
    assert [o for _, o in estimated] == [p.max_tokens for p in all_prompts]
    assert min(o for _, o in estimated) < 20 < 30 < max(o for _, o in estimated)


def test_a_question_is_one_user_message(plain_dir, chat_dir):
    reader = tokenizer.load(chat_dir)
    texts = [q.prompt for q in chat_and_agent.questions()]
    both = (make_prompts("chat", path=path) for path in (plain_dir, chat_dir))
    for plain, templated in zip(*both, strict=True):
        text = reader.decode(plain.token_ids)
        assert text in texts
        assert (
            reader.decode(templated.token_ids) == f"<|bos|>user\n{text}<|eos|>\n<|bos|>assistant\n"
        )
        bos = reader.token_id("<|bos|>")
        assert templated.token_ids.count(bos) == 2 and bos not in plain.token_ids
        assert templated.max_tokens == plain.max_tokens


def test_a_session_s_turn_begins_with_the_one_before_it(chat_dir):
    reader = tokenizer.load(chat_dir)
    prompts = make_prompts(path=chat_dir)
    check_turns(prompts, 0)
    system = f"<|bos|>system\n{chat_and_agent.system()}<|eos|>\n<|bos|>user\nDocument: "
    last = reader.decode(prompts[-1].token_ids)
    assert last.startswith(system) and last.endswith("<|bos|>assistant\n")
    assert last.count("<|bos|>assistant\nIt says: ") == len(chat_and_agent.TURN_QUESTIONS) - 1


def paragraphs(text):
    return [p.strip() for p in text.split("\n\n") if p.strip()]


def test_there_are_at_least_eight_texts_of_an_article_s_length():
    assert len(TEXTS) >= 8
    for path in TEXTS:
        assert 900 <= len(path.read_text("utf-8").split()) <= 1400, path.name


def test_no_paragraph_occurs_twice_anywhere():
    seen = Counter(p for path in TEXTS for p in paragraphs(path.read_text("utf-8")))
    assert [p for p, count in seen.items() if count > 1] == []


def test_no_prompt_repeats_a_paragraph_or_a_long_phrase():
    for question in chat_and_agent.questions():
        parts = Counter(paragraphs(question.prompt))
        assert max(parts.values()) == 1, question.question
        words = question.prompt.split()
        phrases = Counter(tuple(words[i : i + 20]) for i in range(len(words) - 20))
        assert max(phrases.values(), default=1) == 1, question.question


def test_the_64_questions_are_distinct_and_of_all_three_kinds():
    questions = chat_and_agent.questions()
    assert len(questions) == 64
    assert len({q.question for q in questions}) == 64
    assert len({q.prompt for q in questions}) == 64
    entries = json.loads((chat_and_agent.PACKAGE_DIR / "questions.json").read_text("utf-8"))
    general = sum("text" not in e for e in entries)
    part = sum("paragraphs" in e for e in entries)
    assert min(general, part, 64 - general - part) >= 10
    assert {e["text"] for e in entries if "text" in e} == {path.stem for path in TEXTS}


def test_an_excerpt_is_whole_paragraphs_of_its_text():
    entries = json.loads((chat_and_agent.PACKAGE_DIR / "questions.json").read_text("utf-8"))
    for entry, question in zip(entries, chat_and_agent.questions(), strict=True):
        if "paragraphs" not in entry:
            continue
        whole = (chat_and_agent.PACKAGE_DIR / "texts" / f"{entry['text']}.md").read_text("utf-8")
        first, last = entry["paragraphs"]
        assert 0 <= first <= last < len(whole.strip().split("\n\n"))
        assert question.text in whole and len(question.text) > 100


def test_the_order_depends_on_the_seed_and_a_smaller_count_is_a_prefix():
    assert chat_and_agent.plan(0, 64) == chat_and_agent.plan(0, 64)
    assert chat_and_agent.plan(0, 64) != chat_and_agent.plan(1, 64)
    assert chat_and_agent.plan(0, 64)[:10] == chat_and_agent.plan(0, 10)
    order = [question for question, _ in chat_and_agent.plan(0, 64)]
    assert sorted(order) == list(range(64))
    assert any(b < a for a, b in pairwise(order))


@pytest.mark.parametrize("seed", range(5))
def test_output_lengths_are_ragged_around_forty(seed):
    lengths = sorted(output for _, output in chat_and_agent.plan(seed, 64))
    assert lengths[0] >= 8 and lengths[-1] <= 128
    assert 30 <= lengths[32] <= 55
    assert lengths[-1] > 2 * lengths[16]


def test_half_of_the_output_lengths_lie_within_a_factor_of_two_and_a_quarter():
    """A log-normal of sigma 0.6: its quartiles' ratio is exp(1.349 x 0.6) = 2.25."""
    lengths = [output for seed in range(20) for _, output in chat_and_agent.plan(seed, 64)]
    first, middle, third = quantiles(lengths, n=4)
    assert third / first == pytest.approx(2.25, rel=0.1) and middle == pytest.approx(40, rel=0.1)
