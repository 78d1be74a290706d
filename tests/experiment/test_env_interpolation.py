"""The value of an environment variable is used, and only its expression is written."""

import dataclasses
import json
import pickle
import sys
from types import SimpleNamespace

import pytest

from labkit.cli import multirun_composition, run_study
from labkit.config import ConfigError, Engine, Experiment, ListedRequest, from_plain, to_plain
from labkit.config.env_interpolation import hide_values
from labkit.experiment.compose.cell_composer import to_cell, write_config
from labkit.experiment.schedule.cell_manifest import write_manifest
from labkit.experiment.worker.worker_setup import experiment_of, without_values
from labkit.records import Arm, CaseRecord, Record

SECRET = "http://user:s3cret@127.0.0.1:9"
OPENAI = ["engine=openai", "engine.server.preset=other"]
URL = "'${oc.env:LABKIT_TEST_URL}'"
INDIRECT = "engine.server.url='${model.name}'", "model.name='${oc.env:LABKIT_TEST_URL}'"
SWEEP = "++ablation.sweep={engine.server.url:['${oc.env:LABKIT_TEST_URL}','http://127.0.0.1:8']}"
KEY = "engine.server.api_key='${oc.env:LABKIT_TEST_KEY}'"


@pytest.fixture
def compose(monkeypatch, composed):
    monkeypatch.setenv("LABKIT_TEST_URL", SECRET)
    monkeypatch.setenv("LABKIT_TEST_KEY", "k3y-of-mine")
    return composed


@pytest.mark.parametrize(
    "words",
    [
        [*OPENAI, f"engine.server.url={URL}", KEY],
        [*OPENAI, "engine.server.url='${oc.env:LABKIT_TEST_URL,http://x}/v1'"],
        [*OPENAI, *INDIRECT],
        [*OPENAI, f"engine.server.command='serve {URL[1:-1]} {{port}}'"],
        [f"+ablation.arms.b={{engine:openai,engine.server.preset:other,engine.server.url:{URL}}}"],
        ["engine=openai", "ablation=sweep", SWEEP],
    ],
)
def test_the_expression_is_kept_and_the_value_is_used(words, compose, tmp_path):
    cell = compose(*words)
    texts = [json.dumps(arm.to_json()) for arm in cell.arms]
    with multirun_composition.initialized():
        write_config(tmp_path / "config.yaml", [], words)
    texts += [(tmp_path / "config.yaml").read_text(), cell.name]
    write_manifest(to_cell(cell, tmp_path / "cell"), 1)
    texts.append((tmp_path / "cell" / "cell.json").read_text())
    assert not any("s3cret" in text or "k3y" in text for text in texts)
    assert any("${oc.env:LABKIT_TEST_URL}" in text for text in texts)
    servers = [experiment_of(arm).engine.server for arm in cell.arms]
    assert any(SECRET in str((server.url, server.command)) for server in servers)
    servers = [pickle.loads(pickle.dumps(one)).engine.server for one in cell.experiments.values()]
    assert any(SECRET in str((server.url, server.command)) for server in servers)


@pytest.mark.parametrize("last", [["-m"], []])
def test_hydra_names_folders_by_expressions(compose, tmp_path, monkeypatch, last):
    jobs = []
    study = SimpleNamespace(run=lambda name, folder, compose: jobs.append((name, folder)))
    monkeypatch.setattr(sys, "argv", ["labkit"])
    monkeypatch.chdir(tmp_path)
    multirun_composition.register()
    run_study.run_hydra([*OPENAI, f"engine.server.url={URL}", f"out={tmp_path}/s", *last], study)
    ((name, folder),) = jobs
    assert folder == tmp_path / "s" / name and "oc.env_LABKIT_TEST_URL" in name
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any("s3cret" in path.read_text() for path in files)


