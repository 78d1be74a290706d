import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from labkit.config import ConfigError, Model, ModelShape
from labkit.models import resolve
from labkit.models.synthetic import synthetic_model
from labkit.models.synthetic.synthetic_model import corpus_texts

TINY = Model(name="tiny", shape=ModelShape())
LITTLE = ModelShape(
    hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512,
    intermediate_size=96,
)  # fmt: skip


def bytes_of(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


BUILD = """
import json, pathlib
from labkit.config import Model, ModelShape
from labkit.models import resolve
model_dir = resolve(Model(name="tiny", shape=ModelShape()))
print(json.dumps([str(model_dir.path), model_dir.digest]))
"""


def in_fresh_process(code, **variables):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=dict(os.environ) | variables,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_two_builds_give_the_same_bytes(tmp_path):
    built = []
    for place, hash_seed in (("one", "1"), ("two", "2")):
        cache = tmp_path / place
        path, digest = in_fresh_process(BUILD, LABKIT_CACHE=str(cache), PYTHONHASHSEED=hash_seed)
        (folder,) = (cache / "models").iterdir()
        assert str(folder) == path
        built.append((folder.name, digest, bytes_of(folder)))
    assert built[0] == built[1]
    assert len(built[0][2]) == 4 + 1  # and the list of files


def test_the_second_use_builds_nothing(no_cache, monkeypatch):
    first = resolve(Model(name="little", shape=LITTLE))
    monkeypatch.setattr(synthetic_model.ModelRecipe, "write", None)
    assert resolve(Model(name="little", shape=LITTLE)) == first


def test_the_facts_of_a_built_model(no_cache):
    model_dir = resolve(Model(name="little", shape=LITTLE))
    assert model_dir.path.parent == no_cache / "models"
    assert model_dir.name == "little"
    assert model_dir.vocab_size == 512
    assert model_dir.eos_token_ids == (511,)
    loaded = load_file(model_dir.path / "model.safetensors")
    assert {tensor.dtype for tensor in loaded.values()} == {np.dtype(np.float32)}


def test_the_key_depends_on_every_input(monkeypatch):
    base = synthetic_model.ModelRecipe(shape=LITTLE, seed=0, texts=("a",))
    others = [
        synthetic_model.ModelRecipe(shape=LITTLE, seed=1, texts=("a",)),
        synthetic_model.ModelRecipe(shape=LITTLE, seed=0, texts=("a", "b")),
        synthetic_model.ModelRecipe(shape=ModelShape(), seed=0, texts=("a",)),
    ]
    keys = {base.key, *(other.key for other in others)}
    monkeypatch.setattr(synthetic_model, "version", lambda _: "0")
    keys.add(base.key)
    monkeypatch.setattr(synthetic_model, "RECIPE_VERSION", "other")
    keys.add(base.key)
    assert len(keys) == 6


def test_a_seed_changes_every_matrix_and_a_tensor_does_not_depend_on_the_others():
    first, second = (synthetic_model.make_weights(LITTLE, seed=seed) for seed in (0, 1))
    for name, tensor in first.items():
        assert (tensor.ndim == 1) == np.array_equal(tensor, second[name])
    matrices = [t for t in first.values() if t.ndim == 2]
    assert len({t.ravel()[:8].tobytes() for t in matrices}) == len(matrices)
    deeper = ModelShape(**(vars(LITTLE) | {"num_layers": 3}))
    deeper_weights = synthetic_model.make_weights(deeper, seed=0)
    assert all(np.array_equal(tensor, deeper_weights[name]) for name, tensor in first.items())


def test_every_layer_has_norms_of_queries_and_keys_that_sharpen_the_attention():
    shape = ModelShape(num_layers=2)
    weights = synthetic_model.make_weights(shape, seed=1)
    for layer in range(2):
        for name in ("q_norm", "k_norm"):
            gain = weights[f"model.layers.{layer}.self_attn.{name}.weight"]
            assert gain.shape == (shape.head_dim,) and np.all(gain == synthetic_model.QK_GAIN)


def test_an_interrupted_build_leaves_no_model(no_cache, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(synthetic_model, "make_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve(Model(name="little", shape=LITTLE))
    assert list((no_cache / "models").iterdir()) == []


GREEDY = """
import json
from labkit.machine import openblas_for_mlx
openblas_for_mlx.activate("openblas", 1)
import mlx.core as mx, mlx_lm, numpy as np
from mlx_lm.generate import generate_step
from labkit.config import Model, ModelShape
from labkit.models import resolve, tokenizer
from labkit.models.synthetic.synthetic_model import corpus_texts
folder = resolve(Model(name="tiny", shape=ModelShape())).path
model, theirs = mlx_lm.load(str(folder))
ours = tokenizer.load(folder)
answers, elsewhere = [], []
for text in corpus_texts()[:4]:
    ids = ours.encode(text[:400])
    elsewhere += [int(t) for t, _ in generate_step(mx.array([*ids[:-1], 300]), model, max_tokens=1)]
    steps = [(t, np.sort(np.array(p))) for t, p in
             generate_step(mx.array(ids), model, max_tokens=24)]
    answers.append({
        "tokens": [int(t) for t, _ in steps],
        "margins": [float(p[-1] - p[-2]) for _, p in steps],
        "entropies": [float(-(np.exp(p) * p).sum()) for _, p in steps],
        "range": float(steps[0][1][-1] - steps[0][1][0]),
    })
print(json.dumps({
    "answers": answers,
    "elsewhere": elsewhere,
    "same_ids": all(ours.encode(t) == theirs.encode(t) for t in corpus_texts()),
    "round_trip": all(theirs.decode(theirs.encode(t)) == t for t in corpus_texts()),
    "eos": sorted(theirs.eos_token_ids),
    "dtypes": sorted({str(v.dtype) for _, v in mlx_lm.utils.tree_flatten(model.parameters())}),
}))
"""


def test_the_real_mlx_lm_loads_it_and_its_answers_are_not_degenerate():
    """The same last token after another prefix must give another prediction, too."""
    result = in_fresh_process(GREEDY)
    assert len(set(result["elsewhere"])) >= 3
    assert result["same_ids"]
    assert result["round_trip"]
    assert result["eos"] == [4095]
    assert result["dtypes"] == ["mlx.core.float32"]
    answers = result["answers"]
    assert len({tuple(answer["tokens"]) for answer in answers}) == len(answers)
    for answer in answers:
        assert len(set(answer["tokens"])) > 12  # of 24: no loop, no single winner
        assert np.median(answer["margins"]) > 0.005 * answer["range"]
        assert 1 < np.mean(answer["entropies"]) < np.log(4096) - 1  # sampling has a choice


def test_the_corpus_round_trips_through_the_tokenizer_of_tiny():
    from labkit.models import tokenizer

    loaded = tokenizer.load(resolve(TINY).path)
    for text in corpus_texts():
        assert loaded.decode(loaded.encode(text)) == text
    names = {loaded.decode([i]) for i in range(256, loaded.vocab_size)}
    assert len(names) > 3800  # a few merges are halves of the same multi-byte characters


def test_the_corpus_texts_exist_in_a_fixed_order():
    texts = corpus_texts()
    assert texts == corpus_texts()
    assert sum(map(len, texts)) > 40_000


def make_package(folder, texts, questions):
    (folder / "workload" / "texts").mkdir(parents=True)
    for name, text in texts.items():
        (folder / "workload" / "texts" / name).write_text(text)
    if questions is not None:
        (folder / "workload" / "questions.json").write_text(questions)
    return folder


def test_the_corpus_is_texts_by_name_then_question_strings(tmp_path):
    package = make_package(
        tmp_path,
        {"b.md": "second", "a.md": "first", "c.txt": "not a text"},
        '[{"question": "why?", "text": null}, {"more": ["how?", 3]}]',
    )
    assert corpus_texts(package) == ("first", "second", "why?", "how?")


@pytest.mark.parametrize(
    ("texts", "questions", "missing"),
    [({}, "[]", "texts"), ({"a.md": "x"}, None, "questions.json"), ({"a.txt": "x"}, "[]", "texts")],
)
def test_an_incomplete_installation_is_an_error(tmp_path, texts, questions, missing):
    with pytest.raises(ConfigError, match=missing):
        corpus_texts(make_package(tmp_path, texts, questions))


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="has no workload"):
        corpus_texts(tmp_path)
