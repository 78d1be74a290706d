"""``python -m labkit.replicate``: planted studies, archived and repeated in another folder."""

import argparse
import importlib
import json
import math
import os
import random
import shlex
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from planted_runs import PlantedRuns, kernel_fields

from labkit import archive as archive_command
from labkit import post, report
from labkit.analysis.model.replication_result import Replication
from labkit.analysis.pages import matplotlib_figures
from labkit.analysis.pages.article_from_records import table_archives
from labkit.analysis.pages.replication_page import write_replication
from labkit.analysis.studies.replication import forecast_lines, replication_of
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.analysis.studies.study_discovery import cell_dirs
from labkit.cli import hydra_arguments, multirun_composition, run_study, study_runner
from labkit.cli.study_runner import StudyRunner
from labkit.config import ConfigError, Redo, to_plain
from labkit.engine.user_classes import UserClassError
from labkit.experiment.compose.input_digests import input_digests
from labkit.machine.cache_entries import CacheError
from labkit.records import RecordError, open_study, unpack_archive
from labkit.replicate.__main__ import AuthorsStudy, _continuing, _folder_names, _reader, main
from labkit.replicate.original_study import TIME_S, AuthorsCell, ReaderOptions, authors_cells

ROOT = Path(__file__).parents[2]
WORDS = [
    "engine=paged", "ablation=seq_map", "workload.repeats=1", "design.looks=[]", "design.blocks=8",
    "workload.cases=[{name:one,decode:2,context:16}]",
]  # fmt: skip
ARMS = {"control": "binary_search"}
ENVIRONMENT = {
    "cpu_model": "A CPU", "cores": 2, "memory_bytes": 2**34, "os": "Linux", "host": "secret-host",
    "versions": {"labkit": "0.1.0", "numpy": "1.2.3"}, "git": "a" * 40,
}  # fmt: skip


class Planted(PlantedRuns):
    """Arm ``seq_map`` takes ``exp(effect)`` times as long."""

    def __init__(self, effect, noise=0.002, **environment):
        super().__init__()
        self.effect, self.noise = effect, noise
        self.environment = {**ENVIRONMENT, **environment}

    def fields(self, run, cell):
        log = random.Random(f"{self.effect} {run.name}").gauss(0, self.noise)
        us = 100 * math.exp(log + (self.effect if run.arm == "seq_map" else 0.0))
        minute = f"2026-11-20T20:{run.block:02d}:00Z"
        counters = dict.fromkeys(("engine.paged", f"resolver.{ARMS.get(run.arm, run.arm)}"), 1.0)
        facts = {"environment": self.environment, "counters": counters, "started": minute}
        facts["seconds"] = {"process": 10.0}
        return {**kernel_fields(us), **facts}


def silence(patch, folder):
    """Prepare and draw nothing, and take a timing lock of the test's own."""
    patch.setattr(matplotlib_figures, "write_figures", lambda *_: None)
    patch.setattr("labkit.workload.prepare", lambda experiment: None)
    patch.setattr(tempfile, "tempdir", str(folder))
    patch.chdir(folder)


def study(out, launcher, words=WORDS):
    multirun_composition.register()
    cells = multirun_composition.compose_cells(hydra_arguments.parse(words))
    runner = StudyRunner(out, cells, launcher)
    for cell in cells:
        runner.run(cell.name, out / cell.name)
    assert runner.finish() == 0
    return out


@pytest.fixture(scope="module")
def author(tmp_path_factory):
    """Return the folder of an author's study of one row, in which ``seq_map`` takes longer."""
    folder = tmp_path_factory.mktemp("author")
    with pytest.MonkeyPatch.context() as patch:
        silence(patch, folder)
        return study(folder / "author", Planted(0.2))


@pytest.fixture
def archive(author, tmp_path, monkeypatch):
    silence(monkeypatch, tmp_path)
    archive_command.archive_study(author, tmp_path / "author.zip")
    return tmp_path / "author.zip"


@pytest.fixture
def replicate(monkeypatch, archive):
    """Return a function that replicates the archive with planted runs, and returns the page."""

    def run(launcher, out, *words):
        monkeypatch.setattr(
            study_runner, "StudyRunner", lambda folder, cells: StudyRunner(folder, cells, launcher)
        )
        assert main([str(archive), f"out={out}", "design.blocks=8", *words]) == 0
        return Replication.read(Path(out) / "replication.json")

    return run


