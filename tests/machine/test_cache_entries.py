import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from labkit.machine import cache_entries


def test_root_is_the_variables_absolute_path(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "c"))
    assert cache_entries.root() == tmp_path / "c"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABKIT_CACHE", "relative")
    assert cache_entries.root() == tmp_path / "relative"
    assert cache_entries.root({"LABKIT_CACHE": "/elsewhere"}) == Path("/elsewhere")


def test_root_defaults_to_the_users_cache_folder(monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", "")
    assert cache_entries.root().is_absolute()
    assert cache_entries.root().name == "labkit"


def test_write_file_replaces_the_file_and_leaves_no_temporary(tmp_path):
    path = tmp_path / "a" / "b.bin"
    cache_entries.write_file(path, b"one")
    cache_entries.write_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "b.bin"
    cache_entries.write_file(path, b"one")
    with pytest.raises(RuntimeError), cache_entries.building_file(path) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_directory_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), cache_entries.building_directory(tmp_path / "d") as temporary:
        (temporary / "half").write_bytes(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_lost_a_file_is_built_again(tmp_path):
    path = tmp_path / "d"
    assert not cache_entries.has_directory(path)
    for _ in range(2):
        with cache_entries.building_directory(path) as temporary:
            (temporary / "a").touch()
            (temporary / "b").touch()
        assert cache_entries.has_directory(path)
        (path / "b").unlink()
        assert not cache_entries.has_directory(path)
        assert list(tmp_path.iterdir()) == []
    path.mkdir()  # by an earlier version, without a list of its files
    assert cache_entries.has_directory(path)


@pytest.mark.parametrize(
    "building", [cache_entries.building_file, cache_entries.building_directory]
)
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, building):
    message = r"cannot write .*: No space left on device; free space there, or set LABKIT_CACHE"
    with pytest.raises(cache_entries.CacheError, match=message), building(tmp_path / "made"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(cache_entries.CacheError, match=message), building(tmp_path / "made"):
        raise RuntimeError("serializing: No space left on device (os error 28)")  # as safetensors
    with pytest.raises(OSError, match="absent"), building(tmp_path / "made"):
        (tmp_path / "absent").read_text()
    assert not list(tmp_path.iterdir())


def test_the_second_builder_of_a_directory_keeps_the_first(tmp_path):
    path = tmp_path / "d"
    with (
        cache_entries.building_directory(path) as mine,
        cache_entries.building_directory(path) as theirs,
    ):
        (mine / "file").write_text("same")
        (theirs / "file").write_text("same")
    assert (path / "file").read_text() == "same"
    assert list(tmp_path.iterdir()) == [path]


def test_recorded_entries_are_those_written_in_the_context(tmp_path):
    with cache_entries.recorded_entries() as outer:
        cache_entries.write_file(tmp_path / "a", b"1234")
        with cache_entries.building_directory(tmp_path / "d") as folder:
            (folder / "file").write_bytes(b"123")
            (folder / "below").mkdir()
            (folder / "below" / "other").write_bytes(b"12")
        with pytest.raises(ValueError, match="no"), cache_entries.building_file(tmp_path / "b"):
            raise ValueError("no")
        with cache_entries.building_directory(tmp_path / "d") as folder:
            (folder / "file").touch()
    cache_entries.write_file(tmp_path / "c", b"")
    assert outer == [tmp_path / "a", tmp_path / "d"]
    assert [cache_entries.entry_bytes(path) for path in outer] == [4, 5 + len("below\0file")]


def _write_many(path: Path, letter: bytes) -> None:
    for _ in range(40):
        cache_entries.write_file(path, letter * 200_000)


def test_a_reader_never_sees_a_partial_file(tmp_path):
    path = tmp_path / "shared.bin"
    cache_entries.write_file(path, b"a" * 200_000)
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


def test_an_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(cache_entries.CacheError, match="set LABKIT_CACHE") as error:
        cache_entries.write_file(tmp_path / "file" / "sub" / "x", b"")
    assert "\n" not in str(error.value)


def test_what_a_killed_builder_left_is_removed_by_the_next_one(tmp_path):
    """A folder that a living process builds in stays, however old it is."""
    path = tmp_path / "model-0123"
    names = (".model-0123-dead", ".model-0123-new", ".model-012345-other")
    for name in names:
        (tmp_path / name).mkdir()
    for name in names[::2]:
        os.utime(tmp_path / name, (0, 0))
    with cache_entries.building_directory(path) as living:
        os.utime(living, (0, 0))
        with cache_entries.building_directory(path) as second:
            assert living.is_dir()
            (second / "weights").write_text("w")
    left = {item.name for item in tmp_path.iterdir()}
    assert left == {"model-0123", ".model-0123-new", ".model-012345-other"}
