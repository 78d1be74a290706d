"""Video workloads (``workload.kind=video``): picking and decoding a clip's frames for a model.

No engine takes part. The measured work is everything before the model, from the file to the pixels.
Arms differ in how frames are picked and decoded (``workload.picks``, ``workload.decoder``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.config import Clip, Decoder, Experiment, FramePicks, Workload
from labkit.config.package_extras import require_packages
from labkit.workload.workload_protocols import START_SECONDS, Estimate, InterleavedArms, TurnContext

# Measured on a two-core x86-64 with one decoder thread; used only in estimates.
PIXELS_PER_SECOND = 300e6
PACKETS_PER_SECOND = 200e3
REQUEST_SECONDS = 3e-3
PROCESS_BYTES = 80 << 20
# Workload options that must be equal in all arms of an interleaved run.
SHARED = ("repeats", "warmup", "made", "clips", "questions", "vlm")


class VideoKind:
    """The ``WorkloadKind`` of video workloads."""

    def check(self, experiment: Experiment) -> None:
        from labkit.workload.video import clip_library, video_question_answering

        workload = experiment.workload
        modules = ("av", *(["cv2"] if workload.decoder is Decoder.opencv else []))
        require_packages(modules, "video", f"workload={workload.name}")
        if workload.clips is not None:
            files = clip_library.files_of(workload.clips)
            video_question_answering.check(workload, [path.name for path in files])

    def prepare(self, experiment: Experiment) -> None:
        """Check the workload again, and synthesise the clips of ``workload.made``."""
        from labkit.workload.video import clip_library

        self.check(experiment)
        clip_library.sources(experiment.workload)

    def apart(self, experiments: Sequence[Experiment]) -> str | None:
        first, *others = (e.workload for e in experiments)
        for name in SHARED:
            if any(getattr(w, name) != getattr(first, name) for w in others):
                return f"the arms differ in workload.{name}, so their rounds would not be aligned"
        return None

    def not_live(self, experiments: Sequence[Experiment]) -> str | None:
        return self.apart(experiments)

    def load(self, experiments: Sequence[Experiment], context: TurnContext) -> InterleavedArms:
        """Synthesise missing clips, and load the model if questions are configured."""
        from labkit.workload.video import clip_library, video_question_answering
        from labkit.workload.video.interleaved_frame_decoding import InterleavedVideo

        workloads = [e.workload for e in experiments]
        sources, first = [clip_library.sources(w) for w in workloads], workloads[0]
        quiz = None
        if first.questions is not None and first.vlm is not None:
            questions = video_question_answering.read(
                first.questions, [source.name for source in sources[0]]
            )
            quiz = video_question_answering.VideoQuiz(
                questions, video_question_answering.MlxVlm(first.vlm)
            )
        return InterleavedVideo(workloads, sources, context, quiz=quiz)

    def estimate(self, experiment: Experiment) -> Estimate:
        workload = experiment.workload
        seconds, largest = START_SECONDS, 0
        for length, gop, pixels, num_frames, requests in _sizes(workload):
            decoded = _decoded(workload.picks, length, gop, num_frames)
            once = REQUEST_SECONDS + decoded * pixels / PIXELS_PER_SECOND
            if workload.picks is not FramePicks.stream:
                once += 2 * length / PACKETS_PER_SECOND
            check = length * pixels / PIXELS_PER_SECOND
            seconds += once * (workload.num_repeats + requests) + check
            largest = max(largest, 3 * pixels * num_frames)
        guess = "the plan does not read your own clips, so its estimates are guesses"
        warnings = () if workload.clips is None else (guess,)
        return Estimate(seconds, PROCESS_BYTES + largest, warnings)


def _sizes(workload: Workload) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield a clip's frames, GOP, pixels, frames to pick and requests; a user's are guessed."""
    clips = workload.made
    if workload.clips is not None:
        from labkit.workload.video import clip_library

        like = Clip(name="unknown", gop=250)
        clips = [like] * len(clip_library.files_of(workload.clips))
    for clip in clips:
        gop = clip.gop or clip.length
        num_frames = clip.frames or workload.frames
        yield clip.length, gop, clip.width * clip.height, num_frames, clip.requests


def _decoded(picks: FramePicks, length: int, gop: int, num_frames: int) -> int:
    if picks is FramePicks.stream:
        return length
    if picks is FramePicks.seek:
        return min(length, num_frames * (gop + 1) // 2)
    return min(num_frames, -(-length // gop))


KIND = VideoKind()
