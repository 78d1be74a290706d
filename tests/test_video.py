"""The loader returns the frames that a decode from the beginning gives at its indices."""

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("av")
sys.path.insert(0, str(Path(__file__).parent / "workload" / "video"))

import clip_files as files

from labkit import vllm_video
from labkit.config import ConfigError, FramePicks, package_extras
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


@pytest.mark.parametrize("how", ["stream", "seek"])
def test_a_trimmed_clip_has_the_frames_that_a_player_shows(clip, how):
    everything, _ = frames(clip, 61, "stream")
    trimmed = files.edited_file(clip, clip.with_name("trimmed.mp4"), (10, 30))
    pixels, indices = frames(trimmed, 5, how)
    assert (pixels == everything[10 + indices]).all() and indices.tolist() == [0, 7, 14, 22, 29]
    loaded, metadata = vllm_video.load(trimmed.read_bytes(), FramePicks(how), 5)
    assert (loaded == pixels).all() and metadata["total_num_frames"] == 30
    assert len(vllm_video.load(trimmed.read_bytes(), FramePicks(how))[0]) == 30


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


def test_without_pyav_the_mistake_is_one_line(clip, monkeypatch):
    monkeypatch.setattr(package_extras, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^not installed: av; run: pip install '.*\[video\]'$"):
        frames(clip, 4)


def test_a_file_that_is_no_clip_is_named(tmp_path):
    (tmp_path / "x.mp4").write_bytes(b"no clip")
    with pytest.raises(ValueError, match=r"x\.mp4: "):
        frames(tmp_path / "x.mp4", 4)
    with pytest.raises(FileNotFoundError, match="no such file"):
        frames(tmp_path / "y.mp4", 4)


class FakeRegistry:
    """vLLM's registry of video loaders, as far as ``register`` uses it."""

    def __init__(self):
        self.loaders = {}

    def register(self, name):
        return lambda loader: self.loaders.setdefault(name, loader)


@pytest.fixture
def loaders(monkeypatch):
    fake = ModuleType("vllm.multimodal.video")
    fake.VIDEO_LOADER_REGISTRY, fake.VideoLoader = FakeRegistry(), type("VideoLoader", (), {})
    for name in ("vllm", "vllm.multimodal"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    assert vllm_video.register() == tuple(fake.VIDEO_LOADER_REGISTRY.loaders)
    assert all(
        issubclass(one, fake.VideoLoader) for one in fake.VIDEO_LOADER_REGISTRY.loaders.values()
    )
    return fake.VIDEO_LOADER_REGISTRY.loaders


@pytest.mark.parametrize("how", [method.value for method in FramePicks])
def test_a_loader_of_vllm_returns_the_same_frames_and_their_true_positions(clip, how, loaders):
    loader = loaders[f"labkit_{how}"]()  # vLLM calls the method on an instance
    pixels, metadata = loader.load_bytes(clip.read_bytes(), num_frames=20)
    expected = frames(clip, 20, how)
    assert (pixels == expected.pixels).all()
    assert metadata == {
        "total_num_frames": 61, "fps": 25.0, "duration": 61 / 25, "do_sample_frames": False,
        "video_backend": f"labkit_{how}", "frames_indices": expected.indices.tolist(),
    }  # fmt: skip
    everything = loader.load_bytes(clip.read_bytes())[1]["frames_indices"]
    assert len(everything) == (61 if how in ("stream", "seek") else 9)


def test_a_loader_of_vllm_says_in_one_line_what_it_cannot_do(clip, loaders, monkeypatch):
    loader = loaders["labkit_keyframes"]()
    with pytest.raises(ConfigError, match=r"^labkit_keyframes takes num_frames alone, not fps=2$"):
        loader.load_bytes(clip.read_bytes(), num_frames=4, fps=2)
    with pytest.raises(ConfigError, match="num_frames=0: 1 or more, or -1"):
        loader.load_bytes(clip.read_bytes(), num_frames=0)
    with pytest.raises(ValueError, match=r"^labkit_keyframes: .+"):
        loader.load_bytes(b"no clip", num_frames=4)
    del sys.modules["vllm.multimodal.video"].VideoLoader
    with pytest.raises(ConfigError, match="this vLLM has no registry of video loaders"):
        vllm_video.register()
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "vllm.multimodal")
    monkeypatch.delitem(sys.modules, "vllm.multimodal.video")
    with pytest.raises(
        ConfigError, match=r"the module vllm\S* is not installed; run: pip install vllm"
    ):
        vllm_video.register()
