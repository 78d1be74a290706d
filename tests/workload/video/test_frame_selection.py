"""Which frames are picked, by brute force; and what planted events they show."""

import random
from fractions import Fraction

import pytest

from labkit.config import Clip, FramePicks
from labkit.workload.video import clip_synthesis
from labkit.workload.video.frame_selection import (
    Undecodable,
    decode_runs,
    decoder_runs,
    distances,
    pick_frames,
    positions,
)

BUDGETS = (1, 2, 3, 8, 16, 32, 64)


@pytest.mark.parametrize("budgets", [range(1, 33), (64,)])
def test_positions_of_all_clips_up_to_300_frames(budgets):
    for count in range(1, 301):
        listed = list(range(count))
        for wanted in budgets:
            # Python rounds a Fraction half to even.
            exact = [Fraction(i * (count - 1), max(1, wanted - 1)) for i in range(wanted)]
            assert positions(count, wanted) == [listed[round(place)] for place in exact]


def test_halves_go_to_the_even_neighbour():
    assert positions(4, 3) == [0, 2, 3]  # 1.5
    assert positions(6, 3) == [0, 2, 5]  # 2.5
    assert positions(2, 16) == [0] * 8 + [1] * 8
    with pytest.raises(Undecodable, match="no frames"):
        positions(0, 4)


def keyframes_of(count, gop):
    return list(range(0, count, gop))


@pytest.mark.parametrize("wanted", BUDGETS)
def test_keyframe_picks_of_all_clips_up_to_300_frames(wanted):
    for count in range(1, 301):
        for gop in {1, 2, 7, 12, 50, 250, 1 + count // 3}:
            keys = keyframes_of(count, gop)
            wishes = positions(count, wanted)
            assert pick_frames(FramePicks.stream, count, keys, wanted) == wishes
            assert pick_frames(FramePicks.seek, count, keys, wanted) == wishes
            nearest = [min((abs(key - wish), key) for key in keys)[1] for wish in wishes]
            assert pick_frames(FramePicks.nearest, count, keys, wanted) == nearest
            spread = pick_frames(FramePicks.keyframes, count, keys, wanted)
            assert spread == [keys[i] for i in positions(len(keys), wanted)]
            unique = pick_frames(FramePicks.keyframes_unique, count, keys, wanted)
            assert len(unique) == len(set(unique)) == min(wanted, len(keys))
            assert len(spread) == wanted
            assert set(unique) <= set(keys) and unique == sorted(unique)
            if wanted <= len(keys):
                assert unique == spread


def test_a_clip_without_keyframes_is_refused_where_they_are_needed():
    assert pick_frames(FramePicks.stream, 10, (), 4) == [0, 3, 6, 9]
    for how in (FramePicks.keyframes, FramePicks.nearest, FramePicks.keyframes_unique):
        with pytest.raises(Undecodable, match="no frame that is marked as a keyframe"):
            pick_frames(how, 10, (), 4)
    with pytest.raises(Undecodable, match="frame 0 lies before the first keyframe"):
        decode_runs([0, 9], (5,))


def test_legs_reach_every_pick_and_decode_no_frame_twice():
    draw = random.Random(3)
    for _ in range(500):
        count = draw.randrange(1, 300)
        keys = sorted({0, *(draw.randrange(count) for _ in range(draw.randrange(12)))})
        picks = [draw.randrange(count) for _ in range(draw.randrange(1, 20))]
        ways = decode_runs(picks, keys)
        assert [stop for way in ways for stop in way.stops] == sorted(set(picks))
        decoded = [place for way in ways for place in range(way.start, way.stops[-1] + 1)]
        assert len(decoded) == len(set(decoded)) == sum(way.frames for way in ways)
        # What is decoded is what some pick needs: all from its keyframe up to it.
        needed = {
            place for pick in picks for place in range(max(k for k in keys if k <= pick), pick + 1)
        }
        assert set(decoded) == needed and all(way.start in keys for way in ways)


def test_each_method_decodes_what_its_picks_need():
    picks, keyframes = [4, 14, 14, 8], (0, 4, 12)
    frames = {
        how: [(run.start, run.frames) for run in decoder_runs(how, picks, keyframes)]
        for how in FramePicks
    }
    assert frames[FramePicks.stream] == [(0, 15)]
    assert frames[FramePicks.seek] == [(4, 5), (12, 3)]
    for how in (FramePicks.keyframes, FramePicks.nearest, FramePicks.keyframes_unique):
        assert frames[how] == [(4, 1), (8, 1), (14, 1)]


def test_distances_are_of_picks_from_wishes():
    seconds = [i / 10 for i in range(20)]
    far = distances([0, 10, 10], [0, 9, 19], seconds)
    assert (far["distance_frames"], far["most_frames"]) == (10 / 3, 9)
    assert far["most_ms"] == 900
    # Each wish has the pick next to it.
    assert distances([0], [0, 9, 19], seconds)["most_frames"] == 19


CLIP = Clip(name="c", seconds=20, gop=25, events=5, seed=4)


def test_events_are_planted_apart_and_by_seed():
    events = clip_synthesis.planted(CLIP)
    assert [event.kind for event in events] == [
        kind for kind in clip_synthesis.KINDS for _ in range(5)
    ]
    for event in events:
        assert 0 <= event.start < event.frame < event.end <= CLIP.length
    assert clip_synthesis.planted(CLIP) == events
    other = Clip(name="c", seconds=20, gop=25, events=5, seed=5)
    assert [e.frame for e in clip_synthesis.planted(other)] != [e.frame for e in events]
    assert clip_synthesis.planted(Clip(name="c", seconds=20, events=0)) == []


def test_every_frame_shows_all_events_and_one_frame_none():
    events = clip_synthesis.planted(CLIP)
    for event in events:
        assert event.visible(range(CLIP.length))
        assert not any(event.visible([place]) for place in range(CLIP.length))


def test_what_is_visible_by_brute_force():
    draw = random.Random(5)
    for event in clip_synthesis.planted(CLIP):
        for _ in range(200):
            picks = [draw.randrange(CLIP.length) for _ in range(draw.randrange(1, 40))]
            near = CLIP.fps if event.kind == "collision" else CLIP.length
            before = {p for p in picks if p < event.frame and p >= event.frame - near}
            after = {p for p in picks if p >= event.frame and p < event.frame + near}
            least = 2 if event.kind == "direction change" else 1
            same = [e.frame for e in clip_synthesis.planted(CLIP) if e.kind == event.kind]
            before = {p for p in before if not any(p < f < event.frame for f in same)}
            after = {p for p in after if not any(event.frame < f <= p for f in same)}
            assert event.visible(picks) == (len(before) >= least and len(after) >= least)


def test_shares_count_by_kind():
    events = clip_synthesis.planted(CLIP)
    assert clip_synthesis.shares(events, range(CLIP.length)) == {
        kind: {"visible": 5, "planted": 5} for kind in clip_synthesis.KINDS
    }
    assert clip_synthesis.shares(events, [0]) == {
        kind: {"visible": 0, "planted": 5} for kind in clip_synthesis.KINDS
    }
