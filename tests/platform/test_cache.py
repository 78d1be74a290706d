import multiprocessing
from pathlib import Path

import pytest

from labkit.platform import cache


def test_root_follows_the_variable_and_is_absolute(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "c"))
    assert cache.root() == tmp_path / "c"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABKIT_CACHE", "relative")
    assert cache.root() == tmp_path / "relative"
    assert cache.root({"LABKIT_CACHE": "/elsewhere"}) == Path("/elsewhere")


def test_root_without_the_variable_is_the_users_cache(monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", "")
    assert cache.root().is_absolute()
    assert cache.root().name == "labkit"


def test_atomic_write_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a" / "b.bin"
    cache.atomic_write(path, b"one")
    cache.atomic_write(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_keeps_what_was_there(tmp_path):
    path = tmp_path / "b.bin"
    cache.atomic_write(path, b"one")
    with pytest.raises(RuntimeError), cache.building_file(path) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_directory_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), cache.building_directory(tmp_path / "d") as temporary:
        (temporary / "half").write_bytes(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_second_builder_of_a_directory_keeps_the_first(tmp_path):
    path = tmp_path / "d"
    with cache.building_directory(path) as mine, cache.building_directory(path) as theirs:
        (mine / "file").write_text("same")
        (theirs / "file").write_text("same")
    assert (path / "file").read_text() == "same"
    assert list(tmp_path.iterdir()) == [path]


def _write_many(path: Path, letter: bytes) -> None:
    for _ in range(40):
        cache.atomic_write(path, letter * 200_000)


def test_a_reader_never_sees_half(tmp_path):
    path = tmp_path / "shared.bin"
    cache.atomic_write(path, b"a" * 200_000)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(path, letter)) for letter in (b"a", b"b")]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        data = path.read_bytes()
        assert len(data) == 200_000
        assert len(set(data)) == 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(cache.CacheError, match="set LABKIT_CACHE") as error:
        cache.atomic_write(tmp_path / "file" / "sub" / "x", b"")
    assert "\n" not in str(error.value)


def test_numba_starts_anew_when_any_file_of_the_kernels_changes(tmp_path, monkeypatch):
    """numba itself looks at the file of the cached function only."""
    package = tmp_path / "labkit"
    kernels = package / "engine" / "attention" / "cpu"
    kernels.mkdir(parents=True)
    (kernels / "rows.py").write_text("ROWS = 4")
    (package / "app.py").write_text("")
    monkeypatch.setattr(cache, "__file__", str(package / "platform" / "cache.py"))
    environ = {"LABKIT_CACHE": str(tmp_path / "cache")}
    before = cache.numba_folder(environ)
    assert before.parent == tmp_path / "cache" / "numba"
    (package / "app.py").write_text("changed")
    assert cache.numba_folder(environ) == before
    (kernels / "rows.py").write_text("ROWS = 8")
    assert cache.numba_folder(environ) != before
