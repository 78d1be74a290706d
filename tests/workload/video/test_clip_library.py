"""The files of a folder of clips."""

import pytest

from labkit.config import ConfigError
from labkit.workload.video import clip_library
from labkit.workload.video.clip_library import ClipSource, files_of


def test_files_are_those_that_are_seen(tmp_path, monkeypatch):
    (tmp_path / "folder.mp4").mkdir()
    for name in ("b.mp4", "a.mkv", ".hidden"):
        (tmp_path / name).write_bytes(b"12345")
    assert files_of(str(tmp_path)) == [tmp_path / "a.mkv", tmp_path / "b.mp4"]
    monkeypatch.chdir(tmp_path)
    assert files_of(".") == [tmp_path / "a.mkv", tmp_path / "b.mp4"]
    monkeypatch.setattr(clip_library, "MAX_CLIPS", 2)
    assert len(files_of(str(tmp_path))) == 2
    (tmp_path / "c").touch()
    for folder, message in (
        (tmp_path, "has 3 files; it must have at most 2"),
        (tmp_path / "c", "is not a folder"),
        (tmp_path / "folder.mp4", "has no files"),
    ):
        with pytest.raises(ConfigError, match=message):
            files_of(str(folder))


def test_a_clip_that_is_gone_has_no_bytes(tmp_path):
    clip = ClipSource("a", tmp_path / "a", 3)
    assert (clip.bytes, clip.requests) == (0, 1)
    clip.read_through()  # its requests fail
    clip.path.write_bytes(b"12345")
    assert clip.bytes == 5
