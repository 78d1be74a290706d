"""The regression program: exit codes, the studies that it composes, and its summary."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from git_command import git
from planted_cells import planted_cell

from labkit import regression
from labkit.analysis.comparison import client_lateness
from labkit.analysis.comparison.verdict import NOISE_EXCEEDS_MARGIN
from labkit.analysis.findings import regression_gate
from labkit.analysis.findings.regression_gate import Outcome, markdown, row_results
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.cli import multirun_composition, run_study
from labkit.engine.user_classes import UserClassError
from labkit.experiment import StudyError
from labkit.experiment.compose import cell_composer
from labkit.experiment.launch.exported_revision import RevisionError
from labkit.experiment.launch.python_environment import Imports, default_options
from labkit.experiment.worker.turn_protocol import VERSION
from labkit.importers.result_files import read_files
from labkit.importers.study_writer import ImportedStudy, write_study
from labkit.machine.cache_entries import CacheError
from labkit.machine.facts import code_revision
from labkit.records import RecordError
from labkit.regression import Subject

ROOT = Path(__file__).parent.parent
PLANTED = {"base": 1.0, "head": 0.83}
PAGE = (ROOT / "docs" / "regression.md").read_text("utf-8")


def cell(
    verdict,
    low=None,
    high=None,
    better="higher",
    reason=None,
    primary=True,
    effect=0.1,
    **medians,
):
    one = {"arm": "head", "effect_pct": effect, "ci_low_pct": low, "ci_high_pct": high}
    one |= {"p_adjusted": 0.5, "verdict": verdict, "reason": reason}
    control = {**one, "arm": "control", "verdict": "worse"}
    row = {"case": "a|b", "metric": "total_tok_s", "unit": "tok/s", "better": better}
    row |= {"primary": primary, "skipped": None}
    row["arms"] = {arm: {"median": x} for arm, x in {"base": 1234.5, **medians}.items()}
    return planted_cell([{**row, "comparisons": [one, control]}])


def total(results):
    """Return the outcome of a command with one subject."""
    return regression_gate.total({"chat": results})


@pytest.mark.parametrize(
    ("expected", "facts"),
    [
        (1, {"verdict": "worse", "low": -4.0, "high": -1.0}),
        (0, {"verdict": "better", "low": 1.0, "high": 4.0}),
        (0, {"verdict": "equivalent", "low": -1.0, "high": 1.0}),
        (0, {"verdict": "trivial", "low": -1.5, "high": -0.5}),
        (0, {"verdict": "inconclusive", "low": -1.9, "high": 9.0}),
        (125, {"verdict": "inconclusive", "low": -2.1, "high": 9.0}),
        (125, {"verdict": "inconclusive", "low": -1.9, "high": 9.0, "better": "lower"}),
        (0, {"verdict": "inconclusive", "low": -9.0, "high": 1.9, "better": "lower"}),
        (125, {"verdict": "inconclusive", "low": 0, "high": 1, "reason": NOISE_EXCEEDS_MARGIN}),
        (125, {"verdict": "inconclusive", "low": -0.5, "high": 0.6, "better": "lower"}),  # withheld
        (125, {"verdict": "inconclusive", "low": 1.0, "high": 4.0}),
        (125, {"verdict": "inconclusive"}),
        (125, {"verdict": "invalid", "low": -1.0, "high": 1.0}),
        (125, {"verdict": "estimate_only", "low": -1.0, "high": 1.0}),
        (125, {"verdict": "worse", "primary": False}),
        (1, {"verdict": "computed", "better": "lower", "base": 4.0, "head": 5.0, "effect": 25.0}),
        (0, {"verdict": "computed", "better": "lower", "base": 1e3, "head": 1001.0}),
        (1, {"verdict": "computed", "better": "lower", "base": 0.0, "head": 1.0, "effect": None}),
        (0, {"verdict": "computed", "better": "lower", "base": 0.0, "head": 0.0}),
        (125, {"verdict": "computed", "better": "lower", "base": None, "head": 5.0}),
        (125, {"verdict": "computed", "better": "lower", "base": 5.0, "head": None}),
    ],
)
def test_the_outcome_of_a_row(expected, facts):
    assert total(list(row_results("chat", cell(**facts), "head"))).value == expected


@pytest.mark.parametrize(("late", "outcome"), [(0, 1), (1, 1), (3, 125)])
def test_a_client_that_was_late_in_one_block_of_eight_hides_no_planted_17_percent(
    late, outcome, tmp_path, monkeypatch
):
    lines = ["arm,run,block,total_tok_s"]
    for block in range(8):
        lines += [f"{arm},{block},{block},{(100 + block) * x}" for arm, x in PLANTED.items()]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    runs = read_files([tmp_path / "t.csv"])
    folder = write_study(ImportedStudy.of(runs), tmp_path / "study", "q", 2.0)
    names = [f"b{block:02}-p01-head" for block in range(late)]
    monkeypatch.setattr(
        client_lateness, "lateness_errors", lambda run: ["late"] * (run.run in names)
    )
    found = list(row_results("chat", AnalysisCache().cell(folder).cell, "head"))
    assert total(found).value == outcome and found[0].comparison.effect_pct == pytest.approx(-17)


def test_one_worse_row_decides_and_one_undecided_row_leaves_it_open():
    worse, fine, unknown = (
        list(row_results("chat", cell(word), "head")) for word in ("worse", "better", "invalid")
    )
    assert total([*fine, *unknown, *worse]) is Outcome.worse
    assert total([*fine, *unknown]) is Outcome.undecided
    assert total([]) is Outcome.undecided
    assert regression_gate.total({"a": fine, "b": fine}) is Outcome.no_worse
    assert regression_gate.total({}) is Outcome.undecided


def test_a_subject_without_a_result_is_undecided_and_has_a_line():
    fine, worse = (list(row_results("a", cell(word), "head")) for word in ("better", "worse"))
    skipped = cell("better")
    rows = [dataclasses.replace(row, skipped="no such metric") for row in skipped.rows]
    nothing = list(row_results("b|c", dataclasses.replace(skipped, rows=rows), "head"))
    assert nothing == []
    assert regression_gate.total({"a": fine, "b|c": nothing}) is Outcome.undecided
    assert regression_gate.total({"a": worse, "b|c": nothing}) is Outcome.worse
    text = markdown("b against a", {"a": fine, "b|c": nothing}, 2)
    assert text.startswith("### Undecided: ")
    line = r"| b\|c | | | | | | | undecided (it has no result in a primary row) |"
    assert line in text.splitlines()


def test_the_summary_is_a_table():
    results = list(row_results("chat", cell("worse", -4.0, -1.0), "head"))
    text = markdown("b against a", {"chat": results}, 2)
    assert text.startswith("### Worse: b against a\n")
    row = r"| chat | a\|b | total_tok_s | 1,234.5 tok/s | +0.1 | −4.0 to −1.0 | 0.50 | worse |"
    assert text.splitlines()[6] == row


def test_numbers_of_the_summary_have_the_digits_and_signs_of_every_table():
    """A change that rounds to 0 has no sign, and minus is no hyphen."""
    planted = cell("inconclusive", -0.04, 0.04)
    ((one, control),) = (row.comparisons for row in planted.rows)
    small = dataclasses.replace(one, effect_pct=-0.0001, p_adjusted=0.99996)
    rows = [dataclasses.replace(planted.rows[0], comparisons=(small, control))]
    results = list(row_results("chat", dataclasses.replace(planted, rows=rows), "head"))
    text = markdown("b against a", {"chat": results}, 2)
    assert "| 0.00 | −0.04 to +0.04 | 1.00 |" in text.splitlines()[6]


def test_a_reason_in_the_table_is_shown_as_it_is():
    reason = "outputs differ: </s> | <b>\nat 3"
    results = list(row_results("chat", cell("invalid", reason=reason), "head"))
    line = markdown("b against a", {"chat": results}, 2).splitlines()[6]
    assert line.endswith(r"| undecided (outputs differ: \</s> \| \<b> at 3) |")


def test_the_summary_has_a_picture_in_characters():
    results = [*row_results("chat", cell("worse", -4.0, -1.0), "head")]
    *_, fence, bar, scale, end = markdown("b against a", {"chat": results}, 2).splitlines()
    assert (fence, end) == ("```text", "```")
    assert bar == "chat a|b total_tok_s  ├─────────────────┤     │●          ┊"
    assert scale == "                      −4 %                    0                    +4 %"
    assert bar.index("│") == scale.index("0") and bar.index("├") == scale.index("−")
    assert "```" not in markdown("b against a", {"chat": []}, 2)
    wide = [*row_results("chat", cell("better", 10.0, 1526.4), "head")]
    *_, scale, end = markdown("b against a", {"chat": wide}, 2).splitlines()
    assert scale.split() == ["−1,526", "%", "0", "+1,526", "%"]


@pytest.fixture(scope="module")
def two_commits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    git(folder, "init", "-q", "-b", "main")
    for _ in range(2):
        git(folder, "commit", "-q", "--allow-empty", "-m", "x")
    return folder


@pytest.fixture
def studies(two_commits, tmp_path, monkeypatch):
    """Return a function that runs the program in a checkout with two commits, without processes.

    It returns the exit code and the cells that were composed. ``studies.result`` is what each
    study's ``cell.json`` holds, or the error that it raises. ``studies.refusal`` is why the
    revisions refuse the arms' config.
    """
    folder = Path(shutil.copytree(two_commits, tmp_path / "checkout"))
    facts = Imports(VERSION, default_options(), ())
    monkeypatch.setattr(code_revision, "CHECKOUT", folder)
    monkeypatch.setattr(cell_composer.python_environment, "imports_of", lambda *_: facts)
    monkeypatch.setattr(
        cell_composer.python_environment, "refusal_of", lambda environment, config: studies.refusal
    )
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    monkeypatch.chdir(tmp_path)
    composed = []

    def run(command, pictures):
        assert not pictures  # nobody asked for files of them, and drawing takes seconds
        (one,) = multirun_composition.compose_cells(command)
        composed.append(one)
        if isinstance(studies.result, Exception):
            raise studies.result
        if studies.result == "interrupted":
            return 130
        if not one.experiment.plan:
            folder = Path(one.experiment.out) / one.name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "cell.json").write_text(json.dumps(studies.result.to_json()))
        return 1

    def studies(*words):
        composed.clear()
        return regression.main(words), composed

    studies.result, studies.refusal = cell("equivalent", -1.0, 1.0), None
    monkeypatch.setattr(run_study, "run", run)
    return studies


@pytest.fixture
def page(studies, tmp_path, monkeypatch):
    """Return the checkout, with the page's files, as the working folder of the page's commands."""
    for name, text in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", PAGE, re.S | re.M):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkout" / name).write_text(text)
    monkeypatch.chdir(tmp_path / "checkout")
    return tmp_path / "checkout"


COMMANDS = re.findall(r"^    (.*python -m labkit.regression .*--repository .*)$", PAGE, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs_as_it_stands(command, studies, page):
    assert len(COMMANDS) == 4
    words = shlex.split(command.partition("python -m labkit.regression ")[2])
    code, (one,) = studies(*(word.replace("GOOD", "main") for word in words))
    engine = one.experiment.engine
    assert code == 0 and one.experiment.workload.name == "eight_at_a_time"
    assert engine.name == "mine.toy:Toy" or "mine.toy_server" in engine.server.command


def test_the_studies_of_a_command_share_its_minutes_and_have_the_metrics_that_are_named(studies):
    words = ["--on", "chat", "ragged", "--minutes", "3", "ablation.metric=[ttft_p50_ms,request_s]"]
    code, cells = studies("HEAD~1", *words)
    assert code == 0 and [one.experiment.design.time for one in cells] == [90, 90]
    assert cells[0].experiment.ablation.metric == ["ttft_p50_ms", "request_s"]


def test_a_workload_is_one_study_of_two_revisions_and_a_control(studies, tmp_path):
    code, (one,) = studies("HEAD~1", "engine.threads=1", "--on", "chat", "--margin", "3")
    assert code == 0
    assert [arm.name for arm in one.arms] == ["base", "head", "control"]
    base, head, control = (arm.environment["revision"] for arm in one.arms)
    assert base == control != head and len(head) == 40
    assert one.experiment.workload.name == "chat"
    assert one.experiment.engine.threads == 1 and one.experiment.design.margin_pct == 3
    assert one.experiment.design.alpha == 0.05 and one.isolation.value == "live"
    assert (tmp_path / "step.md").read_text().startswith("### No worse: ")


def test_each_arm_of_an_ablation_is_a_study_and_they_share_alpha(studies, tmp_path):
    words = ("--on", "seq_map", "kernel_decode", "--summary", str(tmp_path / "s.md"))
    code, cells = studies("HEAD~1", "HEAD", *words)
    assert code == 0 and [len(one.arms) for one in cells] == [3, 3, 3]
    resolvers = [one.experiments["head"].engine.attention.resolver for one in cells]
    assert resolvers[:2] == ["binary_search", "seq_map"]
    assert cells[0].experiments["base"].workload.name == "kernel_seq_map"
    assert {one.experiment.design.alpha for one in cells} == {0.0166667}
    assert (tmp_path / "s.md").read_text().count("no worse |") == 3


@pytest.mark.parametrize(
    ("ablation", "arms", "metric"),
    [("precision", 9, "total_tok_s"), ("inert_padding", 2, None), ("memory_fraction", 4, None)],
)
def test_an_ablation_is_tested_without_its_claims_on_outputs(studies, ablation, arms, metric):
    code, cells = studies("HEAD~1", "--on", ablation, "plan=true")
    assert code == 0 and len(cells) == arms
    for one in cells:
        assert one.arms[0].identity == "none" and not one.arms[0].quality
        assert one.experiment.ablation.metric == metric


def test_metrics_beside_that_of_the_outputs_stay(studies, tmp_path):
    (tmp_path / "ablation").mkdir()
    text = "metric: [outputs, ttft_p50_ms]\narms: {a: {}}\nclaims: {identity: tokens}\n"
    (tmp_path / "ablation" / "mine.yaml").write_text(f"name: mine\n{text}")
    _, (one,) = studies("HEAD~1", "--on", "mine", "--config-dir", str(tmp_path))
    assert one.metrics == ("ttft_p50_ms",)


@pytest.mark.parametrize("tested", ["base", "mine"])
def test_claims_about_an_arm_called_base_are_not_those_of_a_revision(studies, tmp_path, tested):
    """They were checked in the base of every arm's study, and failed there."""
    (tmp_path / "ablation").mkdir()
    claims = "claims: {engaged: {base: [resolver.binary_search]}, out_of_memory: [base]}\n"
    arms = "{base: {engine.attention.resolver: binary_search}, mine: {engine.threads: 1}}"
    (tmp_path / "ablation" / "own.yaml").write_text(f"name: own\narms: {arms}\n{claims}")
    code, cells = studies("HEAD~1", "--on", "own", "--config-dir", str(tmp_path))
    one = cells[["base", "mine"].index(tested)]
    assert code == 0 and [arm.engaged for arm in one.arms] == [()] * 3
    assert not any(arm.out_of_memory for arm in one.arms)


