"""Frame selection: the frames to pick, computed from the index of a clip's packets.

A frame's index is its position in the clip in presentation order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from labkit.config import FramePicks


class Undecodable(Exception):
    """Frames of a clip cannot be picked, decoded or checked. The message is one line."""


def positions(count: int, num_frames: int) -> list[int]:
    """Spread ``num_frames`` positions evenly over ``0 ... count - 1``, both ends included.

    Position ``i`` is ``i * (count - 1) / (num_frames - 1)``, rounded half to even. A single
    position is 0. If ``num_frames`` exceeds ``count``, positions repeat evenly. Example: 3 of 5
    frames are [0, 2, 4]. Raises ``Undecodable`` if the clip has no frames.
    """
    if count < 1:
        raise Undecodable("the clip has no frames")
    if num_frames == 1:
        return [0]
    return [_half_even(i * (count - 1), num_frames - 1) for i in range(num_frames)]


def _half_even(number: int, divisor: int) -> int:
    quotient, rest = divmod(number, divisor)
    return quotient + (2 * rest > divisor or (2 * rest == divisor and quotient % 2 == 1))


def picks_exact_positions(how: FramePicks) -> bool:
    """Return whether a pick method returns exactly the evenly spread positions."""
    return how in (FramePicks.stream, FramePicks.seek)


def pick_frames(
    how: FramePicks, frames: int, keyframes: Sequence[int], num_frames: int
) -> list[int]:
    """Return the indices of ``num_frames`` picked frames of a clip of ``frames`` frames, in order.

    ``stream`` and ``seek`` pick frames spread evenly over the clip. ``keyframes`` spreads the picks
    evenly over the list of keyframes (indices, ascending), not over time: with two keyframes and 16
    picks, each keyframe is picked 8 times. ``keyframes_unique`` does the same without repetitions.
    ``nearest`` picks the keyframe nearest to each evenly spread position, or the earlier of two
    equally near ones. Raises ``Undecodable`` if the method needs keyframes and the clip has none.
    """
    if picks_exact_positions(how):
        return positions(frames, num_frames)
    if not keyframes:
        raise Undecodable("the clip has no frame that is marked as a keyframe")
    if how is FramePicks.nearest:
        return [_nearest(keyframes, position) for position in positions(frames, num_frames)]
    if how is FramePicks.keyframes_unique:
        num_frames = min(num_frames, len(keyframes))
    return [keyframes[i] for i in positions(len(keyframes), num_frames)]


def _nearest(keyframes: Sequence[int], position: int) -> int:
    at = bisect_left(keyframes, position)
    return min(keyframes[max(0, at - 1) : at + 1], key=lambda k: (abs(k - position), k))


@dataclass(frozen=True)
class DecodeRun:
    """A forward run of the decoder from the keyframe at index ``start`` to the last pick.

    ``start`` is negative if an edit list hides the keyframe. ``stops``: the indices of the picks
    in this run, ascending.
    """

    start: int
    stops: tuple[int, ...]

    @property
    def frames(self) -> int:
        return self.stops[-1] - max(0, self.start) + 1


def decode_runs(picks: Sequence[int], keyframes: Sequence[int]) -> list[DecodeRun]:
    """Return the runs that decode each pick from the keyframe at or before it.

    If the current run already reaches that keyframe, the run continues to the pick, so no frame is
    decoded twice. Raises ``Undecodable`` if a pick lies before the first keyframe.
    """
    runs: list[DecodeRun] = []
    for pick in sorted(set(picks)):
        at = bisect_right(keyframes, pick) - 1
        if at < 0:
            raise Undecodable(f"frame {pick} lies before the first keyframe")
        if runs and keyframes[at] <= runs[-1].stops[-1] + 1:
            runs[-1] = DecodeRun(runs[-1].start, (*runs[-1].stops, pick))
        else:
            runs.append(DecodeRun(keyframes[at], (pick,)))
    return runs


def decoder_runs(
    how: FramePicks, picks: Sequence[int], keyframes: Sequence[int]
) -> list[DecodeRun]:
    """Return the runs in which a pick method decodes its picks.

    ``stream`` decodes from the first frame to the last pick, ``seek`` as ``decode_runs`` does, and
    the methods that pick keyframes decode only these. Raises ``Undecodable`` if, with ``seek``,
    a pick lies before the first keyframe.
    """
    if how is FramePicks.seek:
        return decode_runs(picks, keyframes)
    different = sorted(set(picks))
    if how is FramePicks.stream:
        return [DecodeRun(0, tuple(different))]
    return [DecodeRun(pick, (pick,)) for pick in different]


def distances(
    picks: Sequence[int], exact: Sequence[int], seconds: Sequence[float]
) -> dict[str, float]:
    """Return the mean and the maximum distance of picks from exact positions, for the record.

    ``seconds``: the presentation time of each frame. If the numbers of picks and positions differ,
    each position is compared with its nearest pick.
    """
    pairs = (
        list(zip(picks, exact, strict=True))
        if len(picks) == len(exact)
        else [(_nearest(picks, position), position) for position in exact]
    )
    frames = [abs(pick - position) for pick, position in pairs]
    ms = [1e3 * abs(seconds[pick] - seconds[position]) for pick, position in pairs]
    return {
        "distance_frames": fmean(frames),
        "most_frames": max(frames),
        "distance_ms": round(fmean(ms), 3),
        "most_ms": round(max(ms), 3),
    }
