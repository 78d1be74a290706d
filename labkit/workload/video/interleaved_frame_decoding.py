"""Interleaved requests for video frames: each request's time and its decoded frames.

In a round all arms do one request for the same clip, in random order, whether they share this
process or take turns with arms in processes of their own. The frames are checked outside the
measured time: after each request against those of the arm's first request for the clip, and after
all rounds against a reference decode. At the end every arm does a job: requests for many clips,
several of them concurrently.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from labkit.config import Workload
from labkit.records import CaseRecord
from labkit.records.metric_registry import measured
from labkit.workload.turn_order import Part
from labkit.workload.video import frame_decoding
from labkit.workload.video.clip_library import ClipSource
from labkit.workload.video.clip_reader import DecodeCounts, Pixels
from labkit.workload.video.clip_synthesis import shares
from labkit.workload.video.frame_decoding import DecodedFrames
from labkit.workload.video.frame_selection import Undecodable, picks_exact_positions
from labkit.workload.video.reference_decode_checks import FrameDigests, Reference, frame_digests
from labkit.workload.video.video_question_answering import VideoQuiz
from labkit.workload.workload_protocols import InvalidOutput, Measurement, TurnContext


@dataclass
class ClipSamples:
    """The results of one arm's requests for one clip.

    ``first``: digests of the first request's frames. ``pixels``: that request's frames, if a model
    is asked about them. ``seconds``, ``counts``: the time and the decoder's counts of each
    successful request. ``positions``: the arm's position in the round of each request.
    ``outputs``: the checked outputs for the record.
    """

    first: FrameDigests | None = None
    pixels: Sequence[Pixels] = ()
    seconds: list[float] = field(default_factory=list)
    counts: list[DecodeCounts] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    outputs: dict[str, Any] | None = None

    @property
    def served(self) -> bool:
        return self.first is not None and not self.failures


class InterleavedVideo:
    """The interleaved requests of several arms for the same clips; see ``InterleavedArms``.

    ``arms``: the workloads, which differ in how frames are picked and decoded. ``sources``: every
    arm's clips, with the same names in the same order. ``decode_frames``: serves a request; a
    parameter so that tests can inject faults. ``quiz``: asks a model questions about the picked
    frames; None: no questions are asked.
    """

    def __init__(
        self,
        arms: Sequence[Workload],
        sources: Sequence[Sequence[ClipSource]],
        context: TurnContext,
        decode_frames: Callable[..., DecodedFrames] = frame_decoding.decode_frames,
        quiz: VideoQuiz | None = None,
    ) -> None:
        self._arms = tuple(arms)
        self._sources = tuple(sources)
        self._context = context
        self._take = decode_frames
        self._quiz = quiz
        self._references = [Reference(source.path) for source in sources[0]]
        self._samples = [[ClipSamples() for _ in mine] for mine in sources]
        self._jobs: list[tuple[int, float] | None] = [None] * len(arms)
        self._counters = [Counter[str]() for _ in arms]

    def warm_up(self) -> None:
        """Read every file once, then let every arm do unmeasured requests for the smallest clip."""
        mine = self._sources[0]
        for source in mine:
            source.read_through()
        smallest = min(range(len(mine)), key=lambda clip: mine[clip].bytes)
        arms = list(range(len(self._arms)))
        self._context.order.shuffle(arms)
        for arm in arms:
            source = self._sources[arm][smallest]
            with self._context.turn(arm):
                for _ in range(self._arms[arm].warmup):
                    try:
                        self._take(source.path, self._arms[arm], source.num_frames)
                    except Undecodable:
                        break  # the measured request will fail too, and will be counted

    prepare = warm_up

    def measure(self, heartbeat: Callable[[str], None]) -> list[Measurement]:
        """Run all rounds of all clips, check the frames, then run each arm's job.

        The jobs have the clips that all arms have served, but for arms that have served none. See
        ``InterleavedArms.measure``.
        """
        order, arms = self._context.turn_order, tuple(range(len(self._arms)))
        repeats = self._arms[0].num_repeats
        parts = [Part(source.name, repeats, arms) for source in self._sources[0]]
        for number, now in enumerate(order.rounds(parts), 1):
            for arm, position in now.turns:
                self._request(arm, now.part, position)
            heartbeat(f"{number} of {repeats * len(parts)} rounds")
        self._check()
        served, _ = order.gather([self._served(arm) for arm in arms])
        able = [set(names) for names in served if names]  # of the arms that can decode a clip
        if not able:
            name, line = self._sources[0][0].name, self._samples[0][0].failures[0]
            raise InvalidOutput(f"no clip could be decoded; {name}: {line}")
        clips = set.intersection(*able)
        for now in order.rounds([Part("job", 1, arms)]):
            for arm, _ in now.turns:
                self._jobs[arm] = self._job(arm, clips.intersection(self._served(arm)))
        return [self._measurement(arm) for arm in arms]

    def _served(self, arm: int) -> list[str]:
        clips = zip(self._sources[arm], self._samples[arm], strict=True)
        return [source.name for source, samples in clips if samples.served]

    def _request(self, arm: int, clip: int, position: int) -> None:
        """Time one request, and check its frames against the arm's first request for the clip."""
        source, samples = self._sources[arm][clip], self._samples[arm][clip]
        samples.positions.append(position)
        with self._context.turn(arm):
            start = time.perf_counter()
            try:
                taken = self._take(source.path, self._arms[arm], source.num_frames)
            except Undecodable as error:
                samples.failures.append(str(error))
                return
            samples.seconds.append(time.perf_counter() - start)
            samples.counts.append(taken.counts)
            mine = frame_digests(taken)
            if samples.first is None:
                samples.first = mine
                if self._quiz is not None and self._quiz.about(source.name):
                    samples.pixels = [taken.frames[place] for place in taken.picks]
            elif (mine.picks, mine.digests) != (samples.first.picks, samples.first.digests):
                raise InvalidOutput(
                    f"{source.name}: request {len(samples.seconds)} returned other frames than "
                    "the first request"
                )

    def _check(self) -> None:
        """Check the frames of each arm's first request for each clip, and every request's counts.

        The digests of the frames are recorded beside those of the reference decode. A request whose
        counts do not match the arm's pick method counts as failed.
        """
        for clip, reference in enumerate(self._references):
            firsts = [first for clips in self._samples if (first := clips[clip].first) is not None]
            reference.decode({place for first in firsts for place in first.picks})
            for arm, workload in enumerate(self._arms):
                samples, source = self._samples[arm][clip], self._sources[arm][clip]
                if samples.first is None:
                    continue
                try:
                    samples.outputs = reference.outputs(workload, source.num_frames, samples.first)
                except Undecodable as error:
                    samples.failures += [str(error)] * len(samples.seconds)
                    continue
                picks = samples.first.picks
                for counts in samples.counts:
                    try:
                        reference.check_counts(workload, source.num_frames, picks, counts)
                    except Undecodable as error:
                        samples.failures.append(str(error))
                    else:
                        self._count(arm, picks, counts)

    def _count(self, arm: int, picks: Sequence[int], counts: DecodeCounts) -> None:
        workload, counters = self._arms[arm], self._counters[arm]
        counters[f"picks.{workload.picks.value}"] += 1
        counters[f"decoder.{workload.decoder.value}"] += 1
        for name, value in vars(counts).items():
            if value:
                counters[f"video.{name}"] += value
        counters["video.frames_picked"] += len(picks)
        if not picks_exact_positions(workload.picks):
            counters["video.keyframes_alone"] += counts.frames_decoded

    def _job(self, arm: int, clips: Collection[str]) -> tuple[int, float] | None:
        """Run an arm's job and return its number of requests and its seconds.

        The job requests every clip in ``clips``, the names of clips that the arm has served. The
        clips alternate, so that long and short clips are in flight together. Returns None if there
        is no such clip.
        """
        workload = self._arms[arm]
        pairs = zip(self._sources[arm], self._references, strict=True)
        served = [(source, reference) for source, reference in pairs if source.name in clips]
        most = max((source.requests for source, _ in served), default=0)
        job = [pair for turn in range(most) for pair in served if turn < pair[0].requests]
        if not job:
            return None

        def request(pair: tuple[ClipSource, Reference]) -> tuple[Sequence[int], DecodeCounts]:
            with _served_before(pair[0]):
                taken = self._take(pair[0].path, workload, pair[0].num_frames)
            return taken.picks, taken.counts

        with self._context.turn(arm):
            with ThreadPoolExecutor(workload.concurrency or len(job)) as pool:
                start = time.perf_counter()
                results = [*pool.map(request, job)]
                seconds = time.perf_counter() - start
            for (source, reference), (picks, counts) in zip(job, results, strict=True):
                with _served_before(source):
                    reference.check_counts(workload, source.num_frames, picks, counts)
        return len(job), seconds

    def _measurement(self, arm: int) -> Measurement:
        cases = [self._case(arm, clip) for clip in range(len(self._sources[arm]))]
        job = self._jobs[arm]
        if job is not None:
            number, seconds = job
            metric = measured("request_s", (number / seconds,))
            notes = {"job": {"requests": number, "in_flight": self._arms[arm].concurrency}}
            cases.append(CaseRecord("all", metrics=(metric,), notes=notes))
        counters = {name: float(value) for name, value in sorted(self._counters[arm].items())}
        if self._quiz is None:
            return Measurement(tuple(cases), counters)
        frames = {  # of every clip whose requests all succeeded
            source.name: samples.pixels
            for source, samples in zip(self._sources[arm], self._samples[arm], strict=True)
            if samples.served
        }
        return Measurement(tuple(cases), counters, {"answers": self._quiz.ask(frames)})

    def _case(self, arm: int, clip: int) -> CaseRecord:
        source, samples = self._sources[arm][clip], self._samples[arm][clip]
        asked, failed = self._arms[arm].num_repeats, len(samples.failures)
        traffic = {
            "requests": asked,
            "served": asked - failed,
            "refused": 0,
            "failed": failed,
            "unserved": [
                {"id": source.name, "outcome": "failed", "error": line} for line in samples.failures
            ],
        }
        if not samples.served:
            why = f"{source.name}: {samples.failures[0]}"
            return CaseRecord(source.name, skipped=why, notes={"traffic": traffic})
        assert samples.first is not None, "it was served"
        facts = self._references[clip].facts(source.num_frames, samples.first)
        notes: dict[str, Any] = {"traffic": traffic, "video": facts, "turns": samples.positions}
        if source.events is not None:
            notes["evidence"] = shares(source.events, samples.first.picks)
        times = tuple(1e3 * seconds for seconds in samples.seconds)
        metrics = (measured("decode_ms", times, primary=True),)
        return CaseRecord(source.name, metrics=metrics, outputs=samples.outputs, notes=notes)

    def close(self) -> None:
        for clips in self._samples:
            clips.clear()


@contextmanager
def _served_before(source: ClipSource) -> Iterator[None]:
    """Raise ``InvalidOutput`` if a request of a job fails, because the same request succeeded."""
    try:
        yield
    except Undecodable as error:
        raise InvalidOutput(f"{source.name} was served before, but now failed: {error}") from error
