"""Which frames are picked: positions by arithmetic alone, on what the packets tell of a clip.

Places are true source indices: a frame's rank in the order in which frames are shown.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from labkit.config import Picks


class Undecodable(Exception):
    """A request that fails: one line with what is wrong with the clip or its frames."""


def positions(count: int, wanted: int) -> list[int]:
    """Spread ``wanted`` positions evenly over ``0 ... count - 1``, both ends included.

    Position ``i`` is ``i * (count - 1) / (wanted - 1)``, rounded half to even, in whole numbers;
    a single one is the first. More than there are: they repeat, evenly.

    Raises
    ------
    Undecodable
        There is nothing to pick from.
    """
    if count < 1:
        raise Undecodable("it has no frames")
    if wanted == 1:
        return [0]
    return [_half_even(i * (count - 1), wanted - 1) for i in range(wanted)]


def _half_even(number: int, divisor: int) -> int:
    quotient, rest = divmod(number, divisor)
    return quotient + (2 * rest > divisor or (2 * rest == divisor and quotient % 2 == 1))


def keeps_wishes(how: Picks) -> bool:
    """Tell whether the frames that are taken are those that are wished for."""
    return how in (Picks.stream, Picks.seek)


def picked(how: Picks, frames: int, keyframes: Sequence[int], wanted: int) -> list[int]:
    """Return the places that are picked of a clip, in order.

    Parameters
    ----------
    how
        ``keyframes`` spreads over the list of keyframes, not over time, so that two keyframes
        asked for 16 frames are 8 of each; ``nearest`` takes the earlier of two at one distance.
    frames, keyframes
        How many frames the clip has, and the places of its keyframes, ascending.

    Raises
    ------
    Undecodable
        Keyframes are asked for and there is none.
    """
    if keeps_wishes(how):
        return positions(frames, wanted)
    if not keyframes:
        raise Undecodable("it has no keyframes: no packet is marked as one")
    if how is Picks.nearest:
        return [_nearest(keyframes, wish) for wish in positions(frames, wanted)]
    if how is Picks.keyframes_unique:
        wanted = min(wanted, len(keyframes))
    return [keyframes[i] for i in positions(len(keyframes), wanted)]


def _nearest(keyframes: Sequence[int], wish: int) -> int:
    at = bisect_left(keyframes, wish)
    return min(keyframes[max(0, at - 1) : at + 1], key=lambda k: (abs(k - wish), k))


@dataclass(frozen=True)
class Leg:
    """A way of the decoder: from the keyframe ``start`` forward, stopping at ``stops``."""

    start: int
    stops: tuple[int, ...]

    @property
    def frames(self) -> int:
        """How many frames are decoded on it."""
        return self.stops[-1] - self.start + 1


def legs(picks: Sequence[int], keyframes: Sequence[int]) -> list[Leg]:
    """Return the ways by which each pick is decoded from the keyframe before it.

    A pick that lies ahead in frames that are being decoded needs no new way: no frame is
    decoded twice.

    Raises
    ------
    Undecodable
        A pick lies before the first keyframe.
    """
    found: list[Leg] = []
    for pick in sorted(set(picks)):
        at = bisect_right(keyframes, pick) - 1
        if at < 0:
            raise Undecodable(f"frame {pick} lies before the first keyframe")
        if found and keyframes[at] <= found[-1].stops[-1] + 1:
            found[-1] = Leg(found[-1].start, (*found[-1].stops, pick))
        else:
            found.append(Leg(keyframes[at], (pick,)))
    return found


@dataclass(frozen=True)
class Distances:
    """How far picks lie from what was wished for: means and the largest, in frames and in ms."""

    mean_frames: float
    most_frames: int
    mean_ms: float
    most_ms: float


def distances(picks: Sequence[int], wishes: Sequence[int], seconds: Sequence[float]) -> Distances:
    """Compare picks with wishes; ``seconds``: when each frame of the clip is shown.

    Where there are fewer picks than wishes, each wish has the pick next to it.
    """
    pairs = (
        list(zip(picks, wishes, strict=True))
        if len(picks) == len(wishes)
        else [(_nearest(picks, wish), wish) for wish in wishes]
    )
    frames = [abs(pick - wish) for pick, wish in pairs]
    ms = [1e3 * abs(seconds[pick] - seconds[wish]) for pick, wish in pairs]
    return Distances(fmean(frames), max(frames), fmean(ms), max(ms))


def repeated(picks: Sequence[int]) -> int:
    """Count the picks that repeat an earlier one."""
    return len(picks) - len(set(picks))
