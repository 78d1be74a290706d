"""Clips as they are made, and every way to their frames: the same pixels, true counts."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("cv2")

import clip_files as files

from labkit.config import ConfigError, FramePicks, Workload, from_plain, to_plain
from labkit.workload.video import clip_synthesis
from labkit.workload.video.clip_reader import FrameIndex, OpenClip, open_clip
from labkit.workload.video.frame_decoding import check_counts, decode_frames
from labkit.workload.video.frame_selection import Undecodable, decode_runs, pick_frames
from labkit.workload.video.reference_decode_checks import Reference, frame_digests

SHAPES = [(61, 7), (61, None), (40, 1), (40, 2), (1, 1), (120, 12), (30, 29)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clips")


def all_frames(path):
    import av

    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


# ------------------------------------------------------------------ clips that are made


def test_the_same_clip_has_the_same_bytes(tmp_path):
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        path = tmp_path / name
        clip_synthesis.synthesise(files.clip_of(50, 12, seed=seed, events=3), path)
        digests.append(hashlib.sha256(path.read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(("frames", "gop"), SHAPES)
def test_length_gop_and_size_are_what_was_asked_for(folder, frames, gop):
    path = files.synthesised_file(folder, frames, gop)
    samples, sync = files.counted(path)
    assert (samples, len(sync)) == (frames, len(range(0, frames, gop or frames)))
    assert np.shape(all_frames(path)) == (frames, 64, 96, 3)
    with open_clip(path, 1) as clip:
        assert list(clip.frame_index().keyframes) == list(range(0, frames, gop or frames))
        assert float(clip.stream.average_rate) == 25


def test_a_clip_without_frames_is_refused(folder, monkeypatch):
    with open_clip(files.synthesised_file(folder, 1, 1), 1) as clip:
        monkeypatch.setattr(clip, "packets", lambda: iter(()))
        with pytest.raises(Undecodable, match=r"^the clip has no frames$"):
            clip.frame_index()


def test_a_clip_is_kept_by_what_decides_it(no_cache):
    clip = files.clip_of(9, 3)
    path = clip_synthesis.synthesised_file(clip)
    written = path.stat().st_mtime_ns
    again = clip_synthesis.synthesised_file(files.clip_of(9, 3, name="other", frames=3, requests=7))
    assert again == path and again.stat().st_mtime_ns == written
    assert clip_synthesis.synthesised_file(files.clip_of(9, 4)) != path


def lanes(picture):
    """Split a picture into its lanes."""
    height = len(picture) // 3
    return [picture[height * i : height * (i + 1)] for i in range(3)]


def painted(lane, colour):
    """Return the columns in which a lane has that colour."""
    return np.flatnonzero((lane == colour).all(axis=2).any(axis=0))


def test_events_happen_in_the_pictures_at_their_frames():
    clip = files.clip_of(90, events=3, seed=9)
    drawn = list(clip_synthesis.pictures(clip))
    assert len(drawn) == 90
    at = {kind: clip_synthesis.event_frames(clip, kind) for kind in clip_synthesis.KINDS}
    colours = [
        next(c for c in clip_synthesis.COLOURS if len(painted(lanes(picture)[0], c)))
        for picture in drawn
    ]
    changes = [i for i in range(1, 90) if colours[i] != colours[i - 1]]
    assert changes == at["colour change"]
    places = [painted(lanes(picture)[1], clip_synthesis.COLOURS[2]) for picture in drawn]
    width = clip.width - (clip.height // 3) // 2
    steps = [
        (places[i][0] - places[i - 1][0] + width // 2) % width - width // 2 for i in range(1, 90)
    ]
    turns = [i + 1 for i in range(1, 89) if np.sign(steps[i]) != np.sign(steps[i - 1])]
    assert turns == at["direction change"]
    gaps = []
    for picture in drawn:
        left, is_right = (painted(lanes(picture)[2], clip_synthesis.COLOURS[i]) for i in (1, 3))
        gaps.append(is_right[0] - left[-1])
    touching = [i for i in range(90) if gaps[i] == min(gaps)]
    assert touching == at["collision"] and min(gaps) == 1


# ------------------------------------------------------------------ the ways to the frames


@pytest.mark.parametrize(("frames", "gop"), SHAPES)
def test_every_way_gives_the_frames_of_a_list(folder, frames, gop):
    path = files.synthesised_file(folder, frames, gop)
    listed = all_frames(path)
    _, sync = files.counted(path)
    for picks, decoder in files.WAYS:
        for wanted in (1, 2, 5, 16, 64):
            request = files.asks(picks, decoder, wanted)
            taken = decode_frames(path, request, wanted)
            assert list(taken.picks) == pick_frames(picks, frames, sync, wanted)
            for place in taken.picks:
                assert np.array_equal(taken.frames[place], listed[place]), (picks, place)
            check_counts(request, taken.picks, taken.counts, sync)


@pytest.mark.parametrize(("frames", "gop"), SHAPES)
def test_counts_are_those_of_an_independent_count(folder, frames, gop):
    path = files.synthesised_file(folder, frames, gop)
    samples, sync = files.counted(path)
    for picks, decoder in files.WAYS:
        counts = decode_frames(path, files.asks(picks, decoder), 16).counts
        own = pick_frames(picks, samples, sync, 16)
        if picks is FramePicks.stream:
            assert counts.frames_decoded == samples and counts.seeks == 0
            if decoder.value == "pyav":
                assert counts.packets_read == counts.packets_decoded == samples
                assert counts.delta_frames == samples - len(sync)
            continue
        assert counts.packets_read >= samples  # the sweep
        if picks is FramePicks.seek:
            ways = decode_runs(own, sync)
            assert counts.seeks == len(ways)
            assert 0 <= counts.frames_decoded - sum(way.frames for way in ways) <= 4 * len(ways)
            keys = sum(way.start <= s <= way.stops[-1] for way in ways for s in sync)
            assert counts.frames_decoded - counts.delta_frames in (keys, keys + len(ways))
        else:
            assert counts.frames_decoded == counts.packets_decoded == len(set(own)) == counts.seeks
            assert counts.delta_frames == 0
            assert counts.packets_read == samples + len(set(own))


def test_a_way_is_proven_by_counts_and_not_by_its_name(folder):
    path = files.synthesised_file(folder, 61, 7)
    _, sync = files.counted(path)
    taken = {picks: decode_frames(path, files.asks(picks), 5) for picks in FramePicks}
    for named in FramePicks:
        for gone in FramePicks:
            request, counts = files.asks(named), taken[gone].counts
            alike = {FramePicks.keyframes, FramePicks.nearest, FramePicks.keyframes_unique}
            if named is gone or {named, gone} <= alike:
                continue
            with pytest.raises(Undecodable, match=r"which does not match workload\.picks="):
                check_counts(request, taken[named].picks, counts, sync)


def test_a_delta_frame_is_no_keyframe(folder):
    path = files.synthesised_file(folder, 61, 7)
    _, sync = files.counted(path)
    for picks in (FramePicks.keyframes, FramePicks.nearest, FramePicks.keyframes_unique):
        taken = decode_frames(path, files.asks(picks), 5)
        counts = replace(taken.counts, delta_frames=1)
        with pytest.raises(Undecodable, match=r"1 not keyframes"):
            check_counts(files.asks(picks), taken.picks, counts, sync)


# ------------------------------------------------------------------ what is wrong with a file


def remuxed(source, target, **options):
    import av

    with av.open(str(source)) as inside, av.open(str(target), "w", options=options) as outside:
        stream = outside.add_stream_from_template(inside.streams.video[0])
        for packet in inside.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                outside.mux(packet)
    return target


@pytest.fixture(scope="module")
def broken(folder):
    """Files by what is wrong with them."""
    good = files.synthesised_file(folder, 61, 7)
    front = remuxed(good, folder / "front.mp4", movflags="+faststart")
    data = front.read_bytes()
    broken_files = {
        "a text": b"this is not a video\n" * 40,
        "nothing": b"",
        "its head": good.read_bytes()[:200],
        "its index alone": data[: data.index(b"mdat") + 4],
        "its first half": data[: len(data) // 2],
    }
    paths = {"missing": folder / "nowhere.mp4"}
    for name, content in broken_files.items():
        paths[name] = folder / f"{name.replace(' ', '-')}.bin"
        paths[name].write_bytes(content)
    return paths


@pytest.mark.parametrize(
    "name", ["a text", "nothing", "its head", "its index alone", "its first half", "missing"]
)
def test_a_broken_file_is_one_clear_line(broken, name):
    for picks, decoder in files.WAYS:
        with pytest.raises(Undecodable) as caught:
            decoded = decode_frames(broken[name], files.asks(picks, decoder), 16)
            # What lies before the break can be taken; checking it says that the file is broken.
            Reference(broken[name]).outputs(files.asks(picks, decoder), 16, frame_digests(decoded))
        line = str(caught.value)
        assert 5 < len(line) < 200 and "\n" not in line and str(broken[name]) not in line


def test_a_pick_beyond_the_end_is_named(broken):
    half = broken["its first half"]
    with pytest.raises(
        Undecodable, match=r"frame 60 of 61 was picked, but OpenCV returned only \d+"
    ):
        decode_frames(half, files.asks("stream", "opencv", 2), 2)
    with pytest.raises(
        Undecodable, match=r"the clip ends after \d+ of the 61 frames that its header"
    ):
        decode_frames(half, files.asks("keyframes"), 2)


def test_a_keyframe_that_no_seek_reaches_is_named():
    class NoPackets:
        def __init__(self):
            self.offsets = []

        def seek(self, offset, stream):
            self.offsets.append(offset)

        def demux(self, stream):
            return []

    clip = OpenClip(NoPackets(), None)
    frame_index = FrameIndex((0, 10, 20), (0, 2), {0: 0, 2: 15}, 0.1)
    with pytest.raises(Undecodable, match="keyframe at frame 2 cannot be found by seeking"):
        clip.from_keyframe(frame_index, 2)
    assert clip.container.offsets == [20, 15] and clip.counts.seeks == 2


@pytest.mark.parametrize("suffix", ["mkv", "mov", "ts", "empty_moov.mp4", "frag_keyframe.mp4"])
def test_other_containers(folder, suffix):
    good = files.synthesised_file(folder, 61, 7)
    fragments = {"movflags": f"frag_keyframe+{suffix.removesuffix('.mp4')}"}
    options = fragments if suffix.endswith(".mp4") else {}
    path = remuxed(good, folder / f"other.{suffix}", **options)
    listed = all_frames(good)
    for picks in FramePicks:
        taken = decode_frames(path, files.asks(picks), 5)
        assert list(taken.picks) == pick_frames(picks, 61, range(0, 61, 7), 5)
        for place, frame in taken.frames.items():
            assert np.array_equal(frame, listed[place])


@pytest.mark.parametrize(
    ("first", "frames"),
    [(0, 40), (0, 58), (3, 58), (10, 51), (10, 30), (7, 20), (50, 11), (59, 2), (3, 2)],
)
def test_a_clip_that_was_trimmed_without_re_encoding(folder, first, frames):
    """An edit list shows a part of the frames; the keyframe before it is hidden, and needed."""
    good = files.synthesised_file(folder, 61, 7)
    path = files.edited_file(good, folder / f"trimmed-{first}-{frames}.mp4", (first, frames))
    listed = all_frames(good)[first : first + frames]
    sync = [place - first for place in range(0, 61, 7) if first <= place < first + frames]
    for picks in FramePicks:
        for wanted in (1, 5, 64):
            request = files.asks(picks, frames=wanted)
            if not sync and picks not in (FramePicks.stream, FramePicks.seek):
                with pytest.raises(Undecodable, match=r"no frame that is marked as a keyframe"):
                    decode_frames(path, request, wanted)
                continue
            taken = decode_frames(path, request, wanted)
            assert list(taken.picks) == pick_frames(picks, frames, sync, wanted)
            for place in taken.picks:
                assert np.array_equal(taken.frames[place], listed[place]), (picks, place)
            reference = Reference(path)
            reference.check_counts(request, wanted, taken.picks, taken.counts)
            outputs = reference.outputs(request, wanted, frame_digests(taken))
            assert outputs["pixels"] == outputs["decoder"]
    with pytest.raises(Undecodable, match=rf"of 61 was picked, but OpenCV returned only {frames}"):
        decode_frames(path, files.asks("stream", "opencv", 2), 2)


def test_a_clip_of_which_a_part_was_cut_out_is_refused(folder):
    good = files.synthesised_file(folder, 61, 7)
    path = files.edited_file(good, folder / "cut-out.mp4", (0, 20), (30, 31))
    with pytest.raises(Undecodable, match=r"hides frames between others; re-encode the clip"):
        decode_frames(path, files.asks("seek", frames=5), 5)


def test_a_workload_says_what_it_cannot_do():
    clip = files.clip_of(9)
    for wrong, message in (
        ({"made": []}, "there is no clip; set workload.made"),
        ({"made": [clip, clip]}, "two clips have the same name"),
        ({"decoder": "opencv", "picks": "seek"}, "it can only stream"),
        ({"questions": "q.jsonl"}, "clips of your own"),
        ({"questions": "q.jsonl", "clips": "d"}, "go together"),
        ({"window": 3}, "workload.window=3"),
        ({"temperature": 1.0}, "workload.temperature=1.0"),
    ):
        plain = {"kind": "video", "made": [to_plain(clip)]} | {
            key: to_plain(value) for key, value in wrong.items()
        }
        with pytest.raises(ConfigError, match=message):
            from_plain(Workload, plain)
    for wrong, message in (
        ({"seconds": 0.03}, "must be a whole number"),
        ({"seconds": 0.0}, "seconds=0"),
        ({"name": ""}, "needs a name"),
        ({"events": 5, "seconds": 0.4}, "do not fit"),
        ({"gop": 0}, "gop=0"),
        ({"width": 97}, "width=97"),
        ({"width": 162, "height": 480}, "width=162: must be 164 or more with height=480"),
    ):
        with pytest.raises(ConfigError, match=message):
            files.clip_of(9, **wrong)


def test_the_narrowest_clip_is_drawn():
    clip = files.clip_of(9, width=164, height=480, events=1)
    assert [picture.shape for picture in clip_synthesis.pictures(clip)] == [(480, 164, 3)] * 9