@pytest.mark.parametrize(
    ("effect", "words"),
    [
        (0.2, {"replicated": 1}),
        (0.1, {"same direction, other size": 1}),
        (-0.2, {"not replicated": 1}),
    ],
)
def test_a_planted_study_is_replicated_in_another_folder(effect, words, replicate, capsys):
    page = replicate(Planted(effect, cpu_model="Another CPU"), "mine")
    (row,) = page.rows
    assert page.counts == words and page.changes == ()
    assert row.ratio == pytest.approx(effect / 0.2, abs=0.05)
    assert page.author.archive_sha256 and "cpu model: A CPU, here Another CPU" in page.differences
    for name in ("replication.json", "replication.md", "replication.html"):
        text = Path("mine", name).read_text("utf-8")
        assert "secret-host" not in text and "Another CPU" in text
    html = Path("mine", "replication.html").read_text("utf-8")
    assert html.count('class="reader"') >= 2 and "http" not in html.replace("http://www.w3", "")
    assert next(iter(words)) in capsys.readouterr().out


def test_noise_leaves_it_undecided_and_the_page_says_how_long_it_would_take(replicate):
    page = replicate(Planted(0.2, noise=0.1), "noisy")
    assert page.counts == {"not decided": 1}
    assert page.rows[0].needed_s > 24 * 10
    assert "not decided (a new study of design.time=" in Path("noisy/replication.md").read_text(
        "utf-8"
    )


def test_a_changed_option_is_another_question_and_reports_are_one_table(replicate, capsys):
    page = replicate(Planted(0.2), "r/a", "workload.head_dim=64")
    assert page.changes == ("workload.head_dim=64 (the author: 128)",)
    replicate(Planted(-0.2), "r/b")
    Path("r/broken-replication.json").write_text('{"schema_version": 1, "rows": 3}')
    capsys.readouterr()
    assert report.main(["r"]) == 0
    lines = Path("r/replications.md").read_text("utf-8").splitlines()
    a, b, broken = (next(x for x in lines if name in x) for name in ("a/rep", "b/rep", "broken"))
    assert "another: workload.head_dim=64" in a and "| the same |" in b
    assert [cell.strip() for cell in b.split("|")][-6:-1] == ["0", "0", "1", "0", "0"]
    assert "cannot be read" in broken and "replications.html" in capsys.readouterr().out


def test_plan_says_what_would_be_decided_and_writes_nothing(archive, tmp_path, capsys):
    before = set(tmp_path.iterdir())
    assert main([str(archive), "plan=true", "out=planned"]) == 0
    out = capsys.readouterr().out
    text = "".join(out.split())
    assert "author.zip/" in text and "theauthor's)" in text  # this machine has measured nothing
    assert "replicated if the same within" in out and set(tmp_path.iterdir()) == before
    assert "looks after" not in out  # 18 blocks, of which a study of one's own has a look
    assert "revision is this machine's, not the author's aaaaaaaaaaaa" in out
    assert main([str(archive), "plan=true", "design.time=1s"]) == 0
    assert "estimated: 3 min 0 s" in capsys.readouterr().out  # six blocks of three runs of 10 s


def test_the_author_s_own_runs_are_no_replication(author, archive, tmp_path, capsys):
    shutil.copytree(author, tmp_path / "copy")
    for source in (archive, tmp_path / "copy"):
        assert main([str(source), "out=copy", "design.blocks=8"]) == 2
        assert "copy holds the author's own runs" in capsys.readouterr().err


