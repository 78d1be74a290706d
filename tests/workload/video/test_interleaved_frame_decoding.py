"""Arms that take turns on clips: fair, checked, and going on where a file is broken."""

import importlib.util
import json
import os
import random
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("av")
pytest.importorskip("cv2")

import clip_files as files
from planted_cells import output_difference

from labkit.config import ConfigError, Experiment, FramePicks, Workload
from labkit.workload import video
from labkit.workload.video import clip_library, frame_decoding, video_question_answering
from labkit.workload.video.clip_reader import DecodeCounts
from labkit.workload.video.frame_selection import Undecodable
from labkit.workload.video.interleaved_frame_decoding import InterleavedVideo
from labkit.workload.video.reference_decode_checks import strided_ranges
from labkit.workload.workload_protocols import (
    InvalidOutput,
    NoMachineKernels,
    TurnContext,
    single_arm_context,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two clips, one of them with a single keyframe."""
    folder = tmp_path_factory.mktemp("clips")
    for frames, gop in ((61, 7), (40, None)):
        files.synthesised_file(folder, frames, gop)
    return folder


def arms_on(folder, **more):
    return [files.asks(picks, decoder, clips=str(folder), **more) for picks, decoder in files.WAYS]


def turns_of(arms, decode_frames=frame_decoding.decode_frames, setting=None):
    return InterleavedVideo(
        arms,
        [clip_library.sources(arm) for arm in arms],
        setting or single_arm_context(0),
        decode_frames,
    )


def measured(arms, decode_frames=frame_decoding.decode_frames):
    turns = turns_of(arms, decode_frames)
    turns.warm_up()
    cases = turns.measure(lambda what: None)
    turns.close()
    return cases


def test_every_arm_is_measured_and_checked(folder):
    arms = arms_on(folder, repeats=3, warmup=1)
    results = measured(arms)
    for arm, measurement in zip(arms, results, strict=True):
        cases = {case.case: case for case in measurement.cases}
        assert list(cases) == ["40-None.mp4", "61-7.mp4", "all"]
        for name in ("40-None.mp4", "61-7.mp4"):
            (metric,) = cases[name].metrics
            assert (metric.name, metric.primary, len(metric.repeats)) == ("decode_ms", True, 3)
            first = results[0].cases[list(cases).index(name)].outputs
            assert output_difference(first, cases[name].outputs) is None
            traffic = cases[name].notes["traffic"]
            assert (traffic["requests"], traffic["served"], traffic["failed"]) == (3, 3, 0)
            assert "evidence" not in cases[name].notes  # nobody knows what the files show
        assert cases["all"].metrics[0].name == "request_s"
        counters = measurement.counters
        assert counters[f"picks.{arm.picks.value}"] == counters[f"decoder.{arm.decoder.value}"] == 6
        alone = counters.get("video.keyframes_alone", 0)
        assert (alone > 0) == (arm.picks not in (FramePicks.stream, FramePicks.seek))
    unique = results[3 + 1]
    facts = {case.case: case.notes["video"] for case in unique.cases[:2]}
    assert facts["40-None.mp4"]["repeated"] == 0 and facts["61-7.mp4"]["repeated"] == 0
    facts = {case.case: case.notes["video"] for case in results[2].cases[:2]}  # keyframes
    assert facts["40-None.mp4"]["repeated"] == 15 and facts["40-None.mp4"]["most_frames"] == 39
    assert facts["40-None.mp4"]["most_ms"] == pytest.approx(39 / 25 * 1e3)
    assert facts["61-7.mp4"]["keyframe_places"] == [[0, 7, 9]]


def test_clips_that_are_made_know_what_there_is_to_see(no_cache):
    clip = files.clip_of(60, 20, events=2, requests=0, frames=4)
    arms = [replace(files.asks(picks), made=[clip]) for picks in ("stream", "keyframes")]
    cases = measured(arms)
    for measurement in cases:
        (case,) = measurement.cases  # no request, no job
        assert len(case.outputs["picks"]) == 4
        assert {kind: n["planted"] for kind, n in case.notes["evidence"].items()} == {
            "colour change": 2, "direction change": 2, "collision": 2,
        }  # fmt: skip


def test_stretches_keep_every_place():
    for places in ([], [3], [0, 50, 100], [0, 7, 9, 11, 40], [1, 2, 4, 8, 16]):
        ranges = strided_ranges(places)
        assert [a + b * i for a, b, n in ranges for i in range(n)] == places


# ------------------------------------------------------------------ fair


def test_every_round_has_an_order_of_its_own(folder):
    entered = []

    @contextmanager
    def turn(arm):
        entered.append(arm)
        yield

    arms = arms_on(folder, repeats=10)
    turns = turns_of(arms, setting=TurnContext(0, random.Random(1), turn, NoMachineKernels()))
    turns.measure(lambda what: None)
    size = len(arms)
    rounds = [tuple(entered[i : i + size]) for i in range(0, size * 20, size)]
    assert all(sorted(one) == list(range(size)) for one in rounds)
    assert len(set(rounds)) > 10
    assert sorted(entered[size * 20 :]) == list(range(size))  # the jobs


def test_a_job_keeps_to_its_requests_in_flight(folder):
    now, most, done = [], [], []

    def decode_frames(path, workload, wanted):
        now.append(path)
        most.append(len(now))
        time.sleep(0.01)
        taken = frame_decoding.decode_frames(path, workload, wanted)
        now.remove(path)
        done.append(path)
        return taken

    arm = files.asks("keyframes", clips=str(folder), concurrency=3)
    sources = [[replace(source, requests=6) for source in clip_library.sources(arm)]]
    turns = InterleavedVideo([arm], sources, single_arm_context(0), decode_frames)
    (case,) = turns.measure(lambda what: None)
    assert max(most) == 3 and len(done) == 2 + 12
    assert case.cases[-1].notes["job"] == {"requests": 12, "in_flight": 3}


def test_times_count_waiting_for_a_decoder(folder):
    """A hardware decoder that works while the host waits takes no CPU time."""
    wait_s, decoded = 0.01, {}

    def decode_frames(path, workload, wanted):
        if path not in decoded:
            decoded[path] = frame_decoding.decode_frames(path, workload, wanted)
        time.sleep(wait_s)
        return decoded[path]

    arm = files.asks("keyframes", clips=str(folder), concurrency=3, repeats=2)
    turns = turns_of([arm], decode_frames)
    turns.warm_up()
    for source in turns._sources[0]:
        decode_frames(source.path, arm, source.num_frames)
    (measurement,) = turns.measure(lambda what: None)
    *clips, job = measurement.cases
    assert min(ms for clip in clips for ms in clip.metrics[0].repeats) >= 1e3 * wait_s
    (rate,) = job.metrics[0].repeats
    assert rate <= job.notes["job"]["requests"] / wait_s


# ------------------------------------------------------------------ checked


def moved(picks_arm, pick, reported):
    """Take frames as an arm does, but one pick is the frame behind; it says so or it does not."""

    def decode_frames(path, workload, wanted):
        taken = frame_decoding.decode_frames(path, workload, wanted)
        if workload.picks is not picks_arm:
            return taken
        place = taken.picks[pick]
        other = frame_decoding.decode_frames(path, files.asks("stream"), 61).frames[place + 1]
        if not reported:
            return replace(taken, frames={**taken.frames, place: other})
        picks = tuple(p + (p == place) for p in taken.picks)
        return replace(taken, picks=picks, frames={**taken.frames, place + 1: other})

    return decode_frames


@pytest.mark.parametrize(
    "how", [FramePicks.stream, FramePicks.seek, FramePicks.keyframes, FramePicks.nearest]
)
def test_a_pick_moved_by_one_frame_is_found(folder, how):
    arms = [files.asks(picks, clips=str(folder), frames=5) for picks in (FramePicks.stream, how)]
    for reported, words in (
        (False, "the pixels of pick 2 are not those that the decoder returns for frame {}"),
        (True, "pick 2 is frame {}, but frame {} was requested"),
    ):
        cases = measured(arms, moved(how, 2, reported))
        case = next(case for case in cases[1].cases if case.case == "61-7.mp4")
        requested = case.outputs["asked"][2]
        difference = output_difference(None, case.outputs)
        assert difference.startswith(
            words.format(*((requested + 1, requested) if reported else (requested,)))
        )


def test_frames_that_change_from_request_to_request_void_the_run(folder):
    draws = iter(range(100))

    def decode_frames(path, workload, wanted):
        taken = frame_decoding.decode_frames(path, workload, wanted)
        place = taken.picks[0]
        return replace(taken, frames={**taken.frames, place: taken.frames[place] ^ next(draws)})

    with pytest.raises(InvalidOutput, match="request 2 returned other frames"):
        measured([files.asks("stream", clips=str(folder), repeats=2)], decode_frames)


def another_way(number=None):
    """Take frames as an arm does, but for one request, or for all, decode every frame."""
    requests = []

    def decode_frames(path, workload, wanted):
        requests.append(path)
        taken = frame_decoding.decode_frames(path, workload, wanted)
        if number not in (None, len(requests)):
            return taken
        frames = 61 if "61" in path.name else 40
        counts = frame_decoding.decode_frames(path, files.asks("stream"), frames).counts
        return replace(taken, counts=counts)

    return decode_frames


def test_an_arm_that_goes_another_way_serves_nothing(folder):
    with pytest.raises(InvalidOutput, match=r"which does not match workload\.picks=keyframes"):
        measured([files.asks("keyframes", clips=str(folder))], another_way())


def test_a_later_request_that_goes_another_way_is_not_served(folder):
    arm = files.asks("keyframes", clips=str(folder), repeats=3)
    turns = turns_of([arm], another_way(6))  # the last of both clips' three
    (measurement,) = turns.measure(lambda what: None)
    traffic = {case.case: case.notes["traffic"] for case in measurement.cases[:2]}
    assert sorted(one["failed"] for one in traffic.values()) == [0, 1]
    (unserved,) = [line for one in traffic.values() for line in one["unserved"]]
    assert "which does not match workload.picks=keyframes" in unserved["error"]
    assert measurement.counters["picks.keyframes"] == 5


def test_a_job_that_goes_another_way_voids_the_run(folder):
    arm = files.asks("keyframes", clips=str(folder), concurrency=1)
    with pytest.raises(InvalidOutput, match=r"served before, but now failed: .*picks=keyframes"):
        measured([arm], another_way(3))


# ------------------------------------------------------------------ going on


def test_a_broken_file_fails_its_requests_and_the_run_goes_on(folder, tmp_path):
    for path in folder.glob("*.mp4"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "a.txt").write_text("no video")
    (tmp_path / ".hidden").write_text("left alone")
    (tmp_path / "sub").mkdir()
    arms = arms_on(tmp_path, repeats=2, warmup=1)
    for measurement in measured(arms):
        named = {case.case: case for case in measurement.cases}
        assert list(named) == ["40-None.mp4", "61-7.mp4", "a.txt", "all"]
        broken = named["a.txt"]
        assert broken.skipped.startswith("a.txt: ") and not broken.metrics
        assert broken.notes["traffic"]["failed"] == 2
        assert [one["id"] for one in broken.notes["traffic"]["unserved"]] == ["a.txt"] * 2
        assert named["all"].notes["job"]["requests"] == 2  # without the broken one


def test_a_run_in_which_nothing_was_served_is_void(tmp_path):
    (tmp_path / "a.txt").write_text("no video")
    with pytest.raises(InvalidOutput, match=r"no clip could be decoded; a\.txt: "):
        measured([files.asks("stream", clips=str(tmp_path))])


def test_an_arm_that_can_decode_no_clip_voids_no_other_arm(folder):
    def decode_frames(path, workload, wanted):
        if workload.picks is FramePicks.seek:
            raise Undecodable("lost")
        return frame_decoding.decode_frames(path, workload, wanted)

    arms = [files.asks(how, clips=str(folder)) for how in ("stream", "seek", "keyframes")]
    stream, seek, keyframes = measured(arms, decode_frames)
    names = ["40-None.mp4", "61-7.mp4"]
    assert [(case.case, case.skipped) for case in seek.cases] == [(x, f"{x}: lost") for x in names]
    assert seek.counters == {}
    for other in (stream, keyframes):
        assert [case.case for case in other.cases] == [*names, "all"]
        assert other.cases[-1].notes["job"]["requests"] == 2


def with_other_pixels(taken):
    place = taken.picks[0]
    return replace(taken, frames={**taken.frames, place: taken.frames[place] ^ 1})


def without_counts(taken):
    return replace(taken, counts=DecodeCounts())


@pytest.mark.parametrize(("number", "fault"), [(2, with_other_pixels), (5, without_counts)])
def test_what_voids_the_run_is_the_failure_of_its_arm(folder, number, fault):
    """The failure of a run is that of the arm whose turn an exception leaves."""
    running, requests = [], []

    @contextmanager
    def turn(arm):
        running.append(arm)
        yield
        running.remove(arm)

    def decode_frames(path, workload, wanted):
        taken = frame_decoding.decode_frames(path, workload, wanted)
        requests.append(workload.picks)
        is_faulty = workload is arms[1] and requests.count(workload.picks) == number
        return fault(taken) if is_faulty else taken

    more = {"clips": str(folder), "repeats": 2, "concurrency": 1}  # four requests, then the job
    arms = [files.asks(how, **more) for how in ("stream", "seek")]
    setting = TurnContext(0, random.Random(1), turn, NoMachineKernels())
    with pytest.raises(InvalidOutput):
        turns_of(arms, decode_frames, setting).measure(lambda what: None)
    assert running == [1]


def test_arms_whose_rounds_differ_have_processes_of_their_own():
    kind = video.KIND
    one = files.asks("stream")

    def apart(other):
        return kind.apart([fake_experiment(one), fake_experiment(other)])

    assert apart(files.asks("seek", frames=4)) is None
    assert "workload.repeats" in apart(files.asks("stream", repeats=2))
    assert "workload.clips" in apart(files.asks("stream", clips="here"))


# ------------------------------------------------------------------ damaged files

CHILD = """
import json, resource, sys
sys.path[:0] = {paths}
import clip_files as files
from labkit.workload.workload_protocols import single_arm_context
from labkit.workload.video import clip_library
from labkit.workload.video.interleaved_frame_decoding import InterleavedVideo
arms = [files.asks(p, d, frames=8, clips=sys.argv[1], warmup=1) for p, d in files.WAYS]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
turns = InterleavedVideo(arms, [clip_library.sources(arm) for arm in arms], single_arm_context(0))
turns.warm_up()
measurements = turns.measure(lambda what: None)
cases = [[[c.case, c.skipped, c.outputs] for c in m.cases if c.case != "all"] for m in measurements]
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({{"cases": cases, "grown": grown}}))
"""
SECONDS_EACH = 2.0  # for all arms; a hang takes forever
MOST_GROWN = 400 << 10  # KiB
MOST_MEMORY = 4 << 30  # bytes of address space; a header that asks for more fails


def damaged(data, draw):
    """Cut a file short, change some of its bytes, or both."""
    data = bytearray(data)
    what = draw.choice(["cut", "bytes", "run", "both"])
    if what in ("bytes", "both"):
        for _ in range(draw.choice([1, 3, 30])):
            data[draw.randrange(len(data))] = draw.randrange(256)
    if what == "run":
        start, size = draw.randrange(len(data)), draw.choice([4, 64, 2000])
        data[start : start + size] = draw.randbytes(len(data[start : start + size]))
    if what in ("cut", "both"):
        del data[draw.randrange(1, len(data)) :]
    return bytes(data)


def survive(tmp_path, folder, number):
    """Serve damaged files and two good ones in one process; check what became of each."""
    draw = random.Random(f"damage/{number}")
    originals = [path.read_bytes() for path in sorted(folder.glob("*.mp4"))]
    clips = tmp_path / "clips"
    clips.mkdir()
    for index, data in enumerate(originals):
        (clips / f"good-{index}.mp4").write_bytes(data)
    for index in range(number):
        (clips / f"bad-{index:04}.mp4").write_bytes(damaged(draw.choice(originals), draw))
    paths = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(paths=paths), str(clips)],
        capture_output=True,
        text=True,
        timeout=60 + SECONDS_EACH * number,
        env={**os.environ, "OPENCV_LOG_LEVEL": "SILENT"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY)),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["grown"] < MOST_GROWN, f"{outcome['grown'] / 1024:.0f} MiB"
    failed = served = 0
    for cases in outcome["cases"]:
        assert len(cases) == number + len(originals)
        for name, line, outputs in cases:
            if line is None:
                assert output_difference(None, outputs) is None, name
                served += name.startswith("bad")
            else:
                assert name.startswith("bad") and line.startswith(f"{name}: ")
                assert "\n" not in line and len(line) < 300, line
                failed += 1
    return failed, served


def test_damaged_files_lose_no_run(folder, tmp_path):
    failed, _ = survive(tmp_path, folder, 40)
    assert failed > 40


@pytest.mark.slow
def test_a_thousand_damaged_files_lose_no_run(folder, tmp_path):
    failed, served = survive(tmp_path, folder, 1000)
    print(f"{failed} requests failed, {served} of damaged files were served")
    assert failed > 1000 and served > 0


# ------------------------------------------------------------------ questions

MODEL = """
import sys
class Model: pass
def load(path): return Model(), path
def generate(model, processor, prompt, image=None, **options):
    assert len(image) == 4 and options["max_tokens"] == 1
    class Said: text = " b." if "colour" in prompt else "A"
    return Said
