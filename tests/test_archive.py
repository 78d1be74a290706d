"""``python -m labkit.archive``: every program reads the archive as it reads the folder."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from labkit import app, compare, post, report
from labkit import archive as archive_command
from labkit.analysis import load, write_study
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.cli import hydra_arguments, multirun_composition, run_study
from labkit.cli.study_runner import StudyRunner
from labkit.config import ConfigError
from labkit.records import DIGESTS_FILE, open_study, unpack_archive

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Return a copy of a committed study."""
    folder = tmp_path_factory.mktemp("export") / "study"
    unpack_archive(ROOT / "outputs" / "reference" / "gqa_sharing_earlier_grid.zip", folder)
    return folder


@pytest.fixture(scope="module")
def archive(study):
    """Return the study's archive, beside its folder."""
    path = study.parent / "packed.zip"
    archive_command.archive_study(study, path)
    return path


def test_the_command_says_what_it_wrote_and_writes_the_same_bytes_again(study, tmp_path, capsys):
    paths = [tmp_path / "a.zip", tmp_path / "b.zip"]
    for path in paths:
        assert archive_command.main([str(study), str(path)]) == 0
    first, second = (path.read_bytes() for path in paths)
    assert first == second and len(first) < 600_000
    assert re.search(r"a\.zip: 1 cell, 24 runs, \d\.\d\d MB, SHA-256 [0-9a-f]{64}\n",
                     capsys.readouterr().out)  # fmt: skip
    assert archive_command.main([str(study), str(paths[0])]) == 0  # an archive may be written again


def test_report_prints_the_same(study, archive, tmp_path, capsysbinary):
    path = Path(shutil.copy(archive, tmp_path / "study.zip"))
    for format_name in ("md", "csv", "tex", "benchstat"):
        printed = []
        for source in (study, path):
            assert report.main([str(source), "--format", format_name]) == 0
            printed.append(capsysbinary.readouterr().out)
        assert printed[0] == printed[1] and len(printed[0]) > 500


def test_report_writes_the_same_files_beside_the_archive(study, archive, capsys):
    before = archive.read_bytes()
    write_study(study, plots=False)
    write_study(archive, plots=False)
    folder = archive.with_suffix(".report")
    for name in ("tables/ablation-gqa_sharing-engine-paged.csv", "report.md"):
        expected = (study / name).read_text("utf-8").replace("# study\n", "# packed\n")
        assert (folder / name).read_text("utf-8") == expected
    page = (folder / "report.html").read_text("utf-8")
    assert '"../packed.zip#ablation=gqa_sharing,engine=paged/runs/' in page
    assert archive.read_bytes() == before


@pytest.mark.filterwarnings("ignore:.*have no digest")
def test_load_gives_the_same_frames(study, archive):
    for table in ("runs", "verdicts", "requests"):
        pd.testing.assert_frame_equal(load(study, table), load(archive, table))


def test_the_stored_runs_are_not_needed(study, archive, monkeypatch):
    monkeypatch.setattr("labkit.analysis.studies.data_frames.STORED_FORMAT", 3)
    with pytest.warns(UserWarning, match="24 of 24 records have no digest"):
        frame = load(archive)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="24 of 24 records have no digest"):
        pd.testing.assert_frame_equal(load(archive), frame)


def test_compare_takes_folders_and_archives(study, archive, capsys):
    assert compare.main([str(study), str(archive), str(study)]) == 0
    assert "Change: how each arm's difference" in capsys.readouterr().out