def unanswerable(archive, tmp_path, what):
    """Return an archive that is cut, edited, foreign or of another version, and a word of why."""
    content = archive.read_bytes()
    if what == "cut":
        content = content[:-200]
    if what == "edited":
        content = content.replace(b"PK\x03\x04", b"PK\x03\x05", 1)[:40] + b"x" + content[41:]
    if what == "foreign":
        content = b"PK nothing"
    path = tmp_path / f"{what}.zip"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("what", "reason"),
    [("cut", "its end is missing"), ("edited", "altered or damaged"), ("foreign", "not a study")],
)
def test_a_bad_archive_is_refused_in_one_line(what, reason, archive, tmp_path, capsys):
    assert main([str(unanswerable(archive, tmp_path, what)), "out=x"]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1 and not Path("x").exists()


def test_cells_are_told_apart_and_no_picture_of_an_author_is_loaded(author, tmp_path):
    (own,) = AnalysisCache().study(author)
    manifest = own.data.manifest
    other = {**manifest, "overrides": [*manifest["overrides"], "workload.head_dim=64"]}
    data = replace(own.data, dir=own.data.dir.with_name("other"), manifest=other)
    other = replace(own, data=data)
    page = replication_of((author, [own, other]), (author, [own]))
    names = [page.name_of(row).split(", ")[0] for row in page.rows]
    assert names == ["as configured", "head_dim=64"]
    lines = list(forecast_lines([own, other]))
    assert lines[1].startswith("head_dim=64, one, ") and len(lines) == 2
    write_replication(tmp_path, replace(page, question="![x](http://spy.example/x.png)"))
    assert "<img" not in (tmp_path / "replication.html").read_text("utf-8")


def analysed(name):
    opened = open_study(ROOT / "outputs" / "reference" / name)
    return opened, AnalysisCache().study(opened)


def test_computed_numbers_are_compared_and_what_was_not_measured_is_said():
    opened, author = analysed("padding_picture.zip")
    page = replication_of((opened, author), (opened, author))
    assert page.counts == {"replicated": 3} and {row.author.verdict for row in page.rows} == {
        "computed"
    }
    page = replication_of((opened, author), (opened, []))
    assert page.counts == {"not decided": 3}
    assert {row.reason for row in page.rows} == {"not measured here"}


def leaves(config, path=""):
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


@pytest.mark.parametrize(
    "name",
    [
        *("gqa_sharing_earlier_grid", "gqa_sharing", "seq_map", "case_study", "speculation"),
        *("precision_servers", "kv_layouts"),
    ],
)
def test_a_committed_archive_asks_this_version_what_it_asked(name):
    """What an engine does not read may have had another default; all that it reads stays."""
    opened = open_study(ROOT / "outputs" / "reference" / f"{name}.zip")
    (cell, *_) = authors_cells(opened, cell_dirs(opened))
    changed = set()
    for arm in cell.tested:
        today = dict(leaves(to_plain(cell.experiment(arm, ReaderOptions(), 60.0))))
        asked = leaves({group: arm.config[group] for group in ("engine", "model", "workload")})
        changed |= {(key, value) for key, value in asked if today.get(key) != value}
    former = {("engine.server.start_timeout_s", 300.0)}
    former |= {("engine.attention.gqa_sharing", value) for value in (True, False)}
    assert changed <= former
    said = list(cell.changes(ReaderOptions()))
    assert len(said) == (("engine.attention.gqa_sharing", False) in changed)


def test_requests_that_followed_from_the_author_s_time_are_as_many_here():
    opened = open_study(ROOT / "outputs" / "reference" / "chunk_size.zip")
    (cell,) = authors_cells(opened, cell_dirs(opened))
    found = [cell.experiment(arm, ReaderOptions(), 540.0).workload for arm in cell.tested]
    assert {workload.num_requests for workload in found} == {32}
    fewer = ReaderOptions.parse(["workload.num_requests=8"])
    assert list(cell.changes(fewer)) == ["workload.num_requests=8 (the author: 32)"]
    default = ReaderOptions.parse(["engine.graph_replay=true"])  # newer than the archive
    assert not any("graph_replay" in line for line in cell.changes(default))
    opened = open_study(ROOT / "outputs" / "reference" / "seq_map.zip")
    (kernels,) = authors_cells(opened, cell_dirs(opened))
    fixed = list(kernels.changes(ReaderOptions.parse(["workload.repeats=1"])))
    assert fixed == ["workload.repeats=1 (the author: None)"]  # null is a value: from the time


def test_a_study_without_a_primary_comparison_is_refused_before_it_runs(tmp_path, capsys):
    path = ROOT / "outputs" / "reference" / "snapshot.zip"
    assert main([str(path), f"out={tmp_path / 'x'}"]) == 2
    error = capsys.readouterr().err
    assert "compares no arm" in error and error.count("\n") == 1


def edited(author, tmp_path, change):
    """Return a copy of the author's folder with edited arms, as another machine would have them."""
    shutil.copytree(author, tmp_path / "edited")
    folder = next((tmp_path / "edited").glob("*/arms"))
    for path in folder.glob("*.json"):
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))
    (folder.parent / "SHA256SUMS").unlink()
    return tmp_path / "edited"


