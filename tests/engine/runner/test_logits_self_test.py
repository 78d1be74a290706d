"""The expected logits: computed once per model, by one thread of NumPy's BLAS."""

import os
import shutil

import numpy as np
import pytest

from labkit import config
from labkit.engine import create
from labkit.engine.runner import logits_self_test, shared_models
from labkit.engine.runner.logits_self_test import ExpectedLogitsCache
from labkit.machine import numpy_blas_threads


@pytest.fixture
def computed(monkeypatch):
    """The block sizes of the models whose expected logits are computed, and an empty cache."""
    sizes, compute = [], logits_self_test.compute_expected
    monkeypatch.setattr(logits_self_test, "EXPECTED_LOGITS", ExpectedLogitsCache(max_models=2))

    def count(loaded, block_size, stored):
        def counted(sequences, run):
            return stored(sequences, lambda: sizes.append(block_size) or run())

        return compute(loaded, block_size, counted)

    monkeypatch.setattr(logits_self_test, "compute_expected", count)
    return sizes


def load(path, block_size=16):
    options = config.Engine(kv=config.KV(block_size=block_size), budget=config.Budget(blocks=20))
    create(options, path).close()


def test_a_model_that_is_loaded_again_is_not_computed_again(computed, model_dir, tmp_path):
    path = shutil.copytree(model_dir("qwen3"), tmp_path / "model")
    load(path)
    load(path)
    assert computed == [16]
    load(path, block_size=8)
    assert computed == [16, 8]
    load(path)
    assert computed == [16, 8]
    os.utime(path / "model.safetensors", ns=(0, 0))
    load(path)
    assert computed == [16, 8, 16]
    load(path, block_size=8)  # the model used longest ago was dropped
    assert computed == [16, 8, 16, 8]


def test_other_weights_under_the_same_name_are_compared_with_their_own_logits(
    computed, model_dir, tmp_path
):
    from safetensors.numpy import load_file, save_file

    path = shutil.copytree(model_dir("qwen3"), tmp_path / "model")
    load(path)
    weights = load_file(path / "model.safetensors")
    other = tmp_path / "other.safetensors"
    save_file({k: v * np.float32(0.5) for k, v in weights.items()}, other)
    file = path / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as stream:  # in place, and with the old modification time
        stream.write(other.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    load(path)
    assert len(computed) == 2


def test_another_process_finds_a_large_model_s_logits_in_the_cache(
    computed, model_dir, tmp_path, monkeypatch
):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shared_models, "MIN_STORED_BYTES", 1)
    monkeypatch.setattr(shared_models, "SETTLED_S", 0)
    path = shutil.copytree(model_dir("qwen3"), tmp_path / "model")

    def load_in_another_process():
        monkeypatch.setattr(logits_self_test, "EXPECTED_LOGITS", ExpectedLogitsCache(max_models=2))
        load(path)
        return len(computed)

    assert [load_in_another_process() for _ in range(2)] == [1, 1]
    (entry,) = (tmp_path / "cache" / "expected").iterdir()
    entry.write_bytes(entry.read_bytes()[:100])  # a damaged entry
    assert [load_in_another_process() for _ in range(2)] == [2, 2]
    os.utime(path / "model.safetensors", ns=(0, 0))
    assert load_in_another_process() == 3
    with monkeypatch.context() as patch:  # other code that only quantised models load
        patch.setattr(shared_models, "LOADED_LATER", "engine/batch.py")
        assert load_in_another_process() == 4
    monkeypatch.setattr(shared_models, "MIN_STORED_BYTES", 1 << 30)
    assert load_in_another_process() == 5


def test_a_change_of_a_module_that_the_class_imports_is_noticed(model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shared_models, "MIN_STORED_BYTES", 1)
    monkeypatch.setattr(shared_models, "SETTLED_S", 0)
    source, imported = tmp_path / "qwen3.py", tmp_path / "rope_utils.py"
    for file in (source, imported):
        file.write_text("")
    monkeypatch.setattr(shared_models.inspect, "getsourcefile", lambda cls: str(source))
    path, computed = model_dir("qwen3"), []

    def compute():
        computed.append(imported.read_text())
        return (np.zeros((2, 3), np.float32),)

    for text in ("", "", "factor = 2\n", "factor = 2\n"):
        if imported.read_text() != text:
            imported.write_text(text)
        shared_models.stored_logits(path, object(), (), (np.zeros(2, np.int32),), compute)
    assert computed == ["", "factor = 2\n"]


def test_engines_cannot_change_the_logits_that_they_share(model_dir):
    from labkit.engine.model.model_loader import load_model

    expected = logits_self_test.compute_expected(load_model(model_dir("qwen3")), 16)
    for array in (*expected.logits, *expected.sequences):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_the_plain_model_is_computed_by_one_thread_of_numpy_s_blas(model_dir, monkeypatch):
    """Two threads that wait for each other took 5.3 s instead of 0.2 beside a busy process."""
    from labkit.engine.model.model_loader import load_model

    library = numpy_blas_threads._openblas()
    if library is None:
        pytest.skip("this NumPy does not ship OpenBLAS")
    num_threads = library.scipy_openblas_get_num_threads64_
    seen, all_logits = [], logits_self_test._all_logits
    monkeypatch.setattr(
        logits_self_test,
        "_all_logits",
        lambda *arguments: seen.append(num_threads()) or all_logits(*arguments),
    )
    before = num_threads()
    library.scipy_openblas_set_num_threads64_(2)
    try:
        logits_self_test.compute_expected(load_model(model_dir("qwen3")), 16)
        assert (seen, num_threads()) == ([1], 2)
    finally:
        library.scipy_openblas_set_num_threads64_(before)
