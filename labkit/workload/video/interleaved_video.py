"""Requests for a clip's frames, arm by arm in turn: what they took and what was decoded.

In a round every arm does one request for the same clip, in random order. What it gave is checked
after the clock has stopped: against the first request's frames at once, against a decode of its
own when all rounds are over. At the end every arm does a job: requests for many clips, some of
them at a time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.config import Picks, Workload
from labkit.records import CaseRecord, Metric
from labkit.workload.interleaved_kernels import spread_rounds
from labkit.workload.interleaving import TurnContext
from labkit.workload.measurement import InvalidOutput, Measurement
from labkit.workload.video import frame_decoding
from labkit.workload.video.clip_library import Source
from labkit.workload.video.clip_reader import Pixels
from labkit.workload.video.frame_checks import Given, Reference, given
from labkit.workload.video.frame_selection import Undecodable
from labkit.workload.video.planted_events import shares

if TYPE_CHECKING:
    from labkit.workload.video.clip_questions import Quiz
    from labkit.workload.video.frame_decoding import Taken

Take = Callable[..., "Taken"]


@dataclass
class Seat:
    """An arm at a clip: what its first request gave, the seconds of every request, its failures.

    ``pixels``: the picked frames, where somebody is asked about them.
    """

    first: Given | None = None
    pixels: Sequence[Pixels] = ()
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    outputs: dict[str, Any] | None = None

    @property
    def served(self) -> bool:
        """Whether every request gave its frames."""
        return self.first is not None and not self.failures


class InterleavedVideo:
    """Requests of several arms for the same clips; see ``InterleavedArms``.

    Parameters
    ----------
    arms
        Their workloads, which differ in how frames are picked and decoded.
    sources
        Every arm's clips, of the same names in the same order.
    setting
        See ``TurnContext``.
    take
        Does a request; a parameter so that a test can do it wrongly.
    quiz
        Asks a model about the picked frames; None: nobody asks.
    """

    def __init__(
        self,
        arms: Sequence[Workload],
        sources: Sequence[Sequence[Source]],
        context: TurnContext,
        take: Take = frame_decoding.take,
        quiz: Quiz | None = None,
    ) -> None:
        self._arms = tuple(arms)
        self._sources = tuple(sources)
        self._setting = context
        self._take = take
        self._quiz = quiz
        self._references = [Reference(source.path) for source in sources[0]]
        self._seats = [[Seat() for _ in mine] for mine in sources]
        self._jobs: list[tuple[int, float] | None] = [None] * len(arms)
        self._counters = [Counter[str]() for _ in arms]

    def warm_up(self) -> None:
        """Read every file once; then every arm does requests for the smallest, unmeasured."""
        mine = self._sources[0]
        for source in mine:
            source.read_through()
        smallest = min(range(len(mine)), key=lambda clip: mine[clip].bytes)
        for arm in self._in_random_order():
            source = self._sources[arm][smallest]
            with self._setting.turn(arm):
                for _ in range(self._arms[arm].warmup):
                    try:
                        self._take(source.path, self._arms[arm], source.wanted)
                    except Undecodable:
                        break  # it fails again, and is counted, when it is measured

    prepare = warm_up

    def measure(self, heartbeat: Callable[[str], None]) -> list[Measurement]:
        """Do all rounds of all clips, check them, then the jobs; see ``InterleavedArms``."""
        repeats = self._arms[0].repeats
        rounds = spread_rounds([repeats] * len(self._sources[0]), self._setting.order)
        for number, clip in enumerate(rounds):
            for arm in self._in_random_order():
                self._request(arm, clip)
            heartbeat(f"round {number + 1} of {len(rounds)}")
        self._check()
        for arm in self._in_random_order():
            self._jobs[arm] = self._job(arm)
        return [self._measurement(arm) for arm in range(len(self._arms))]

    def _in_random_order(self) -> list[int]:
        arms = list(range(len(self._arms)))
        self._setting.order.shuffle(arms)
        return arms

    def _request(self, arm: int, clip: int) -> None:
        """One turn: one request, timed; its frames must be those of the arm's first."""
        source, seat = self._sources[arm][clip], self._seats[arm][clip]
        with self._setting.turn(arm):
            start = time.perf_counter()
            try:
                taken = self._take(source.path, self._arms[arm], source.wanted)
            except Undecodable as error:
                seat.failures.append(str(error))
                return
            seat.seconds.append(time.perf_counter() - start)
        mine = given(taken)
        if seat.first is None:
            seat.first = mine
            if self._quiz is not None and self._quiz.about(source.name):
                seat.pixels = [taken.frames[place] for place in taken.picks]
        elif (mine.picks, mine.digests) != (seat.first.picks, seat.first.digests):
            raise InvalidOutput(f"{source.name}: request {len(seat.seconds)} gave other frames")

    def _check(self) -> None:
        """Hold every arm's frames against the decoder's, and its counts against its way."""
        for clip, reference in enumerate(self._references):
            firsts = [first for seats in self._seats if (first := seats[clip].first) is not None]
            reference.decode({place for first in firsts for place in first.picks})
            for arm, workload in enumerate(self._arms):
                seat, source = self._seats[arm][clip], self._sources[arm][clip]
                if seat.first is None:
                    continue
                try:
                    seat.outputs = reference.check(workload, source.wanted, seat.first)
                except Undecodable as error:
                    seat.failures += [str(error)] * len(seat.seconds)
                    continue
                self._count(arm, seat, len(seat.seconds))

    def _count(self, arm: int, seat: Seat, requests: int) -> None:
        assert seat.first is not None, "it was served"
        workload, counters = self._arms[arm], self._counters[arm]
        counters[f"picks.{workload.picks.value}"] += requests
        counters[f"decoder.{workload.decoder.value}"] += requests
        for name, value in vars(seat.first.counts).items():
            if value:
                counters[f"video.{name}"] += requests * value
        counters["video.frames_picked"] += requests * len(seat.first.picks)
        if workload.picks in (Picks.keyframes, Picks.nearest, Picks.keyframes_unique):
            counters["video.keyframes_alone"] += requests * seat.first.counts.frames_decoded

    def _job(self, arm: int) -> tuple[int, float] | None:
        """Do the job once: requests for every clip that all arms serve; return how many, seconds.

        The clips take turns, so that long and short ones are in flight together.
        """
        workload = self._arms[arm]
        served = [
            source
            for clip, source in enumerate(self._sources[arm])
            if all(seats[clip].served for seats in self._seats)
        ]
        most = max((source.requests for source in served), default=0)
        job = [source for turn in range(most) for source in served if turn < source.requests]
        if not job:
            return None

        def request(source: Source) -> None:
            try:
                self._take(source.path, workload, source.wanted)
            except Undecodable as error:
                raise InvalidOutput(f"{source.name} was served before, and now: {error}") from error

        with self._setting.turn(arm), ThreadPoolExecutor(workload.concurrency or len(job)) as pool:
            start = time.perf_counter()
            for _ in pool.map(request, job):
                pass
            return len(job), time.perf_counter() - start

    def _measurement(self, arm: int) -> Measurement:
        sources, seats = self._sources[arm], self._seats[arm]
        if not any(seat.served for seat in seats):
            name, line = sources[0].name, seats[0].failures[0]
            raise InvalidOutput(
                f"workload.picks={self._arms[arm].picks.value}: no clip was served; {name}: {line}"
            )
        cases = [self._case(arm, clip) for clip in range(len(sources))]
        job = self._jobs[arm]
        if job is not None:
            number, seconds = job
            metric = Metric("request_s", "req/s", "higher", False, (number / seconds,))
            notes = {"job": {"requests": number, "in_flight": self._arms[arm].concurrency}}
            cases.append(CaseRecord("all", metrics=(metric,), notes=notes))
        counters = {name: float(value) for name, value in sorted(self._counters[arm].items())}
        return Measurement(tuple(cases), counters, self._answers(arm))

    def _case(self, arm: int, clip: int) -> CaseRecord:
        source, seat = self._sources[arm][clip], self._seats[arm][clip]
        asked = self._arms[arm].repeats
        failed = len(seat.failures)
        unserved = [
            {"id": source.name, "outcome": "failed", "error": line} for line in seat.failures
        ]
        traffic = {
            "requests": asked,
            "served": asked - failed,
            "refused": 0,
            "failed": failed,
            "unserved": unserved,
        }
        if not seat.served:
            why = f"{source.name}: {seat.failures[0]}"
            return CaseRecord(source.name, skipped=why, notes={"traffic": traffic})
        assert seat.first is not None, "it was served"
        facts = self._references[clip].facts(source.wanted, seat.first)
        notes: dict[str, Any] = {"traffic": traffic, "video": facts}
        if source.events is not None:
            notes["evidence"] = shares(source.events, seat.first.picks)
        times = tuple(1e3 * seconds for seconds in seat.seconds)
        metrics = (Metric("decode_ms", "ms", "lower", True, times),)
        return CaseRecord(source.name, metrics=metrics, outputs=seat.outputs, notes=notes)

    def _answers(self, arm: int) -> dict[str, Any]:
        """Ask a model about the frames of every clip that was served."""
        if self._quiz is None:
            return {}
        frames = {
            source.name: seat.pixels
            for source, seat in zip(self._sources[arm], self._seats[arm], strict=True)
            if seat.served
        }
        return {"answers": self._quiz.ask(frames)}

    def close(self) -> None:
        """Let go of the frames."""
        for seats in self._seats:
            seats.clear()