def test_numbers_and_defaults_from_the_environment_are_values(compose, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_N", "2")
    cell = compose(
        "engine.threads=${oc.env:LABKIT_TEST_N}",
        "seed='${oc.decode:${oc.env:LABKIT_TEST_N}}'",
        "model.name='${oc.env:LABKIT_TEST_NOT_SET,mine}'",
    )
    assert (cell.experiment.engine.threads, cell.experiment.seed) == (2, 2)
    assert to_plain(cell.experiment.model)["name"] == "mine"


def test_a_record_does_not_hold_the_value(compose):
    cell = compose(*OPENAI, f"engine.server.url={URL}")
    notes = {"server": {"url": SECRET, "also": ["a", 1, None, "as user:s3cret: no"]}}
    detail = f"{SECRET}/v1/models: refused"
    record = Record("base", "baseline", 0, 0, 0, "crashed", "now", detail=detail, notes=notes)
    hidden = without_values(record, cell.arms)
    assert "s3cret" not in json.dumps(hidden.to_json())
    assert hidden.detail == "${oc.env:LABKIT_TEST_URL}/v1/models: refused"
    assert hidden == dataclasses.replace(record, detail=hidden.detail, notes=hidden.notes)
    plain = [dataclasses.replace(cell.arms[0], config={"seed": 1})]
    assert without_values(record, plain) is record


@pytest.mark.parametrize("key", ["baseline", "tokens", "base", "bare"])
def test_a_value_that_is_also_a_word_of_the_record_leaves_the_record_readable(monkeypatch, key):
    """Servers' own pages tell their users to set keys such as ``ollama``."""
    monkeypatch.setenv("LABKIT_TEST_KEY", key)
    config = {"engine": {"server": {"api_key": "${oc.env:LABKIT_TEST_KEY}"}}}
    arm = Arm("bare_base", "baseline", {}, config)
    outputs = {"kind": "tokens", "requests": []}
    cases = (CaseRecord("all", outputs=outputs, notes={"text": f"key {key}"}),)
    record = Record(
        "bare_base", "baseline", 0, 0, 0, "crashed", "now", detail=f"key {key}", cases=cases
    )
    hidden = without_values(record, [arm])
    assert (hidden.run, hidden.role, hidden.cases[0].outputs) == (record.run, "baseline", outputs)
    shown = key in arm.name
    assert {hidden.detail, hidden.cases[0].notes["text"]} == {
        f"key {key}" if shown else "key ${oc.env:LABKIT_TEST_KEY}"
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine.server.url='ftp://${oc.env:LABKIT_TEST_URL}'"], "must begin with http"),
        (["engine.server.url='${oc.env:LABKIT_TEST_NONE}'"], "LABKIT_TEST_NONE"),
        (["engine.server.api_key=abc", "engine.server.url=http://x"], "the key would be written"),
    ],
)
def test_a_message_does_not_hold_the_value(compose, words, message):
    with pytest.raises(ConfigError, match=message) as caught:
        compose(*OPENAI, *words)
    assert "s3cret" not in str(caught.value)


def test_a_refusal_of_an_option_has_its_expression(monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_KEY", "k3y-of-mine")
    key = "${oc.env:LABKIT_TEST_KEY}"
    with pytest.raises(ConfigError, match="does not read it") as caught:
        from_plain(Engine, {"server": {"api_key": key}})
    assert str(caught.value).startswith(f"engine.server.api_key={key}: ")


def test_a_variable_that_a_worker_lacks_is_named(compose, monkeypatch):
    cell = compose(*OPENAI, f"engine.server.url={URL}")
    monkeypatch.delenv("LABKIT_TEST_URL")
    with pytest.raises(ConfigError, match="variable LABKIT_TEST_URL is not set"):
        experiment_of(cell.arms[0])


def test_texts_of_requests_are_never_replaced(monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_URL", SECRET)
    text = "echo ${oc.env:LABKIT_TEST_URL}"
    assert from_plain(ListedRequest, {"prompt": text}).prompt == text
    listed = {"prompts": {"source": "listed", "listed": [{"prompt": text}]}}
    plain = {"model": {"shape": {}}, "ablation": {"arms": {"base": {}}}, "workload": listed}
    assert from_plain(Experiment, plain).workload.prompts.listed[0].prompt == text
    assert hide_values({"a": "same"}, {"b": text}) == {"a": "same"}