def test_post_links_to_the_reports_beside_the_archive(archive):
    write_study(archive, plots=False)
    pictures = ROOT / "outputs" / "reference" / "gqa_sharing.report" / "plots"
    shutil.copytree(pictures, archive.with_suffix(".report") / "plots")
    article = archive.parent / "article.md"
    row = 'case="decode, 64 reqs, ctx 128", what="delta"'
    picture = "plots/ablation-gqa_sharing-design.time-240-engine-paged--roofline.png"
    article.write_text(
        f'It is {{{{ value("packed.zip", {row}) }}}}.\n\n{{{{ table("packed.zip") }}}}\n\n'
        f'{{{{ figure("packed.zip", "{picture}") }}}}\n'
    )
    assert post.main([str(article)]) == 0
    text = article.read_text("utf-8")
    assert "](packed.report/report.html#cell0r0 " in text and f"](packed.report/{picture}" in text
    assert post.main([str(article), "--check"]) == 0


def test_post_links_to_an_archive_without_reports_beside_it(archive, tmp_path):
    shutil.copy(archive, tmp_path)
    article = tmp_path / "article.md"
    article.write_text('{{ value("packed.zip", case="decode, 64 reqs, ctx 128", what="delta") }}\n')
    assert post.main([str(article)]) == 0
    assert "](packed.zip#cell0r0 " in article.read_text("utf-8")


def test_an_index_lists_archives(archive, tmp_path, capsys):
    shutil.copy(archive, tmp_path / "one.zip")
    (tmp_path / "two.zip").write_bytes(archive.read_bytes()[:-100])
    assert report.main([str(tmp_path)]) == 0
    assert "1 cannot be read" in capsys.readouterr().out
    page = (tmp_path / "index.md").read_text("utf-8")
    assert "[one.zip](one.zip)" in page and "two.zip is not a study archive" in page


def test_an_edited_record_is_not_archived(study, tmp_path, capsys):
    copy = Path(shutil.copytree(study, tmp_path / "copy"))
    (cell,) = (path for path in copy.iterdir() if (path / "runs").is_dir())
    record = min((cell / "runs").glob("*.json"))
    (cell / DIGESTS_FILE).write_text(f"{'0' * 64}  runs/{record.name}\n")
    assert archive_command.main([str(copy), str(tmp_path / "a.zip")]) == 2
    error = capsys.readouterr().err
    assert "was edited after it was written" in error and error.count("\n") == 1
    assert not (tmp_path / "a.zip").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{", ""])
def test_a_cell_that_cannot_be_read_is_not_archived(study, tmp_path, capsys, text):
    copy = Path(shutil.copytree(study, tmp_path / "copy"))
    cell = min(copy.glob("*/cell.json"))
    cell.write_text(text)
    assert archive_command.main([str(copy), str(tmp_path / "study.zip")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(cell) in line and not (tmp_path / "study.zip").exists()


def test_mistakes_are_one_line(study, archive, tmp_path, capsys):
    (tmp_path / "mine.zip").write_text("mine")
    (cell,) = (path for path in study.iterdir() if (path / "runs").is_dir())
    for words, message in (
        ([study, tmp_path / "a.tar"], "the name of an archive must end with .zip"),
        ([study, tmp_path / "mine.zip"], "mine.zip exists and is not a study archive"),
        ([cell, tmp_path / "a.zip"], "is one cell; archive its study"),
        ([tmp_path / "none", tmp_path / "a.zip"], "none: no such directory"),
        ([study, tmp_path / "no" / "a.zip"], "No such file or directory"),
        (["--unpack", archive, study], "exists; choose another folder"),
        (["--unpack", tmp_path / "mine.zip", tmp_path / "x"], "is not a study archive"),
    ):
        assert archive_command.main(list(map(str, words))) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert (tmp_path / "mine.zip").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["STUDY", "x"], "packed.zip is a file; to unpack it, write --unpack "),
        (["--unpack", "STUDY", "x", "--with-sources"], "--with-sources is for writing an archive"),
    ],
)
def test_a_flag_that_is_missing_or_ignored_is_one_line(archive, tmp_path, capsys, words, line):
    with pytest.raises(SystemExit, match="2"):
        archive_command.main([str(archive) if word == "STUDY" else word for word in words])
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1 and not Path("x").exists()