def set_in(*keys, value):
    def change(data):
        place = data["config"]
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_in("engine", "attention", "device", value="metal"), "there is no Metal"),
        (set_in("workload", "speed_of_light", value=1), "no such option"),
        (set_in("engine", "attention", "resolver", value="evil.code:Run"), "--trust runs it"),
        (set_in("engine", "server", "command", value="rm -rf /"), "--trust runs it"),
        (set_in("engine", "server", "requirements", value=["evil"]), "--trust runs it"),
        (set_in("engine", "server", "api_key", value="${oc.env:KEY}"), "variable KEY"),
        (
            lambda data: data["config"]["model"].update(name="local", path="/gone", shape=None),
            "every arm: model.path=/gone: no such directory",
        ),
        (lambda data: data.update(schema_version=99), "schema"),
        (lambda data: data.update(config={"tool": "vllm"}), "another tool"),
    ],
)
def test_what_cannot_run_here_is_named_before_anything_starts(
    change, reason, author, archive, tmp_path, capsys
):
    path = edited(author, tmp_path, change)
    assert main([str(path), "out=x", "plan=true"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("labkit.replicate: ") for line in lines)
    assert any(reason in line for line in lines) and not Path("x").exists()


@pytest.mark.parametrize(
    "error", [CacheError("LABKIT_CACHE=/x: cannot be written"), UserClassError("it failed", "a:B")]
)
def test_a_cache_or_a_class_that_fails_is_one_line_and_exit_code_2(error, monkeypatch, capsys):
    def fail(options):
        raise error

    monkeypatch.setattr("labkit.replicate.__main__._run", fail)
    assert main(["some.zip"]) == 2
    assert capsys.readouterr().err == f"labkit.replicate: {error}\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["engine.attention.resolver=seq_map"], "it is the question"),
        (["ablation.metric=x"], "the author's study fixes it"),
        (["design.alpha=.5"], "the author's study fixes it"),  # decisions are fixed beforehand
        (["workload=chat"], "no such option"),
        (["workload.num_requests=1,2"], "a single value"),
        (["more.zip"], "2 studies"),
        (["plan=maybe"], "plan=maybe: it must be true or false"),
        (["design.time=fast"], "replicate: every arm: design.time='fast': must be"),
        (["redo=maybe"], "replicate: every arm: redo="),
    ],
)
def test_a_mistake_in_the_command_is_one_line(words, reason, archive, capsys):
    assert main([str(archive), "out=x", *words]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1 and not Path("x").exists()


def test_the_author_s_versions_become_an_environment_of_every_arm(archive, monkeypatch, capsys):
    opened = open_study(archive)
    (cell,) = authors_cells(opened, cell_dirs(opened))
    own = AuthorsStudy(opened, (cell,), Path("x"))
    monkeypatch.setattr("labkit.machine.facts.machine_snapshot.versions", lambda: {"numpy": "2.0"})
    reader = _reader(own, ReaderOptions(), "theirs")
    experiment = cell.experiment(cell.tested[0], reader, 60.0)
    arms = experiment.ablation.arms
    assert {arm: own["environment"]["requirements"] for arm, own in arms.items()} == {
        "binary_search": ["numpy==1.2.3"], "seq_map": ["numpy==1.2.3"],
    }  # fmt: skip
    assert experiment.design.isolation.value == "auto" and experiment.design.time == 60
    # The author's revision is not in this checkout, if it is one; one that is, runs.
    refused = "not the author's revision: arm binary_search: environment.revision"
    assert reader.revision is None and refused in capsys.readouterr().err
    monkeypatch.setattr(AuthorsCell, "composed", lambda *_: None)
    reader = _reader(own, ReaderOptions(), "theirs")
    assert (
        cell.experiment(cell.tested[0], reader, 60.0).ablation.arms["seq_map"]["environment"][
            "revision"
        ]
        == "a" * 40
    )
    moved = ReaderOptions({"model.path": "/home/ann/other", "workload.dtype": "float32"})
    assert list(cell.changes(moved)) == ["model.path=other (the author: None)"]  # no folder
    served = ReaderOptions({"engine.server.url": "http://ann.example:8000"})
    assert list(cell.changes(served)) == ["engine.server.url=an address (the author: None)"]


def test_cells_of_several_revisions_are_not_run_with_one_of_them(archive):
    """The first of a set was taken, so the same command ran one or the other."""
    opened = open_study(archive)
    (cell,) = authors_cells(opened, cell_dirs(opened))
    environment = {**cell.environment, "git": "b" * 40}
    other = replace(cell, manifest={**cell.manifest, "environment": environment})
    own = AuthorsStudy(opened, (cell, other), Path("x"))
    assert own.other_revisions == ["a" * 40, "b" * 40]
    with pytest.raises(ConfigError, match=r"2 sets of versions.*; name the folder of one cell"):
        _reader(own, ReaderOptions(), "theirs")


def test_the_author_s_versions_are_those_of_arms_without_an_environment_of_their_own(archive):
    """They were those of whichever arm ran first, and a cell without runs was another set."""
    opened = open_study(archive)
    (cell,) = authors_cells(opened, cell_dirs(opened))
    base, *others = cell.arms
    cell = replace(
        cell, arms=(base, *(replace(arm, environment={"python": "p"}) for arm in others))
    )
    not_run = replace(cell, folder=Path("not_run"), manifest={**cell.manifest, "environment": {}})
    first = SimpleNamespace(arm=others[0].name, environment={"git": "b" * 40})
    runs = [first, SimpleNamespace(arm=base.name, environment=ENVIRONMENT)]
    analysis = SimpleNamespace(data=SimpleNamespace(dir=cell.folder, records=runs))
    own = AuthorsStudy(opened, (not_run, cell), Path("x"), [analysis])
    assert own.environments == [ENVIRONMENT] and own.other_revisions == ["a" * 40]
    assert "numpy==1.2.3" in _reader(own, ReaderOptions(), "theirs").requirements


def test_failed_runs_are_repeated_if_asked(archive):
    (cell,) = authors_cells(open_study(archive), cell_dirs(open_study(archive)))
    reader = ReaderOptions.parse(["redo=failed"])
    assert cell.experiment(cell.tested[0], reader, 60.0).redo is Redo.failed
    assert list(cell.changes(reader)) == list(cell.changes(ReaderOptions()))


def test_the_command_that_continues_names_its_folder(capsys):
    options = argparse.Namespace(words=["a.zip", "out='x,y'"], versions="ours", trust=True)
    with pytest.raises(KeyboardInterrupt), _continuing(options, Path("x,y")):
        raise KeyboardInterrupt
    words = shlex.split(capsys.readouterr().err.partition("python -m labkit.replicate ")[2])
    assert words[0] == "a.zip" and words[2:] == ["--versions=ours", "--trust"]
    assert run_study.named_folder(hydra_arguments.parse(words[1:2])) == Path("x,y")


def test_the_time_of_a_cell_does_not_depend_on_what_can_run(author, archive, tmp_path, monkeypatch):
    """Once another archive could run, the cells that had begun were refused."""
    other = edited(author, tmp_path, set_in("workload", "speed_of_light", value=1))
    archive_command.archive_study(other, tmp_path / "other.zip")
    article = tmp_path / "post.md"
    rows = "".join(f'| {{{{ answer("{name}.zip") }}}} |\n' for name in ("author", "other"))
    article.write_text(f"| a |\n| --- |\n{rows}")
    planned = []
    monkeypatch.setattr(
        "labkit.replicate.__main__._plan", lambda study, reader, s: planned.append(s) or s
    )
    assert main([str(article), "plan=true"]) == 0 and planned == [TIME_S / 2]
    obstacles = iter([(), ConfigError("no")])

    def fail(cell, reader):
        if found := next(obstacles):
            raise found
        return found

    monkeypatch.setattr("labkit.replicate.original_study.cell_obstacles", fail)
    assert main([str(article), "plan=true"]) == 0 and planned == [TIME_S / 2] * 2


def test_files_of_another_name_are_another_question(archive, tmp_path):
    """They were no change, because only files of the same name were compared."""
    (cell, *_) = authors_cells(open_study(archive), cell_dirs(open_study(archive)))
    gguf, folder = tmp_path / "other.gguf", tmp_path / "other"
    folder.mkdir()
    for path in (gguf, folder / "config.json", folder / "weights.safetensors"):
        path.write_text("x")
    digest = next(iter(input_digests({"model": {"path": str(gguf)}}, {}).values()))

    def changes(inputs, option, value):
        tested = tuple(replace(arm, inputs=inputs) for arm in cell.tested)
        return set(replace(cell, arms=tested).changes(ReaderOptions({option: value})))

    both = {"model.path/config.json": digest, "model.path/model.safetensors": digest}
    lost = "the file of model.path/model.safetensors is not the author's"
    assert changes(both, "model.path", str(folder)) == {lost}
    assert lost in changes(both, "model.path", str(gguf))
    assert changes({"model.path": digest}, "model.path", str(gguf)) == set()
    assert changes({"model.path": digest}, "model.path", str(folder)) != set()
    maps = {"engine.attention.resolver/maps.py": digest}
    other = "engine.attention.resolver=maps:Other (the author: binary_search)"
    cell = replace(cell, arms=cell.arms[:1])
    assert other in changes(maps, "engine.attention.resolver", "maps:Other")


def test_an_archive_s_own_class_is_carried_if_asked_and_run_if_trusted(
    author, tmp_path, monkeypatch, capsys
):
    silence(monkeypatch, tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_maps.py").write_text("class Mine:\n    pass\n")
    change = set_in("engine", "attention", "resolver", value="own_maps:Mine")
    folder = edited(author, tmp_path, lambda data: data["arm"] == "seq_map" and change(data))
    names = []
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "mine"))
        for flags in ([], ["--with-sources"]):
            path = tmp_path / f"own{len(flags)}.zip"
            assert archive_command.main([str(folder), str(path), *flags]) == 0
            names.append([n for n in open_study(path).archive.files if n.startswith("sources/")])
    assert names == [[], ["sources/own_maps.py"]]
    assert main([str(path), "out=x"]) == 2 and not Path("x").exists()
    assert main([str(path), "out=x", "--trust", "plan=true"]) == 2
    assert "would unpack" in capsys.readouterr().err and not Path("x").exists()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(
        study_runner, "StudyRunner", lambda out, cells: StudyRunner(out, cells, Planted(0.2))
    )
    unpack_archive(path, tmp_path / "unpacked")  # the folder is as good as the archive
    assert main(["unpacked", "out=x", "--trust", "design.blocks=8"]) == 0
    assert "from the author: " in capsys.readouterr().err
    assert Path("x/from_author/sources/own_maps.py").is_file()
    assert os.environ["PYTHONPATH"] == "" and not any("from_author" in one for one in sys.path)