"""


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """A module that pretends to be mlx-vlm: it shows the wiring, not that mlx-vlm works."""
    package = tmp_path / "site" / "mlx_vlm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(MODEL)
    (package / "utils.py").write_text("def load_config(path): return {}")
    (package / "prompt_utils.py").write_text(
        "def apply_chat_template(processor, config, prompt, num_images): return prompt"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    yield package
    for name in [name for name in sys.modules if name.startswith("mlx_vlm")]:
        del sys.modules[name]


def test_answers_are_scored_from_the_picked_frames(folder, tmp_path, pretended):
    prompts = [
        {"clip": "61-7.mp4", "question": "Which colour?", "choices": ["x", "y"], "answer": 1},
        {"clip": "61-7.mp4", "question": "Which way?", "choices": ["x", "y"], "answer": 1},
    ]
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, prompts)))
    workload = files.asks("keyframes", clips=str(folder), questions=str(path), vlm="m", frames=4)
    turns = video.KIND.load([fake_experiment(workload)], single_arm_context(0))
    (case,) = turns.measure(lambda what: None)
    assert case.notes["answers"] == {"questions": 2, "asked": 2, "right": 1}


def fake_experiment(workload: Workload):
    experiment = Experiment.__new__(Experiment)
    experiment.workload = workload
    return experiment


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"clip": "61-7.mp4"}', "missing keys: question, choices, answer"),
        ('{"clip": "x", "question": "q", "choices": ["a", "b"], "answer": 0}', "clip='x'"),
        ('{"clip": "61-7.mp4", "question": "", "choices": ["a", "b"], "answer": 0}', "question"),
        ('{"clip": "61-7.mp4", "question": "q", "choices": ["a"], "answer": 0}', "2 to 10"),
        ('{"clip": "61-7.mp4", "question": "q", "choices": ["a", "b"], "answer": 2}', "0 to 1"),
        ("", "has no questions"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(folder, tmp_path, line, message):
    path = tmp_path / "q.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        video_question_answering.read(str(path), ["61-7.mp4"])


def test_without_a_model_that_answers_questions_are_refused(folder, tmp_path):
    if importlib.util.find_spec("mlx_vlm") is not None:
        pytest.skip("mlx-vlm is installed here")
    path = tmp_path / "q.jsonl"
    path.write_text('{"clip": "61-7.mp4", "question": "q", "choices": ["a", "b"], "answer": 0}')
    workload = files.asks("stream", clips=str(folder), questions=str(path), vlm="m")
    with pytest.raises(ConfigError, match=r"needs mlx-vlm.*pip install mlx-vlm"):
        video.KIND.check(fake_experiment(workload))


def test_a_line_with_a_failure_has_no_path(tmp_path):
    with pytest.raises(Undecodable, match="No such file"):
        frame_decoding.decode_frames(tmp_path / "x.mp4", files.asks("stream"), 4)