def test_the_archive_of_another_study_is_not_overwritten(study, tmp_path, capsys):
    """It may be the only copy."""
    other = tmp_path / "other.zip"
    shutil.copy(ROOT / "outputs" / "reference" / "chunked_prefill.zip", other)
    before = other.read_bytes()
    assert archive_command.main([str(study), str(other)]) == 2
    assert "other.zip holds another study" in capsys.readouterr().err
    assert other.read_bytes() == before


def test_a_study_is_continued_from_its_archive(archive, tmp_path, monkeypatch):
    path = Path(shutil.copy(archive, tmp_path / "old.zip"))
    folder = tmp_path / "old"
    with run_study.unpacked_archive(hydra_arguments.parse([f"out={path}", "seed=1"])) as command:
        assert command.overrides == ("seed=1", f"out={folder}")
    before = AnalysisCache().study(open_study(path))
    assert [one.cell for one in AnalysisCache().study(folder)] == [one.cell for one in before]
    command = hydra_arguments.parse([f"out={path}"])
    exists = pytest.raises(ConfigError, match="its folder exists; continue")
    with exists, run_study.unpacked_archive(command):
        pytest.fail("it was unpacked again")


@pytest.mark.parametrize("words", [["plan=yes"], ["--config-dir", "mine", "experiment=planned"]])
def test_a_plan_leaves_no_unpacked_archive(archive, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/planned.yaml").write_text("# @package _global_\nplan: true\n")
    shutil.copy(archive, "old.zip")
    multirun_composition.register()
    command = hydra_arguments.parse([*words, "out=old.zip"])
    with pytest.raises(ConfigError, match=r"^out=old\.zip: plan=true writes nothing; unpack"):
        run_study.run(command)
    assert not Path("old").exists()


@pytest.mark.parametrize(
    ("began", "words"),
    [
        (["design.timeout_s=60,workload=chat"], ["workload=chat"]),
        (
            ["engine.kv.block_size=8", "engine.kv.block_size=16"],
            ["engine.kv.block_size=8,16", "-m"],
        ),
    ],
)
def test_cells_of_an_archive_are_continued_under_their_names(began, words, tmp_path, monkeypatch):
    """These were looked up in the archive itself, which is no folder."""

    def unpack(archive, folder):
        for name in began:
            (folder / name).mkdir(parents=True)
            (folder / name / "cell.json").write_text(json.dumps({"overrides": name.split(",")}))

    studies = []
    monkeypatch.setattr("labkit.records.unpack_archive", unpack)
    monkeypatch.setattr(run_study, "run_hydra", lambda argv, study: studies.append(study))
    for method in ("refuse_changes", "prepare"):
        monkeypatch.setattr(StudyRunner, method, lambda study: None)
    monkeypatch.setattr(StudyRunner, "finish", lambda study, pictures: 0)
    (tmp_path / "old.zip").touch()
    multirun_composition.register()
    assert run_study.run(hydra_arguments.parse([*words, f"out={tmp_path}/old.zip"])) == 0
    (study,) = studies
    assert list(study._composed) == began and study.out == tmp_path / "old"


def test_another_config_leaves_no_folder_behind(archive, tmp_path, monkeypatch, capsys):
    def refuse(study):
        assert (tmp_path / "old" / "report.md").is_file()
        raise ConfigError("arm seq_map: seed was 1, now 2")

    path = Path(shutil.copy(archive, tmp_path / "old.zip"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(StudyRunner, "refuse_changes", refuse)
    monkeypatch.setattr(run_study, "run_hydra", None)
    with pytest.raises(SystemExit) as left:
        app.main(["engine=paged", "ablation=seq_map", f"out={path}"])
    assert left.value.code == 2 and "seed was 1, now 2" in capsys.readouterr().err
    assert [item.name for item in tmp_path.iterdir()] == ["old.zip"]


def test_the_archive_has_the_machines_fingerprint(archive):
    data = json.loads((open_study(archive) / "environment.json").read_bytes())
    (environment,) = data["cells"].values()
    assert environment["cores"] == 2 and "numpy" in environment["versions"]