def test_each_study_of_an_article_imports_its_own_author_s_class(author, tmp_path, monkeypatch):
    """Of two modules of one name, both studies had the last one's."""
    silence(monkeypatch, tmp_path)
    change = set_in("engine", "attention", "resolver", value="own_maps:Mine")
    for who in ("ann", "ben"):
        (tmp_path / who).mkdir()
        (tmp_path / who / "own_maps.py").write_text(f"WHO = {who!r}\nclass Mine:\n    pass\n")
        folder = edited(author, tmp_path, lambda data: data["arm"] == "seq_map" and change(data))
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / who))
            archive_command.archive_study(folder, tmp_path / f"{who}.zip", with_sources=True)
        shutil.rmtree(folder)
    article = tmp_path / "post.md"
    article.write_text('| a |\n| --- |\n| {{ answer("ann.zip") }} |\n| {{ answer("ben.zip") }} |\n')
    found = {}

    class Importing(Planted):
        def prepare(self, cell):
            (place,) = (one for one in os.environ["PYTHONPATH"].split(":") if "from_author" in one)
            own_class = importlib.import_module("own_maps")
            found[own_class.WHO] = place, str(Path(own_class.__file__).parent)

    monkeypatch.setattr(
        study_runner, "StudyRunner", lambda out, cells: StudyRunner(out, cells, Importing(0.2))
    )
    assert main([str(article), "out=mine", "--trust", "design.blocks=8"]) == 0
    folders = {who: str(Path(f"mine/{who}/from_author/sources").resolve()) for who in found}
    assert found == {who: (folders[who], folders[who]) for who in ("ann", "ben")}
    assert "own_maps" not in sys.modules


