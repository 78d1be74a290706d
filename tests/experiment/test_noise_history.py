"""The history of studies on this machine: noise and times of comparable cells."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import pytest
from planted_runs import PlantedRuns, kernel_fields

from labkit import analysis, config
from labkit.experiment.schedule import noise_history
from labkit.experiment.schedule.cell_runner import run_cell
from labkit.experiment.schedule.noise_history import MeasuredCell, StudyHistory
from labkit.machine.facts import machine_snapshot
from labkit.records import Record, read_arms


def configured(isolation=config.Isolation.process, model="tiny", **workload):
    """What the stub cells ask, or nearly."""
    case = config.Case(name="one", decode=1, context=16)
    plain = {"name": "stub", "kind": "kernel", "cases": [case], **workload}
    model = config.Model(name=model, shape=config.ModelShape())
    experiment = SimpleNamespace(workload=config.Workload(**plain), model=model)
    arms, experiments = [SimpleNamespace(name="base")], {"base": experiment}
    return SimpleNamespace(arms=arms, experiments=experiments, isolation=isolation)


class Timed(PlantedRuns):
    """The processes take 1, 2, 3, ... s on this machine and measure for a quarter of that."""

    def fields(self, run, cell):
        process_s = float(len(self.launched))
        seconds = {"process": process_s, "measure": process_s / 4}
        return kernel_fields(100.0) | {"seconds": seconds, "environment": machine_snapshot.take()}


@pytest.fixture
def done(make_cell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cell = make_cell(folder="outputs/one/cell")
    run_cell(cell, Timed())
    analysis.write_cell(cell.dir)
    return cell


def test_arms_are_those_of_a_cell_if_their_options_are(done, tmp_path):
    first, *others = done.arms
    assert noise_history.has_arms(done.dir, [*others, first])
    assert not noise_history.has_arms(done.dir, others)
    engine = {**first.config["engine"], "threads": 3}
    other = replace(first, config={**first.config, "engine": engine})
    assert not noise_history.has_arms(done.dir, [other, *others])
    assert not noise_history.has_arms(tmp_path / "nothing", done.arms)


def test_start_up_is_a_run_s_time_beyond_its_measurement(done, tmp_path):
    (study,) = StudyHistory(tmp_path / "outputs" / "two").studies(configured())
    assert study[0].resolve() == done.dir
    assert noise_history.median_start_up_s(study[0]) == 1.5


def test_only_the_same_workload_isolation_and_machine_count(done, tmp_path, monkeypatch):
    assert list(StudyHistory(tmp_path).studies(configured())) != []
    assert list(StudyHistory(tmp_path).studies(configured(name="other"))) == []
    assert list(StudyHistory(tmp_path).studies(configured(repeats=2))) == []
    turns = config.Isolation.in_process
    assert list(StudyHistory(tmp_path).studies(configured(turns))) == []
    assert list(StudyHistory(tmp_path).studies(configured(), turns)) == []
    assert list(StudyHistory(tmp_path).studies(configured(turns), config.Isolation.process)) != []
    here = machine_snapshot.take()
    monkeypatch.setattr(machine_snapshot, "take", lambda: {**here, "cpu_model": "another"})
    assert list(StudyHistory(tmp_path).studies(configured())) == []


def test_studies_of_other_programs_lie_one_folder_deeper(done, tmp_path):
    deeper = tmp_path / "outputs" / "2026-11-29" / "20-00-00"
    deeper.mkdir(parents=True)
    done.dir.parent.rename(deeper / "0")
    (study,) = StudyHistory(tmp_path / "outputs" / "two").studies(configured())
    assert study[0].resolve() == (deeper / "0" / "cell").resolve()


def test_an_author_s_cell_counts_on_any_machine_after_this_machine_s(done, tmp_path, monkeypatch):
    base = read_arms(done.dir)[0]
    author = MeasuredCell(tmp_path / "theirs", {"design": {"isolation": "process"}}, base)
    own, other = StudyHistory(tmp_path / "outputs" / "two", [author]).studies(configured())
    assert own[0].resolve() == done.dir and other[0] == author.folder
    here = machine_snapshot.take()
    monkeypatch.setattr(machine_snapshot, "take", lambda: {**here, "cpu_model": "another"})
    history = StudyHistory(tmp_path, [author])
    assert [folder for folder, _ in history.studies(configured())] == [author.folder]
    assert list(history.studies(configured(repeats=2))) == []
    assert history.source(author.folder) == f"{author.folder}, the author's"
    assert history.source(done.dir) == str(done.dir)


def test_a_cell_is_read_once(done, tmp_path, monkeypatch):
    reads = []
    read = noise_history.read_cell
    monkeypatch.setattr(noise_history, "read_cell", lambda path: reads.append(path) or read(path))
    past = StudyHistory(tmp_path / "outputs" / "two")
    assert list(past.studies(configured())) == list(past.studies(configured())) != []
    assert len(reads) == 1


def test_requests_of_another_model_are_another_workload():
    from labkit.records import Arm

    chat, tiny = config.Workload(), {"shape": config.ModelShape()}
    plain = {"workload": config.to_plain(chat), "model": {"name": "tiny"}}
    kept = Arm("base", "baseline", {}, plain)
    ours = SimpleNamespace(workload=chat, model=config.Model(name="tiny", **tiny))
    assert noise_history._same_workload(kept, ours)
    ours.model = config.Model(name="small", **tiny)
    assert not noise_history._same_workload(kept, ours)
    ours.model = config.Model(name="tiny", **tiny)
    plain["model"]["shape"] = {"num_layers": tiny["shape"].num_layers}
    assert noise_history._same_workload(kept, ours)
    plain["model"]["shape"] = {"num_layers": 48}  # of the same name, as all of model=local are
    assert not noise_history._same_workload(kept, ours)
    del plain["model"]["shape"]
    del plain["workload"]["concurrency"]  # a record from before that option
    assert noise_history._same_workload(kept, ours)
    del plain["workload"]["prompts"]["path"]  # nothing read it, so the record lacks it
    assert noise_history._same_workload(kept, ours)
    plain["workload"]["prompts"]["source"] = "listed"
    assert not noise_history._same_workload(kept, ours)
    plain["workload"]["prompts"]["source"] = chat.prompts.source
    plain["workload"]["num_requests"] = 8
    assert not noise_history._same_workload(kept, ours)


def test_a_block_s_time_is_that_of_all_its_processes(make_cell, tmp_path):
    cell = make_cell(folder="cell", blocks=2)
    run_cell(cell, Timed())
    assert noise_history.median_block_s(cell.dir) == median([1 + 2 + 3, 4 + 5 + 6])
    assert noise_history.median_block_s(tmp_path / "nothing") is None


def test_a_block_with_a_failed_run_has_no_known_time(make_cell):
    cell = make_cell(folder="cell")
    run_cell(cell, Timed())
    first, *_ = (cell.dir / "runs").glob("*.json")
    text = first.read_text().replace('"outcome": "ok"', '"outcome": "crashed"')
    first.write_text(text.replace('"detail": null', '"detail": "planted"'))
    assert noise_history.median_block_s(cell.dir) is None


def test_a_block_whose_arm_runs_out_of_memory_as_it_claims_has_its_time(make_cell):
    class Dies(Timed):
        def fields(self, run, cell):
            died = {"outcome": "oom", "detail": "killed", "cases": ()}
            return super().fields(run, cell) | (died if run.arm == "seq_map" else {})

    for folder, claims, block_s in (("claimed", True, 1 + 2 + 3), ("not claimed", False, None)):
        cell = make_cell(folder=folder)
        arms = (replace(a, out_of_memory=claims and a.name == "seq_map") for a in cell.arms)
        cell = replace(cell, arms=tuple(arms))
        run_cell(cell, Dies())
        assert noise_history.median_block_s(cell.dir) == block_s


def test_a_run_without_measurement_has_no_start_up(tmp_path):
    record = Record("a", "arm", 0, 0, 1, "crashed", "2026-11-20T20:00:00Z", detail="planted")
    assert record.start_up_s is None
    timed = replace(record, seconds={"process": 2.0, "measure": 0.5})
    assert timed.start_up_s == 1.5
    assert noise_history.median_start_up_s(tmp_path) is None
