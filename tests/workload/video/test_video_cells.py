"""Cells of videos, as the command line asks for them: no engine, and one line for a mistake."""

import pytest

pytest.importorskip("av")
pytest.importorskip("cv2")

import clip_files as files

from labkit import workload
from labkit.config import ConfigError
from labkit.experiment.worker import worker_setup
from labkit.records import counter_registry


@pytest.mark.parametrize("override", ["ablation=keyframes", "experiment=keyframes"])
def test_every_arm_of_the_ablation_composes(composed, override):
    cell = composed(override)
    names = [arm.name for arm in cell.arms]
    assert names[0] == "stream" and names[-1] == "control"
    assert {"opencv", "seek", "keyframes", "nearest", "keyframes_unique"} <= set(names)
    assert cell.isolation.value == "in_process"
    for arm in cell.arms:
        # No engine runs, so none is recorded and none is claimed.
        assert set(arm.config) == {"workload", "seed"} and arm.engine_counter is None
        assert arm.identity == "frames" and len(arm.engaged) == 3
        assert all(counter_registry.find_counter(name) for name in arm.engaged)
        assert worker_setup.experiment_of(arm).workload.kind == "video"
    lengths = [workload.estimate(arm).seconds for arm in cell.experiments.values()]
    assert all(seconds > 1 for seconds in lengths)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["engine=mlx_lm"],
            "engine.name=mlx_lm: workload=video decodes clips and uses no engine or model",
        ),
        (["engine.kv.block_size=32"], "engine.kv.block_size=32: workload=video decodes clips"),
        (
            ["model=small"],
            "model.name=small: workload=video decodes clips and uses no engine or model",
        ),
        (["workload.clips=nowhere"], "workload.clips=nowhere is not a folder"),
        (["workload.frames=0"], "workload.frames=0: must be 1 to 4096"),
        (["workload.decoder=opencv", "workload.picks=seek"], "it can only stream"),
        (["ablation.claims.identity=tokens"], "set frames, bitwise or none"),
        (["workload.state=cold"], "workload.state=cold: workload.kind=video does not read it"),
        (["workload.arrivals.kind=at_once"], "workload.arrivals: workload.kind=video does not"),
    ],
)
def test_mistakes_are_one_line(composed, overrides, message):
    with pytest.raises(ConfigError) as caught:
        composed("workload=video", *overrides)
    assert message in str(caught.value)


def test_frames_are_no_claim_about_an_engine(composed):
    with pytest.raises(ConfigError, match="workload=chat has no frames"):
        composed("ablation.claims.identity=frames")


def test_an_empty_folder_is_refused(composed, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").write_text("")
    with pytest.raises(ConfigError, match="has no files"):
        composed("workload=video", f"workload.clips={tmp_path}")


def test_every_claim_of_the_ablation_holds(composed, no_cache):
    cell = composed("ablation=keyframes", "design.control=false", "workload.repeats=1")
    clips = [files.clip_of(61, 7, events=1), files.clip_of(40, requests=0)]
    claimed = cell.experiment.ablation.claims.engaged
    for name, experiment in cell.experiments.items():
        experiment.workload.made = clips
        measurement = workload.measure(experiment)
        assert all(measurement.counters[counter] > 0 for counter in claimed[name]), name
        registered = {
            counter: counter_registry.find_counter(counter) for counter in measurement.counters
        }
        assert all(registered.values()), registered