def test_an_article_names_its_tables_archives_and_its_tables_say_how_to_repeat_them(
    archive, tmp_path, capsys
):
    article = tmp_path / "post.md"
    article.write_text('# A\n\n{{ table("author.zip") }}\n')
    assert post.main([str(article)]) == 0
    text = article.read_text("utf-8")
    assert "Repeat it: `python -m labkit.replicate author.zip`" in text
    assert table_archives(article) == [archive.resolve()]
    assert main([str(article), "plan=true"]) == 0
    answers = '# A\n\n| a |\n| --- |\n| {{ answer("author.zip") }} |\n'
    for row, line in ("", "author.zip"), ('| {{ answer("../author.zip") }} |\n', "b/post.md"):
        (tmp_path / "b").mkdir(exist_ok=True)
        article = tmp_path / "b" / "post.md"
        article.write_text(f"{answers}{row}")
        assert post.main([str(article)]) == 0 == post.main(["--check", str(article)])
        text = article.read_text("utf-8")
        assert text.endswith(f"|\n\nRepeat it: `python -m labkit.replicate {line}`\n")
    (tmp_path / "other.zip").write_bytes(archive.read_bytes())
    article.write_text(f'{answers}| {{{{ answer("../other.zip") }}}} |\n')
    capsys.readouterr()
    assert main([str(article), "plan=true"]) == 0
    assert "2 studies, estimated 9:00 in all" in capsys.readouterr().out
    article.write_text("# No table\n")
    with pytest.raises(RecordError, match="no table"):
        table_archives(article)


