"""Chat and agent prompts of a model that has a chat template."""

import json
import shutil
from itertools import pairwise

import pytest

from labkit.config import Experiment, Model, from_plain
from labkit.models import resolve, tokenizer
from labkit.workload.sources import agent, packaged_questions, source_of

TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message.role }}\n{{ message.content }}<|eos|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


def experiment(kind, path):
    options = {
        "model": {"name": "local", "path": str(path)},
        "workload": {"name": kind, "prompts": {"source": kind}},
        "ablation": {"arms": {"base": {}}},
    }
    return from_plain(Experiment, options)


@pytest.fixture(scope="module")
def plain_dir():
    return resolve(from_plain(Model, {"shape": {}})).path


@pytest.fixture
def chat_dir(plain_dir, tmp_path):
    folder = shutil.copytree(plain_dir, tmp_path / "with_template")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def make_prompts(kind, path):
    configured = experiment(kind, path)
    return source_of(configured).make(configured, resolve(configured.model))  # not what is cached


def test_a_question_is_one_user_message(plain_dir, chat_dir):
    reader = tokenizer.load(chat_dir)
    texts = [q.prompt for q in packaged_questions.questions()]
    for plain, templated in zip(
        make_prompts("chat", plain_dir),
        make_prompts("chat", chat_dir),
        strict=True,
    ):
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
    prompts = make_prompts("agent", chat_dir)
    turns = [prompts[i : i + agent.SESSIONS] for i in range(0, len(prompts), agent.SESSIONS)]
    for before, after in pairwise(turns):
        for prompt in after:
            past = [p for p in before if prompt.token_ids[: len(p.token_ids)] == p.token_ids]
            assert len(past) == 1
    system = f"<|bos|>system\n{agent.system()}<|eos|>\n<|bos|>user\nDocument: "
    last = reader.decode(prompts[-1].token_ids)
    assert last.startswith(system) and last.endswith("<|bos|>assistant\n")
    assert last.count("<|bos|>assistant\nIt says: ") == len(agent.QUESTIONS) - 1
