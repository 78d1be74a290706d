"""Files that enter a cell belong to its identity, and a study is not continued with others."""

import dataclasses
import importlib
import json
import os
import sys

import pytest

from labkit import app, archive
from labkit.cli import hydra_arguments, multirun_composition
from labkit.config import ConfigError
from labkit.experiment.compose.cell_composer import to_cell
from labkit.experiment.compose.input_digests import PACKAGE, input_digests, named_as_begun
from labkit.experiment.schedule.cell_manifest import write_manifest
from labkit.experiment.schedule.design_change_check import refuse_changed_inputs, refuse_changes
from labkit.records import DIGESTS_FILE, Arm, RecordError, read_arms
from labkit.replicate.original_study import AuthorsCell, ReaderOptions

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
    revision = {"revision": "0" * 40}  # of labkit, whose commit has no class of the user's
    assert input_digests(config, revision).keys() == names
    elsewhere, here = ({**revision, "repository": str(f)} for f in (files / "clips", files))
    assert input_digests(config, elsewhere).keys() == names
    assert input_digests(config, here) == {}
    server = {"name": "openai", "server": {"model": "llama3:latest"}}
    installed = {"attention": {"backend": "numpy.linalg:norm"}, **server}
    assert input_digests({"engine": installed, "model": {"path": "/nowhere"}}, {}) == {}


BACKEND = "engine.attention.backend"


@pytest.fixture
def package(files, make_cell):
    """Return a cell with a class whose package has two files of one name."""
    (files / "mine_package" / "sub").mkdir()
    (files / "mine_package" / "sub" / "__init__.py").write_text("other = 1\n")
    cell = reading(make_cell(), BACKEND, "mine_package.part:Backend")
    write_manifest(cell, 1)
    return cell


def rewrite_inputs(cell, change):
    """Change the digests in the arms' files."""
    for path in (cell.dir / "arms").glob("*.json"):
        data = json.loads(path.read_text())
        path.write_text(json.dumps(data | {"inputs": change(data["inputs"])}))
    (cell.dir / DIGESTS_FILE).write_text("")


def test_each_module_of_a_package_has_a_digest(files, package):
    names = [f"{BACKEND}/mine_package/{n}" for n in ("__init__.py", "part.py", "sub/__init__.py")]
    assert [list(arm.inputs) for arm in read_arms(package.dir)] == [names] * 3
    (files / "mine_package" / "sub" / "__init__.py").unlink()
    with pytest.raises(ConfigError, match=r"file of .*backend/mine_package/sub/__init__.py was"):
        refuse_changed_inputs(package)


@pytest.mark.parametrize("listed", [0, 2])
def test_a_study_whose_modules_have_an_earlier_version_s_names_continues(files, package, listed):
    """It named a module by its file, one of several of a name, and listed labkit's beside them."""

    def as_named_earlier(inputs):
        digests = list(inputs.values())
        labkits = [*(path.name for path in PACKAGE.rglob("*.py")), "former_name.py"]
        own = {"__init__.py": digests[listed], "part.py": digests[1]}
        named = dict.fromkeys(labkits, "0" * 16) | own
        return {f"{BACKEND}/{name}": digest for name, digest in named.items()}

    rewrite_inputs(package, as_named_earlier)
    refuse_changed_inputs(package)
    assert "sources/mine_package/sub/__init__.py" in archive._sources([package.dir])
    (files / "mine_package" / "part.py").write_text("edited = 1\n")
    with pytest.raises(ConfigError, match=r"the file of .*backend/part.py was changed"):
        refuse_changed_inputs(package)


def test_a_module_that_is_gone_is_missed_under_its_earlier_name(files, package):
    """It may be called like one of labkit's."""

    def as_named_earlier(inputs):
        digests = list(inputs.values())
        named = {"__init__.py": digests[0], "part.py": digests[1], "scheduler.py": "0" * 16}
        return {f"{BACKEND}/{name}": digest for name, digest in named.items()}

    rewrite_inputs(package, as_named_earlier)
    (files / "mine_package" / "part.py").unlink()
    with pytest.raises(ConfigError, match=r"file of .*backend/part.py was changed: .* now absent"):
        refuse_changed_inputs(package)
    with pytest.raises(RecordError, match=r"no file of .*backend/part.py here"):
        archive._sources([package.dir])


def test_an_earlier_version_listed_no_class_of_an_arm_with_a_revision():
    arm = Arm("a", "arm", {}, {}, inputs={"model.path": "0"}, environment={"revision": "0" * 40})
    now = {"model.path": "0", "engine.name/plain.py": "1", "workload.kind/mine/kinds.py": "2"}
    assert named_as_begun(arm, now) == arm.inputs
    assert named_as_begun(dataclasses.replace(arm, environment={}), now) == now


@pytest.mark.parametrize("lost", [".", "mine_package"])
def test_an_archive_with_sources_lacks_none(files, package, monkeypatch, lost):
    """The command starts in another folder, or the class's package has another name."""
    if lost == ".":
        monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(files)])
    else:
        (files / lost).rename(files / "renamed")
    importlib.invalidate_caches()
    with pytest.raises(RecordError, match=r"no file of .*backend/mine_package/__init__.py here; "):
        archive._sources([package.dir])


def test_the_command_names_the_file_that_changed(files, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["labkit"])
    prompts = files / "prompts.jsonl"
    prompts.write_text('{"prompt": "before", "max_tokens": 4}')
    source = ["workload.prompts.source=file", "workload.prompts.path=prompts.jsonl"]
    words = ["workload.num_requests=null", *source, "out=s", "plan=true"]
    multirun_composition.register()
    (composed,) = multirun_composition.compose_cells(hydra_arguments.parse(words))
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