def test_both_revisions_have_the_environment_of_an_arm(studies, tmp_path, capsys):
    """Without it, an arm of other versions was tested with the installed ones."""
    (tmp_path / "ablation").mkdir()
    own = tmp_path / "ablation" / "own.yaml"
    own.write_text("name: own\narms: {a: {environment: {requirements: [mlx==1]}}}\n")
    words = ("HEAD~1", "--on", "own", "--config-dir", str(tmp_path))
    code, (one,) = studies(*words)
    assert code == 0 and all(arm.environment["requirements"] == ["mlx==1"] for arm in one.arms)
    assert len({arm.environment["revision"] for arm in one.arms}) == 2
    for environment, why in (
        ("{revision: main}", "arm a has an environment.revision of its own"),
        ("{python: python3}", "arm a has an environment.python of its own"),
        ("main", "arm a: environment must be a map, not 'main'"),
    ):
        own.write_text(f"name: own\narms: {{a: {{environment: {environment}}}}}\n")
        assert studies(*words)[0] == 2 and f"--on own: {why}" in capsys.readouterr().err


def test_commits_do_not_share_a_folder(studies):
    """Else the report of a bisection's ``--out`` mixes them."""
    folders = []
    for words in (("HEAD~1", "HEAD"), ("HEAD", "HEAD~1"), ("HEAD~1", "HEAD")):
        _, (one,) = studies(*words, "--on", "chat", "--out", "bisection")
        folders.append(Path(one.experiment.out))
    first, second, again = folders
    assert first == again != second and {one.parent.name for one in folders} == {"bisection"}