def test_archives_of_one_name_have_a_folder_each():
    archives = [Path(name) for name in ("a/study.zip", "b/study.zip", "c.zip")]
    assert list(_folder_names(archives).values()) == ["a-study", "b-study", "c"]


def test_what_can_run_of_an_article_is_repeated_and_the_rest_named(
    archive, tmp_path, monkeypatch, capsys
):
    article = tmp_path / "post.md"
    names = ("cut.zip", "gone.zip", "author.zip")
    rows = "".join(f'| {{{{ answer("{name}") }}}} |\n' for name in names)
    article.write_text(f"| a |\n| --- |\n{rows}")
    unanswerable(archive, tmp_path, "cut")
    monkeypatch.setattr(
        study_runner, "StudyRunner", lambda out, cells: StudyRunner(out, cells, Planted(0.2))
    )
    assert main([str(article), "out=mine", "design.blocks=8"]) == 0
    error = capsys.readouterr().err
    assert error.count("cannot run here: ") == 2 and "gone.zip: cannot run here: no such" in error
    assert Replication.read(Path("mine/author/replication.json")).counts == {"replicated": 1}
    page = Path("mine/replications.md").read_text("utf-8")
    assert "1 replication, 2 cannot run here" in page and str(tmp_path) not in page
    archive.unlink()
    assert main([str(article), "out=none"]) == 2 and not Path("none").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("gqa_sharing_earlier_grid", ["workload.repeats", "engine.attention.unit"]),
        ("seq_map", ["workload.repeats"]),
    ],
)
def test_a_committed_archive_is_asked_again_by_real_runs_in_an_empty_folder(
    name, changed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = ROOT / "outputs" / "reference" / f"{name}.zip"
    assert main([str(path), "out=mine", "design.blocks=1", "workload.repeats=1"]) == 0
    page = Replication.read(tmp_path / "mine" / "replication.json")
    assert page.counts == {"not decided": len(page.rows)} and len(page.rows) >= 4
    assert all(row.reader.effect_pct is not None for row in page.rows)
    assert [change.partition("=")[0] for change in page.changes] == changed
