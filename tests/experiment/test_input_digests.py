"""Files that enter a cell belong to its identity, and a study is not continued with others."""

import dataclasses
import json
import os

import pytest

from labkit import app, archive
from labkit.cli import hydra_arguments, study_composer
from labkit.config import ConfigError
from labkit.experiment.compose.cell_composer import to_cell
from labkit.experiment.compose.input_digests import input_digests
from labkit.experiment.schedule.cell_manifest import (
    refuse_changed_inputs,
    refuse_changes,
    write_manifest,
)
from labkit.records import DIGESTS_FILE, RecordError, read_arms
from labkit.replicate.authors_question import AuthorsCell, ReaderOptions

# An option, its value, and a file that it makes a cell read.
INPUTS = [
    ("workload.prompts.path", "prompts.jsonl", "prompts.jsonl"),
    ("workload.texts", "text.txt", "text.txt"),
    ("workload.questions", "questions.jsonl", "questions.jsonl"),
    ("workload.clips", "clips", "clips/a.mp4"),
    ("model.path", "m.gguf", "m.gguf"),
    ("model.path", "model", "model/model.safetensors"),
    ("engine.drafts.draft_path", "draft", "draft/config.json"),
    ("workload.vlm", "vlm", "vlm/config.json"),
    ("engine.attention.resolver", "mine_single:Maps", "mine_beside.py"),
    ("engine.attention.backend", "mine_package.part:Backend", "mine_package/__init__.py"),
    ("workload.kind", "mine_single:Kind", "mine_single.py"),
]
FILES = {
    "mine_single.py": "import json\nimport mine_beside\n",
    "mine_beside.py": "x = 1\n",
    "mine_package/__init__.py": "",
    "mine_package/part.py": "import no_such_module\n",
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (*FILES, *(file for _, _, file in INPUTS)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(FILES.get(name, "before"))
    return tmp_path


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def reading(cell, key, value):
    """Return the cell with arms that read a file."""
    arms = [dataclasses.replace(arm, config=nested(key, value)) for arm in cell.arms]
    return dataclasses.replace(cell, arms=tuple(arms))


@pytest.mark.parametrize(("key", "value", "file"), INPUTS)
def test_a_study_is_not_continued_after_a_file_changed(files, make_cell, key, value, file):
    cell = reading(make_cell(), key, value)
    write_manifest(cell, 1)
    refuse_changes(cell)
    refuse_changed_inputs(cell)
    status = (files / file).stat()
    (files / file).write_text(FILES.get(file, "before").replace("\n", "\n#") + "after")
    os.utime(files / file, ns=(status.st_atime_ns, status.st_mtime_ns))
    for check in (refuse_changes, refuse_changed_inputs):
        with pytest.raises(
            ConfigError, match=rf"arm base: the file of {key}.* was changed: .* now"
        ):
            check(cell)
    listed = (cell.dir / DIGESTS_FILE).read_text()
    for path in (cell.dir / "arms").glob("*.json"):  # as older versions wrote it
        data = json.loads(path.read_text())
        assert list(data.pop("inputs"))
        path.write_text(json.dumps(data))
    (cell.dir / DIGESTS_FILE).write_text("")
    refuse_changes(cell)
    refuse_changed_inputs(cell)
    assert all(not arm.inputs for arm in read_arms(cell.dir)) and listed


def test_the_digests_name_no_path_and_skip_what_has_a_version(files, monkeypatch):
    config = {"engine": {"attention": {"resolver": "mine_single:Maps"}}, "seed": 1}
    names = {f"engine.attention.resolver/{name}" for name in ("mine_single.py", "mine_beside.py")}
    assert input_digests(config, {}).keys() == names
    assert input_digests(config, {"revision": "0" * 40}) == {}
    server = {"name": "openai", "server": {"model": "llama3:latest"}}
    installed = {"attention": {"backend": "numpy.linalg:norm"}, **server}
    assert input_digests({"engine": installed, "model": {"path": "/nowhere"}}, {}) == {}


def test_the_command_names_the_file_that_changed(files, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["labkit"])
    prompts = files / "prompts.jsonl"
    prompts.write_text('{"prompt": "before", "max_tokens": 4}')
    source = ["workload.prompts.source=file", "workload.prompts.path=prompts.jsonl"]
    words = ["workload.num_requests=null", *source, "out=s", "plan=true"]
    study_composer.register()
    (composed,) = study_composer.compose_cells(hydra_arguments.parse(words))
    write_manifest(to_cell(composed, files / "s" / composed.name), 4)
    prompts.write_text('{"prompt": "after", "max_tokens": 4}')
    with pytest.raises(SystemExit, match="2"):
        app.main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert "arm base: the file of workload.prompts.path was changed: its SHA-256 was" in line


def text(folder, inputs):
    """Return the path of the prompts of a cell that came with ``inputs``."""
    (arm, *_) = read_arms(folder)
    cell = AuthorsCell(folder, {}, (arm,), inputs)
    return cell.config(arm, ReaderOptions())["workload"]["prompts"]["path"]


def test_a_text_that_a_variable_names_is_found_in_the_archive(files, make_cell, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_PROMPTS", "prompts.jsonl")
    named = "${oc.env:LABKIT_TEST_PROMPTS}"
    cell = reading(make_cell(folder="study/a"), "workload.prompts.path", named)
    write_manifest(cell, 1)
    sources = archive._sources([cell.dir])
    monkeypatch.delenv("LABKIT_TEST_PROMPTS")
    inputs = {name.removeprefix("inputs/"): name for name in sources}
    assert sources[text(cell.dir, inputs)] == b"before"
    assert text(cell.dir, {}) == named


def test_an_archive_has_two_texts_of_one_name_and_each_cell_gets_its_own(files, make_cell):
    cells = []
    for name in ("a", "b"):
        (files / name).mkdir()
        (files / name / "prompts.jsonl").write_text(name)
        cell = make_cell(folder=f"study/{name}")
        cell = reading(cell, "workload.prompts.path", f"{name}/prompts.jsonl")
        write_manifest(cell, 1)
        cells.append(cell.dir)
    sources = archive._sources(cells)
    inputs = {name.removeprefix("inputs/"): name for name in sources}
    earlier = {"workload.prompts.path/prompts.jsonl": "as an earlier version named it"}

    for folder in cells:
        assert sources[text(folder, inputs)] == folder.name.encode()
        assert text(folder, earlier) == "as an earlier version named it"
        for path in (folder / "arms").glob("*.json"):  # as older versions wrote it
            path.write_text(json.dumps(json.loads(path.read_text()) | {"inputs": {}}))
        (folder / DIGESTS_FILE).write_text("")
    assert len(archive._sources(cells[:1])) == 1
    with pytest.raises(RecordError, match=r"another arm has another file as inputs/workload"):
        archive._sources(cells)