def test_other_cells_of_a_folder_decide_nothing(studies, tmp_path, capsys):
    """Those of another margin, and the one that confirms this command's, counted."""
    words = ("HEAD~1", "--on", "chat", "--out", "same")
    studies.result = cell("worse", -4.0, -1.0)
    assert studies(*words)[0] == 1
    (worse,) = tmp_path.glob("same/*/*/cell.json")
    shutil.copytree(worse.parent, f"{worse.parent}~processes")
    studies.result = cell("equivalent", -1.0, 1.0)
    for margin in ("5", "2"):
        capsys.readouterr()
        assert studies(*words, "--margin", margin)[0] == 0
        assert capsys.readouterr().out.count("| chat |") == 1


def test_the_folder_and_the_summary_may_lie_in_the_user_s_home(studies, tmp_path, monkeypatch):
    """The shell leaves ``~`` after an equals sign, and the name of a folder is any text."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    code, (one,) = studies("HEAD~1", "--on", "chat", "--out=~/Ann's", "--summary=~/s.md")
    assert code == 0 and Path(one.experiment.out).parent == tmp_path / "home" / "Ann's"
    assert (tmp_path / "home" / "s.md").is_file()


def test_an_arm_that_no_override_can_drop_is_named(studies, tmp_path, capsys):
    (tmp_path / "ablation").mkdir()
    (tmp_path / "ablation" / "mine.yaml").write_text("name: mine\narms: {a: {}, b.5: {}}\n")
    assert studies("HEAD~1", "--on", "mine", "--config-dir", str(tmp_path))[0] == 2
    assert "no override can drop arm b.5, whose name has a dot" in capsys.readouterr().err


def test_a_value_that_a_revision_refuses_is_one_line_and_undecided(studies, capsys):
    studies.refusal = "engine.kv.dtype=int4: allowed are float32"
    assert studies("HEAD~1", "--on", "chat", "engine.kv.dtype=int4") == (125, [])
    line = "arm base: the arm's revision of labkit refuses engine.kv.dtype=int4: allowed are float"
    assert capsys.readouterr().err.startswith(f"labkit.regression: {line}")


def test_workloads_and_ablations_of_the_user_s_own_are_tested(studies, tmp_path):
    for name, text in (("ablation/mine", "arms: {a: {engine.threads: 1}}"), ("workload/w", "")):
        (tmp_path / f"{name}.yaml").parent.mkdir()
        (tmp_path / f"{name}.yaml").write_text(f"name: of my own\n{text}\n")
    folders = ("--config-dir", str(tmp_path), "--config-dir", str(tmp_path / "checkout"))
    code, (ablation, workload) = studies("HEAD~1", "--on", "mine", "w", *folders)
    assert code == 0 and ablation.experiments["head"].engine.threads == 1
    assert workload.experiment.workload.name == "of my own"
    assert workload.config_dirs == (".", "checkout")


def test_a_name_of_two_groups_is_written_with_its_group(studies, capsys):
    """The workload was tested nowhere: the ablation of its name came first."""
    assert studies("HEAD~1", "--on", "decode_burst")[0] == 2
    line = "have this name; write ablation/decode_burst or workload/decode_burst\n"
    assert capsys.readouterr().err.endswith(line)
    code, (one,) = studies("HEAD~1", "--on", "workload/decode_burst")
    assert code == 0 and one.experiment.workload.name == "decode_burst"


def test_git_bisect_finds_the_slow_one_of_eight_commits_by_the_exit_codes(
    studies, tmp_path, monkeypatch
):
    """A commit that is undecided is skipped. The verdicts are planted, the commits are real."""
    folder = tmp_path / "checkout"
    words = {0: "good", 1: "bad", 125: "skip"}

    for number in range(3, 9):
        git(folder, "commit", "-q", "--allow-empty", "-m", f"{number}")
    commits = git(folder, "rev-list", "--reverse", "HEAD").split()
    slow, noisy = commits[5], commits[3]
    git(folder, "bisect", "start", "HEAD", commits[0])
    said, tested, resolved = "", [], []
    monkeypatch.setattr(
        regression,
        "subjects",
        lambda names, base, head, folders: resolved.append((base, head)) or [Subject("chat", ())],
    )
    monkeypatch.setattr(
        regression, "_study", lambda *_: list(row_results("chat", studies.result, "head"))
    )
    while "is the first bad commit" not in said:
        now = git(folder, "rev-parse", "HEAD")
        verdict = "worse" if commits.index(now) >= 5 else "equivalent"
        studies.result = cell("invalid" if now == noisy else verdict, -1.0, 1.0)
        code, _ = studies(commits[0], "--on", "chat")
        assert [one["revision"] for one in resolved.pop()] == [commits[0], now]
        said = git(folder, "bisect", words[code])
        tested.append((now, words[code]))
    assert f"{slow} is the first bad commit" in said
    assert len(tested) <= 5 and (noisy, "skip") in tested


def test_overrides_that_contradict_no_other_word_are_taken(studies):
    code, (one,) = studies("HEAD~1", "--on", "chat", "design.time=600", "design.alpha=0.04")
    assert (code, one.experiment.design.time, one.experiment.design.alpha) == (0, 600, 0.04)
    code, (one, _) = studies(
        "HEAD~1", "--on", "seq_map", "workload=kernel_decode", "--minutes", "4"
    )
    assert (code, one.experiment.workload.name) == (0, "kernel_decode")


@pytest.mark.parametrize("word", ["plan=true", "plan=True", "++plan=yes"])
def test_a_plan_has_no_result(studies, capsys, word):
    code, cells = studies("HEAD~1", "--on", "chat", "--on", "ragged", word)
    assert code == 0 and len(cells) == 2 and "Undecided" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (cell("worse"), 1),
        (cell("invalid"), 125),
        ("interrupted", 130),
        (RevisionError("arm head: no worker"), 125),
        (StudyError("disk full"), 125),
        (RecordError("no cell"), 125),
        (CacheError("cannot write /cache"), 125),
        (UserClassError("step() KeyError", "mine.toy:Toy"), 125),
    ],
)
def test_exit_codes(studies, result, code, capsys):
    studies.result = result
    assert studies("HEAD~1", "--on", "chat")[0] == code
    assert len(capsys.readouterr().err.splitlines()) <= 1


def test_a_defect_is_not_worse_and_keeps_its_traceback(studies, capsys):
    studies.result = ZeroDivisionError("x")
    assert studies("HEAD~1", "--on", "chat")[0] == 125
    assert "Traceback" in (error := capsys.readouterr().err) and "ZeroDivisionError: x" in error


def test_a_file_that_is_no_yaml_is_a_mistake(studies, tmp_path, capsys):
    (tmp_path / "workload").mkdir()
    (tmp_path / "workload" / "w.yaml").write_text("name: [\n")
    assert studies("HEAD~1", "--on", "w", "--config-dir", str(tmp_path))[0] == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("labkit.regression: ") and "w" in line


def test_a_summary_s_folder_is_created(studies, tmp_path):
    studies.result = cell("worse")
    assert studies("HEAD~1", "--on", "chat", "--summary", "reports/new/s.md")[0] == 1
    assert (tmp_path / "reports" / "new" / "s.md").read_text().startswith("### Worse: ")


@pytest.mark.parametrize("name", ["folder", "file/s.md"])
def test_a_summary_that_cannot_be_written_is_refused_before_anything_runs(
    studies, tmp_path, name, capsys
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    code, cells = studies("HEAD~1", "--on", "chat", "--summary", name)
    assert (code, cells) == (2, [])
    line = f"labkit.regression: --summary {name}: no file can be written there\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("code", "seen"), [(0, 0), (1, 1), (125, 125), (2, 128), (127, 128), (130, 128), (141, 128)]
)
def test_the_page_s_bisection_stops_at_every_code_that_is_no_answer(code, seen):
    (command,) = (line for line in COMMANDS if "git bisect run" in line)
    words = shlex.split(command.partition("git bisect run ")[2])
    first = words.index("python")
    done = subprocess.run([*words[:first], "sh", "-c", f"exit {code}"], check=False)
    assert done.returncode == seen


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("nope", "--on", "chat"), "environment.revision=nope: no such revision"),
        (("HEAD", "--on", "nope"), "--on nope: there is no such ablation or workload"),
        (("HEAD", "--on", "engine.threads=2", "--minutes", "4"), "--on names no workload or abla"),
        (("HEAD", "--on", "chat", "++out=x"), "++out=x: set it with --out DIR"),
        (("HEAD", "--on", "chat", "design.margin_pct=5"), "set it with --margin PCT"),
        (
            ("HEAD", "--on", "chat", "--minutes", "4", "design.time=600"),
            "design.time=600: --minutes sets it; leave one of them out",
        ),
        (
            ("HEAD", "--on", "chat", "ragged", "++design.alpha=0.05"),
            "alpha=0.05: 2 tests share 0.0",
        ),
        (("HEAD", "--on", "chat", "workload=ragged"), "workload=ragged: name it after --on"),
        (("HEAD", "--on", "seq_map", "ablation=none"), "ablation=none: name it after --on"),
        (
            ("HEAD", "--on", "chat", "ablation.metric=[ttft_p50_ms,outputs]"),
            "a test is about speed; name other metrics than outputs",
        ),
        (("HEAD", "~engine.foo", "--on", "chat"), "'engine.foo' does not exist"),
        (("HEAD", "--on", "chat", "engine.threads=1,2"), "engine.threads=1,2: give a single value"),
        (("HEAD", "--on", "chat", "engine.foo=1"), "engine.foo=1: no option 'foo'"),
        (("a", "b", "c", "--on", "chat"), "3 revisions: write BASE, or BASE and HEAD"),
        (("HEAD", "--on", "chat", "--repository", "/"), "/ is not a Git checkout"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(studies, words, line, capsys, tmp_path):
    assert studies(*words)[0] == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1 and error.startswith("labkit.regression: ")
    assert sorted(os.listdir(tmp_path)) == ["checkout"]
