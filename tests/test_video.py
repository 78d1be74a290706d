"""The loader returns the frames that a decode from the beginning gives at its indices."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("av")
sys.path.insert(0, str(Path(__file__).parent / "workload" / "video"))

import clip_files as files

from labkit.config import ConfigError, FramePicks
from labkit.video import frames


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return files.synthesised_file(tmp_path_factory.mktemp("clips"), 61, 7)


@pytest.mark.parametrize("how", [method.value for method in FramePicks])
def test_pixels_are_those_at_the_indices(clip, how):
    everything, all_indices = frames(clip, 61, "stream")
    assert all_indices.tolist() == list(range(61))
    pixels, indices = frames(clip, 5, how)
    assert pixels.dtype == np.uint8 and pixels.shape == (5, 64, 96, 3)
    assert (pixels == everything[indices]).all()
    assert (indices % 7 == 0).all() == (how not in ("stream", "seek"))


def test_fewer_frames_without_repetition(clip):
    pixels, indices = frames(clip, 40, "keyframes_unique")
    assert indices.tolist() == list(range(0, 61, 7)) and len(pixels) == 9
    assert len(frames(str(clip), 40, "keyframes").indices) == 40


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0,), "num_frames=0: it must be 1 or more"),
        ((4, "keyframe"), r"how=keyframe: .*did you mean 'keyframes'"),
        ((4, "all"), "it must be one of: stream, seek"),
    ],
)
def test_mistakes_are_one_line(clip, arguments, says):
    with pytest.raises(ConfigError, match=says):
        frames(clip, *arguments)


def test_a_file_that_is_no_clip_is_named(tmp_path):
    (tmp_path / "x.mp4").write_bytes(b"no clip")
    with pytest.raises(ValueError, match=r"x\.mp4: "):
        frames(tmp_path / "x.mp4", 4)
    with pytest.raises(FileNotFoundError, match="no such file"):
        frames(tmp_path / "y.mp4", 4)
