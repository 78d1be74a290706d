"""Texts become windows of equal length; a wrong file is one line."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from labkit.analysis.statistics import text_window_intervals
from labkit.config import ConfigError, Model, ModelShape
from labkit.models import resolve, tokenizer
from labkit.workload.scoring import text_windows
from labkit.workload.scoring.text_windows import (
    MIN_JUDGED_WINDOWS,
    TextWindows,
    check_windows,
    windows_of,
)
from labkit.workload.tokenized_prompt import Prompt

SCORING = ("workload=scoring", "model=tiny")


def test_windows_do_not_overlap_and_have_equal_length(compose_experiment, tmp_path):
    file = tmp_path / "texts.jsonl"
    texts = ["one two three four " * 20, "five six seven eight " * 20]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = (*SCORING, f"workload.texts={file}", "workload.window_tokens=16")
    experiment = compose_experiment(*options)
    model = resolve(experiment.model)
    windows = windows_of(experiment, model)
    expected = []
    for text in texts:
        tokens = tokenizer.load(model.path).encode(text)
        expected += [tuple(tokens[i : i + 16]) for i in range(0, len(tokens) - 15, 16)]
    assert [window.token_ids for window in windows] == expected
    assert len({window.request_id for window in windows}) == len(windows)
    assert windows_of(compose_experiment(*options, "workload.num_windows=3"), model) == windows[:3]


def with_special_tokens(model, folder, template):
    """Copy a model; its tokenizer adds ``<|bos|>`` or ``<|eos|>`` to a text as in ``template``."""
    import tokenizers
    from tokenizers import processors

    shutil.copytree(model.path, folder)
    changed = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(token, changed.token_to_id(token)) for token in ("<|bos|>", "<|eos|>")]
    changed.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    changed.save(str(folder / "tokenizer.json"))
    return resolve(Model(name="local", path=str(folder)))


@pytest.mark.parametrize("template", ["<|bos|> $A", "<|bos|> $A <|eos|>", "$A <|eos|>"])
def test_every_window_begins_with_the_bos_that_the_tokenizer_adds(
    template, compose_experiment, tmp_path, monkeypatch
):
    file = tmp_path / "a.txt"
    file.write_text("one two three four " * 20)
    experiment = compose_experiment(*SCORING, f"workload.texts={file}", "workload.window_tokens=8")
    plain = resolve(experiment.model)
    model = with_special_tokens(plain, tmp_path / "model", template)
    tokens = tokenizer.load(plain.path).encode(file.read_text())
    bos, eos = (tokenizer.load(plain.path).token_id(token) for token in ("<|bos|>", "<|eos|>"))
    tokens += [eos] if "eos" in template else []
    prefix = [bos] if "bos" in template else []
    step = 8 - len(prefix)
    starts = range(0, len(tokens) - step + 1, step)
    monkeypatch.setattr(text_windows.cache_entries, "root", lambda: tmp_path)
    windows = windows_of(experiment, model)
    assert len(windows) == 10 + len(prefix)
    assert [list(w.token_ids) for w in windows] == [prefix + tokens[i : i + step] for i in starts]
    assert [w.request_id for w in windows] == [f"text 1, token {i}" for i in starts]


def test_a_window_without_room_for_text_is_one_line(compose_experiment, tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("one two three four")
    experiment = compose_experiment(*SCORING, f"workload.texts={file}", "workload.window_tokens=2")
    model = with_special_tokens(resolve(experiment.model), tmp_path / "model", "<|bos|> <|bos|> $A")
    monkeypatch.setattr(text_windows.cache_entries, "root", lambda: tmp_path)
    with pytest.raises(ConfigError, match="begins with the model's 2 special tokens; set a larger"):
        windows_of(experiment, model)


@pytest.mark.parametrize("damage", [b"", b"no table", "float", "narrow"])
def test_a_damaged_cache_file_is_made_again(damage, compose_experiment, tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("one two three four " * 20)
    experiment = compose_experiment(*SCORING, f"workload.texts={file}", "workload.window_tokens=16")
    model = resolve(experiment.model)
    monkeypatch.setattr(text_windows.cache_entries, "root", lambda: tmp_path)
    windows = list(windows_of(experiment, model))
    (cached,) = tmp_path.glob("workloads/*")
    table = np.load(cached)
    assert table.dtype == np.int32 and table.shape == (len(windows), 18)
    if isinstance(damage, bytes):
        cached.write_bytes(damage)
    else:
        np.save(cached, table.astype(np.float32) if damage == "float" else table[:, 1:])
    assert list(windows_of(experiment, model)) == windows
    assert np.load(cached).tolist() == table.tolist()


def test_windows_take_4_bytes_a_token():
    table = np.arange(3 * 18, dtype=np.int32).reshape(3, 18) + 100_000
    windows = TextWindows(table)
    assert windows.table.nbytes == 4 * table.size
    last = Prompt("text 100036, token 100037", tuple(range(100_038, 100_054)), 1)
    assert windows[2] == windows[-1] == list(windows)[2] == last
    assert all(type(token) is int for token in last.token_ids)
    assert windows[1:] == TextWindows(table[1:]) and windows[1:] != windows[:2]
    with pytest.raises(IndexError):
        windows[3]


def refusal(texts, window_tokens):
    """Return why a plan refuses these texts, or a million windows of them."""
    workload = SimpleNamespace(
        name="scoring", texts=texts, window_tokens=window_tokens, num_windows=1_000_000
    )
    with pytest.raises(ConfigError) as caught:
        check_windows(SimpleNamespace(workload=workload, model=Model(shape=ModelShape())))
    return str(caught.value)


def test_the_packaged_texts_are_articles():
    """Ten, each longer than a window; the corpus goes on with single questions."""
    (windows,) = re.findall(r"has at most (\d+) windows of 4000 tokens", refusal(None, 4000))
    assert 10 <= int(windows) < 20


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, content in (("a.txt", "a\ufeff b"), ("a.jsonl", '{"text": "a\ufeff b"}\n')):
        (tmp_path / name).write_text(f"\ufeff{content}", "utf-8")
        assert "text 1 has only 6 bytes" in refusal(str(tmp_path / name), 9)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", None, "No such file"),
        ("a.txt", b" \n", "is empty"),
        ("a.txt", (256 << 20) + 1, "has 268,435,457 bytes; the maximum is 268,435,456"),
        ("a.txt", b"caf\xe9", "is not UTF-8 at byte 3"),
        ("a.jsonl", b'{"text": "a"}\n{', "line 2 is not valid JSON"),
        ("a.jsonl", b'{"prompt": "a"}', r'line 1: must be an object such as {"text": "..."}'),
    ],
)
def test_a_wrong_file_is_one_line(name, content, reason, tmp_path):
    if isinstance(content, int):
        with (tmp_path / name).open("wb") as file:
            file.truncate(content)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    said = refusal(str(tmp_path / name), 1)
    assert reason in said and "\n" not in said


@pytest.fixture
def texts_of_40_tokens(tmp_path):
    """The option of a text of 40 words and 190 bytes, and of windows of 8 tokens."""
    file = tmp_path / "a.txt"
    file.write_text("one two three four " * 10)
    return (f"workload.texts={file}", "workload.window_tokens=8")


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("workload.window_tokens=150", "text 1 has only"),
        ("workload.num_windows=20", "has only"),
    ],
)
def test_windows_that_do_not_exist_are_one_line(
    option, reason, compose_experiment, texts_of_40_tokens
):
    experiment = compose_experiment(*SCORING, *texts_of_40_tokens, option)
    with pytest.raises(ConfigError, match=reason) as caught:
        windows_of(experiment, resolve(experiment.model))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("workload.window_tokens=200", "text 1 has only 190 bytes, and a token has one or more"),
        ("workload.window_tokens=50000", "context of 40960 tokens; set workload.window_tokens to"),
        ("workload.num_windows=24", "has at most 23 windows of 8 tokens"),
    ],
)
def test_a_plan_finds_impossible_windows_before_the_model_is_built(
    option, reason, compose_experiment, texts_of_40_tokens, no_cache
):
    with pytest.raises(ConfigError, match=reason) as caught:
        compose_experiment(*SCORING, *texts_of_40_tokens, option)
    assert "\n" not in str(caught.value) and not no_cache.exists()


def test_limits_on_quality_need_windows_for_an_interval(compose_experiment, texts_of_40_tokens):
    assert MIN_JUDGED_WINDOWS == text_window_intervals.MIN_WINDOWS
    limit = ("ablation.claims.identity=quality", "ablation.claims.quality.kl_mean=0.1")
    options = (*SCORING, *texts_of_40_tokens)
    compose_experiment(*options, *limit, "workload.num_windows=16")
    compose_experiment(*options, "workload.num_windows=15")
    message = r"ablation.claims.quality.kl_mean: 15 windows cannot decide it; score 16 or more"
    with pytest.raises(ConfigError, match=message):
        compose_experiment(*options, *limit, "workload.num_windows=15")


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("workload.window_tokens=150", "text 1 has only"),
        ("workload.window_tokens=50000", "context of 40960 tokens"),
        ("workload.num_windows=20", "has only"),
    ],
)
def test_a_plan_counts_the_tokens_of_a_model_that_is_there(
    option, reason, compose_experiment, texts_of_40_tokens
):
    path = resolve(compose_experiment("model=tiny").model).path
    local = ("workload=scoring", "model=local", f"model.path={path}")
    check_windows(compose_experiment(*local, *texts_of_40_tokens))
    with pytest.raises(ConfigError, match=reason):
        compose_experiment(*local, *texts_of_40_tokens, option)
