"""``make mac`` on Linux, with injected steps; the zip file is read back."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from labkit import analysis
from labkit.cli import hydra_arguments, multirun_composition
from labkit.experiment.hydra import hydra_composer
from labkit.mac import __main__ as door
from labkit.mac import kernel_verification, mac_steps, nvidia_steps, report_bundle
from labkit.mac.mac_steps import (
    INTERRUPTED,
    NOT_RUN,
    ON_METAL,
    PASSED,
    MacStep,
    StepOutcome,
    all_steps,
    run_steps,
)
from labkit.machine.facts import macos

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
TINY = ("workload=kernel_emulated", "engine.attention.device=cpu")


def python(name, code):
    return MacStep(name, f"runs {name}", ("-c", code))


def run(tmp_path, steps, **options):
    shown = []
    return run_steps(steps, tmp_path, shown.append, **options), shown


# ------------------------------------------------------------------ the steps


def test_a_step_that_fails_does_not_stop_the_rest(tmp_path):
    outcomes, shown = run(
        tmp_path,
        [
            python("one", "print('first')"),
            python("two", "import sys; print('second'); sys.exit(3)"),
            python("three", "print('third')"),
        ],
    )
    assert [o.status for o in outcomes] == [PASSED, "failed (exit 3)", PASSED]
    assert (tmp_path / "two.log").read_text() == "second\n"
    text = "".join(shown)
    for output in ("[1/3] one: runs one", "first", "[2/3]", "two: failed (exit 3)", "third"):
        assert output in text


def test_output_is_shown_while_the_step_runs(tmp_path):
    mark = tmp_path / "seen"
    waits = (
        "import pathlib, time; print('ear' + 'ly')\n"
        f"while not pathlib.Path({str(mark)!r}).exists(): time.sleep(0.01)"
    )

    def show(text):
        if "early" in text:
            mark.touch()

    (outcome,) = run_steps([python("slow", waits)], tmp_path, show, timeout_s=60)
    assert outcome.status == PASSED


def test_a_hanging_step_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(mac_steps, "STOP_TIMEOUT_S", 0.05)
    steps = [python("hangs", "import time; time.sleep(600)"), python("next", "")]
    outcomes, _ = run(tmp_path, steps, timeout_s=0.5)
    late = "failed (took too long)"
    assert outcomes[0].status == late
    assert outcomes[1].status in (PASSED, late)  # it ran; a busy machine starts it late


def interrupted(tmp_path, code):
    """Run a step in its own process group, and send SIGINT once it prints ``ready``."""
    script = (
        "import signal, sys, pathlib; from labkit.mac import mac_steps as steps\n"
        # A suite that runs in the background has ctrl-C ignored, and its children inherit that.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "one = steps.MacStep('one', '', ('-c', sys.argv[1]))\n"
        "s = [one, steps.MacStep('two', '', ('-c', ''))]\n"
        "show = lambda text: print(text, end='', flush=True)\n"
        "outcomes = steps.run_steps(s, pathlib.Path(sys.argv[2]), show)\n"
        "print([o.status for o in outcomes])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, code, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    output = ""
    while "ready\n" not in output:
        line = process.stdout.readline()
        assert line, f"it ended before it was ready: {output}"
        output += line
    os.killpg(process.pid, signal.SIGINT)
    output += process.communicate(timeout=60)[0]
    return output.splitlines()[-1]


def test_ctrl_c_lets_the_step_finish_and_runs_no_other(tmp_path):
    waits = (
        "import time\n"
        "try: print('ready'); time.sleep(600)\n"
        "except KeyboardInterrupt: time.sleep(0.3); print('finished')"
    )
    assert interrupted(tmp_path, waits) == str([INTERRUPTED, NOT_RUN])
    assert (tmp_path / "one.log").read_text().endswith("finished\n")


def kernels(cells):
    return {(c.experiment.ablation.name, repr(c.experiment.workload)) for c in cells}


@pytest.fixture
def compose_step(composer, monkeypatch):
    """A function from a step that is a study to its cells; files are read once for all tests."""
    monkeypatch.setattr(hydra_composer, "Composer", lambda: composer)

    def compose(step):
        start = 3 if step.name == "answers" else 2
        return multirun_composition.compose_cells(hydra_arguments.parse(step.arguments[start:]))

    return compose


def test_every_study_composes_on_a_mac_and_every_kernel_study_is_verified(
    tmp_path, monkeypatch, compose_step
):
    monkeypatch.setattr(macos, "has_metal", lambda: True)
    cells = {}
    for step in all_steps(tmp_path, 16 * GIB):
        if step.arguments[:2] != ("-m", "pytest"):
            assert ON_METAL in step.arguments
            cells[step.name] = compose_step(step)
    assert kernels(cells["seq_map"]) | kernels(cells["decode"]) == kernels(cells["answers"])
    arms = {name: {a: e.engine for a, e in c[0].experiments.items()} for name, c in cells.items()}
    for name in ("decode_shape", "serving"):  # float16 rounds a near tie to another token
        assert cells[name][0].experiment.ablation.claims.identity.value == "none"
    opponent = arms["serving"]["mlx_lm"]
    assert (opponent.name, opponent.dtype) == ("mlx_lm", arms["serving"]["base"].dtype)
    assert arms["served_answers"]["reference"].attention.backend == "reference"
    for name, engines in arms.items():
        first = next(iter(engines.values()))
        assert first.attention.device.value == "metal", name


def test_every_kernel_study_on_a_gpu_is_verified_and_has_the_article_s_seven_rows(
    tmp_path, compose_step
):
    """The emulator stands for the GPU: the steps must be ready when there is one."""
    cells = {}
    for step in nvidia_steps.gpu_steps(tmp_path, 16 * GIB, "engine.attention.device=emulated"):
        if step.arguments[:2] != ("-m", "pytest"):
            cells[step.name] = compose_step(step)
    assert {c.experiment.ablation.name for c in cells["answers"]} == {
        "seq_map",
        *nvidia_steps.ABLATIONS,
    }
    (rows,) = cells["seq_map"]
    workload = rows.experiment.workload
    assert len([case for case in workload.cases if case.name in published_rows(rows)]) == 7
    assert workload.max_pool_bytes == 8 * GIB
    assert {c.experiment.workload.max_pool_bytes for c in cells["answers"]} == {8 * GIB}
    for name, (cell, *_) in cells.items():
        for experiment in cell.experiments.values():
            assert experiment.workload.dtype.value == "float16", name
            assert experiment.engine.attention.device.value == "emulated"
    assert {e.engine.attention.unit for e in rows.experiments.values()} == {"head"}


def published_rows(cell):
    return {row["case"] for row in cell.experiment.ablation.published["rows"]}


def test_the_gpus_answers_are_right_in_the_emulator(tmp_path):
    (answers, *_) = nvidia_steps.gpu_steps(tmp_path, GIB, "engine.attention.device=emulated")
    table = Path(answers.arguments[2])
    case = "workload.cases=[{name: c, decode: 2, context: 8}]"
    small = ("workload=kernel_emulated", case, "ablation=grid")
    kept = [o for o in answers.arguments[3:-1] if not o.startswith("ablation=")]
    assert kernel_verification.main([str(table), *kept, *small]) == 0
    assert table.read_text().count("| right |") == 3


def test_without_a_gpu_it_prints_one_line_and_exits_with_2(inside, capsys):
    assert nvidia_steps.main(has_cuda=lambda: False) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(inside.iterdir()) == []


@pytest.mark.parametrize(("gib", "fits"), [(16, False), (32, True)])
def test_the_articles_largest_case_needs_enough_memory(tmp_path, gib, fits):
    (step,) = [s for s in all_steps(tmp_path, gib * GIB) if s.name == "seq_map"]
    (pools,) = [w for w in step.arguments if w.startswith("workload.max_pool_bytes=")]
    largest = 2 * 2 * (1024 * 2048 + 16) * 4 * 128  # keys and values, 2 bytes each
    assert (int(pools.partition("=")[2]) >= largest) is fits


# ------------------------------------------------------------------ the answers


@pytest.mark.slow
def test_outputs_of_every_arm_are_compared_with_the_reference(tmp_path, capsys):
    table = tmp_path / "answers.md"
    assert kernel_verification.main([str(table), "ablation=seq_map,block_size", *TINY, "-m"]) == 0
    lines = table.read_text().splitlines()
    assert lines[:2] == kernel_verification.TABLE_HEADER.splitlines()
    assert len(lines) == 2 + (2 + 3) * 3, "arms times cases"
    assert all("| right |" in line for line in lines[2:])
    assert capsys.readouterr().out.splitlines()[-1] == "all cases are right"


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_precision_is_compared_on_the_same_inputs(tmp_path, half):
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs a C++ compiler")
    table = tmp_path / "answers.md"
    device = ["engine.attention.device=emulated", f"workload.dtype={half}"]
    assert kernel_verification.main([str(table), "ablation=seq_map", TINY[0], *device]) == 0
    errors = [float(line.split(" | ")[3]) for line in table.read_text().splitlines()[2:]]
    assert len(errors) == 2 * 3
    half_an_ulp = {"float16": 2.0**-12, "bfloat16": 2.0**-9}[half]  # of a number below 1
    assert all(half_an_ulp / 4 < error <= 4 * half_an_ulp for error in errors)


def test_wrong_and_failing_outputs_are_reported(tmp_path, monkeypatch, capsys):
    measure = kernel_verification.workload.measure

    def broken(experiment):
        resolver = experiment.engine.attention.resolver
        if resolver == "seq_map":
            raise RuntimeError("the kernel\ndied | here")
        measured = measure(experiment)
        if experiment.engine.attention.backend == "fused":
            measured.values[measured.cases[1].outputs["digest"]][3, 2, 1] += 0.01
        return measured

    monkeypatch.setattr(kernel_verification.workload, "measure", broken)
    table = tmp_path / "answers.md"
    assert kernel_verification.main([str(table), "ablation=seq_map", *TINY]) == 1
    words = [line.split(" | ")[-1] for line in table.read_text().splitlines()[2:]]
    died = "RuntimeError: the kernel died \\| here |"
    assert words == ["right |", "WRONG |", "right |", died, died, died]
    assert "cases wrong or missing: 4" in capsys.readouterr().out


def test_a_case_too_large_is_skipped_and_a_mistake_is_one_line(tmp_path, capsys):
    table = tmp_path / "answers.md"
    cases = (
        "workload.cases=[{name: fits, decode: 1, context: 8}, {name: no, decode: 9, context: 999}]"
    )
    small = ["workload.max_pool_bytes=1048576", cases]
    assert kernel_verification.main([str(table), "ablation=gqa_sharing", *TINY, *small]) == 0
    words = [line.split(" | ")[2:] for line in table.read_text().splitlines()[2:]]
    assert [(case, verdict[:22]) for case, *_, verdict in words] == [
        ("fits", "right |"),
        ("no", "skipped: its KV pool n"),
    ] * 2
    assert capsys.readouterr().out.splitlines()[-1] == "all cases are right; skipped: 2"
    for mistake in (["ablation=nope"], ["workload=chat", "ablation=none"]):
        assert kernel_verification.main([str(tmp_path / "none.md"), *mistake]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "none.md").exists()


# ------------------------------------------------------------------ the file


@pytest.fixture
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(path):
    with zipfile.ZipFile(path) as bundle:
        return {name.partition("/")[2]: bundle.read(name).decode() for name in bundle.namelist()}


def test_without_metal_it_prints_one_line_and_exits_with_2(inside, capsys):
    assert door.main(has_metal=lambda: False) == 2
    output = capsys.readouterr()
    assert (output.out, len(output.err.splitlines())) == ("", 1)
    assert "no Metal" in output.err
    assert list(inside.iterdir()) == []


@pytest.mark.parametrize("program", [door, nvidia_steps, kernel_verification])
def test_help_runs_no_step(inside, capsys, program):
    """``python -m labkit.mac --help`` ran the whole suite, and a table was called ``--help``."""
    with pytest.raises(SystemExit, match="0"):
        program.main(["--help"])
    assert f"usage: {program.PROG}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        program.main(["report"] if program is not kernel_verification else [])
    assert capsys.readouterr().err.count("\n") == 1 and list(inside.iterdir()) == []


def test_it_writes_one_bundle_with_everything(inside, capsys, monkeypatch):
    # No time is claimed here, so the lock of whoever is timing is not waited for.
    monkeypatch.setenv("TMPDIR", str(inside))

    def steps(folder, memory_bytes):
        assert memory_bytes > GIB
        study = ["ablation=seq_map", "design=quick", "design.blocks=1", f"out={folder / 'study'}"]
        study.append("design.isolation=in_process")  # three arms, of which one process starts
        return (
            MacStep("study", "asks something", ("-m", "labkit", *study, *TINY, "-m")),
            python("broken", "import sys; print('why'); sys.exit(1)"),
        )

    assert door.main(has_metal=lambda: True, make_steps=steps) == 1
    (path,) = inside.glob("outputs/mac-*.zip")
    assert f"{path.relative_to(inside)} (" in capsys.readouterr().out
    bundle = opened(path)
    assert {"summary.md", "environment.json", "study.log", "broken.log"} <= set(bundle)
    records = [n for n in bundle if re.match(r"study/[^/]+/runs/b00-p0\d-\w+\.json$", n)]
    assert len(records) == 3
    assert all(bundle[n] == (path.with_suffix("") / n).read_text() for n in records)
    with zipfile.ZipFile(path) as bundled:
        bundled.extractall(inside / "elsewhere")
    assert analysis.exit_code(inside / "elsewhere" / path.stem / "study") == 0
    assert analysis.write_study(inside / "elsewhere" / path.stem / "study", plots=False)
    assert not [name for name in bundle if name.endswith((".png", ".npy", ".yaml"))]
    assert json.loads(bundle["environment.json"])["device"]
    assert re.search(r"^numpy==[\d.]+$", bundle["packages.txt"], re.M)
    summary = bundle["summary.md"]
    assert summary.startswith("# labkit on a Mac") is (sys.platform == "darwin")
    assert "macOS None" not in summary
    assert "| study | passed |" in summary and "| broken | failed (exit 1) |" in summary
    assert "```\nwhy\n```" in summary
    assert "Does a host-built token-to-request map" in summary
    assert "| decode, 3 reqs, ctx 40 | per-token |" in summary


def test_paths_and_names_are_redacted(tmp_path):
    redactor = report_bundle.Redactor(
        paths=(("/Users/jo/lab", "."), ("/Users/jo", "~"), ("/private/T", "TMP")),
        names=(("jo", "USER"), ("Jos-Mac", "HOST")),
    )
    output = redactor.redact("/Users/jo/lab/labkit/a.py: /Users/jo/x, /Users/jonas/y", names=True)
    assert output == "./labkit/a.py: ~/x, /Users/USER/y"
    output = redactor.redact("/private/T/pytest-of-jo/0 on Jos-Mac, joined", names=True)
    assert output == "TMP/pytest-of-USER/0 on HOST, joined"
    record = json.dumps({"jo": 1, "path": "/Users/jo/lab/m"})
    assert json.loads(redactor.redact(record, names=False)) == {"jo": 1, "path": "./m"}


def test_the_log_of_a_failed_step_is_redacted_in_the_summary_too(tmp_path):
    folder = tmp_path / "mac-1"
    folder.mkdir()
    (folder / "one.log").write_text("drwxr-xr-x jo /Users/jo/lab\nJos-Mac: killed\n")
    redactor = report_bundle.Redactor(
        paths=(("/Users/jo", "~"),), names=(("jo", "USER"), ("Jos-Mac", "HOST"))
    )
    outcome = StepOutcome(python("one", ""), "failed (exit 1)")
    bundle = opened(report_bundle.write_bundle(folder, {}, "", [outcome], redactor))
    assert bundle["one.log"] == "drwxr-xr-x USER ~/lab\nHOST: killed\n"
    assert "```\ndrwxr-xr-x USER ~/lab\nHOST: killed\n```" in bundle["summary.md"]


def test_a_folder_of_a_package_without_metadata_is_left_out(tmp_path, monkeypatch):
    for name in ("empty-1.0.dist-info", "Whole-2.0.dist-info"):
        (tmp_path / name).mkdir()
    (tmp_path / "Whole-2.0.dist-info" / "METADATA").write_text("Name: Whole\nVersion: 2.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert report_bundle.packages() == "whole==2.0\n"


def test_the_paths_of_this_computer_are_known(inside, monkeypatch):
    monkeypatch.setenv("HOME", str(inside / "someone"))
    monkeypatch.setenv("LOGNAME", "someone")
    hide = report_bundle.Redactor.for_this_computer().redact
    assert hide(f"{inside}/outputs and {inside}/someone/x", names=False) == "./outputs and ~/x"
    assert hide("someone else", names=True) == "USER else"


@pytest.mark.parametrize("error", [KeyError("uid not found: 1234"), OSError("no username set")])
def test_a_container_s_user_without_name_and_home_is_no_error(inside, monkeypatch, error):
    monkeypatch.setattr(report_bundle.getpass, "getuser", Mock(side_effect=error))
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home directory")))
    hide = report_bundle.Redactor.for_this_computer().redact
    assert hide(f"{inside}/outputs on {socket.gethostname()}", names=True) == "./outputs on HOST"


def test_an_interrupt_exits_with_130_and_writes_the_file(inside, monkeypatch):
    outcome = StepOutcome(python("one", ""), INTERRUPTED)
    monkeypatch.setattr(door, "run_steps", lambda *_: [outcome])

    def steps(folder, memory_bytes):
        (folder / "one.log").write_text("so far")
        return (outcome.step,)

    assert door.main(has_metal=lambda: True, make_steps=steps) == 130
    (path,) = inside.glob("outputs/mac-*.zip")
    assert "| one | interrupted |" in opened(path)["summary.md"]
