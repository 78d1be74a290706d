"""The judge: what it prints and writes, its exit codes, and its one-line errors."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.importers import study_writer
from labkit.judge import main

ROOT = str(Path(__file__).parents[1])


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """Return a function that writes files of hyperfine, and an argument list without a folder."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.chdir(tmp_path)

    def write(name, times, at=0.0, codes=None):
        file = tmp_path / f"{name}.json"
        mean = sum(times) / len(times)
        result = {"command": "c", "mean": mean, "times": times, "exit_codes": codes}
        file.write_text(json.dumps({"results": [result]}))
        os.utime(file, (1_790_000_000 + at,) * 2)
        return str(file)

    return write


SPREAD = [1.0, 1.004, 0.997, 1.002, 0.999, 1.003, 0.998, 1.001]


def test_arms_that_came_one_after_the_other_are_judged_if_nothing_drifted(timed, tmp_path, capsys):
    base = timed("base", SPREAD)
    head = timed("head", [1.05 * x for x in SPREAD], at=60)
    words = [head, "--against", base, "--out", "out", "--summary", "summary.md"]
    assert main(words) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "If nothing drifted: head takes 5.0 % more time" in printed
    assert "one after the other: the test assumes that nothing drifted" in printed
    assert "whether the arms gave the same outputs" in printed
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("### Worse: head against base")
    assert "worse (if nothing drifted between the arms' runs)" in summary
    report = (tmp_path / "out" / "report.md").read_text()
    assert "outputs not compared; if nothing drifted between the arms' runs" in report


def test_a_summary_that_cannot_be_written_is_refused_before_there_is_a_report(
    timed, tmp_path, capsys
):
    base, head = timed("base", SPREAD), timed("head", SPREAD)
    (tmp_path / "folder").mkdir()
    assert main([head, "--against", base, "--out", "out", "--summary", "folder"]) == 2
    line = "labkit.judge: --summary folder: no file can be written there\n"
    assert capsys.readouterr().err == line and not (tmp_path / "out").exists()


def test_a_table_is_printed_in_a_locale_without_its_minus(timed):
    base, head = timed("base", SPREAD), timed("head", [0.9 * x for x in SPREAD])
    judged = subprocess.run(
        [sys.executable, "-m", "labkit.judge", head, "--against", base],
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONPATH": ROOT},
        capture_output=True,
    )
    assert (judged.returncode, judged.stderr) == (0, b"")
    assert "−10" in judged.stdout.decode("utf-8")


@pytest.mark.parametrize(
    ("status", "factors", "codes", "line"),
    [
        (0, (1.0, 1.0), None, "equivalent"),
        (0, (1.0, 0.9), None, "less time"),
        (125, (1.0, 1.0), "short", "a verdict needs at least 3 more runs of each arm"),
        (125, (1.0, 1.01), "noisy", "more runs of each arm would detect"),
        (1, (1.0, 1.0), "failed", "exit code 3"),
    ],
)
def test_exit_codes(timed, capsys, status, factors, codes, line):
    files = []
    for place, (arm, factor) in enumerate(zip(("base", "head"), factors, strict=True)):
        power = 8 if codes == "noisy" else 1
        times = [factor * x**power for x in (SPREAD[::-1] if place else SPREAD)]
        times = times[:3] if codes == "short" else times
        failed = [3] + [0] * (len(times) - 1) if codes == "failed" and place else None
        files.append(timed(arm, times, at=60.0 * place, codes=failed))
    assert main([files[1], "--against", files[0], "--out", "out"]) == status
    assert line in " ".join(capsys.readouterr().out.split())


def test_a_run_that_failed_counts_although_it_is_left_out(timed, tmp_path, capsys):
    base = timed("base", SPREAD)
    head = timed("head", [*SPREAD, 1.0], at=60, codes=[0] * len(SPREAD) + [3])
    assert main([head, "--against", base, "--out", "out", "--summary", "s.md"]) == 1
    line = "a run of head that failed is left out: head.json: exit code 3"
    assert line in " ".join(capsys.readouterr().out.split())
    assert line in (tmp_path / "s.md").read_text()


def test_files_in_turns_count_as_pairs_and_the_folder_is_named(timed, tmp_path, capsys):
    for pair in range(6):
        for place, arm in enumerate(("base", "head")):
            factor = SPREAD[pair] * (1.1 if arm == "head" else 1.0)
            name = f"{arm}/{pair}"
            (tmp_path / arm).mkdir(exist_ok=True)
            timed(name, [factor, factor * 1.001], at=60.0 * (2 * pair + place))
    (tmp_path / "head" / ".DS_Store").write_bytes(b"\0\0\0\1Bud1\xff")
    assert main(["head", "--against", "base"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "the arms ran in turns" in printed and "6 blocks of 1 run per arm" in printed
    assert "runs of an arm that came together count as one" in printed
    assert list(tmp_path.glob("outputs/*/*/report.html"))


def test_a_flag_may_be_repeated_and_a_path_may_begin_in_the_user_s_home(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("labkit.judge._run", lambda options: seen.append(options) or 0)
    words = ["head", "--against", "a", "b", "--against", "c", "--out=~/x", "--summary=~/s.md"]
    assert main(words) == 0 == main(["head"])
    assert [str(path) for path in seen[0].against] == ["a", "b", "c"] and seen[1].against == []
    assert (seen[0].out, seen[0].summary) == (tmp_path / "x", tmp_path / "s.md")


def test_a_file_with_two_commands_names_its_arms(tmp_path, timed, capsys):
    file = tmp_path / "two.json"
    result = {"mean": sum(SPREAD) / 8, "times": SPREAD}
    file.write_text(json.dumps({"results": [{"command": c, **result} for c in ("a b", "c d")]}))
    assert main([str(file), "--out", "out"]) == 0
    assert "c_d against a_b" in capsys.readouterr().out


def commands(folder, *names, factor=1.0):
    """Write hyperfine's file of several commands."""
    file = folder / "commands.json"
    mean = sum(SPREAD) / 8
    results = [
        {
            "command": name,
            "mean": mean * factor**place,
            "times": [x * factor**place for x in SPREAD],
        }
        for place, name in enumerate(names)
    ]
    file.write_text(json.dumps({"results": results}))
    return str(file)


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("./old", "./new"), "hyperfine: new against old"),
        (("bench --file " + "x" * 230 + "1", "bench --file " + "x" * 230 + "2"), " against bench_"),
        (("ä" * 230, "ä" * 230 + "b"), " against ää"),
    ],
)
def test_commands_with_a_path_or_a_long_name_are_judged(tmp_path, timed, capsys, names, line):
    assert main([commands(tmp_path, *names), "--out", "out"]) == 0
    assert line in " ".join(capsys.readouterr().out.split())
    assert len(list((tmp_path / "out" / "files" / "arms").glob("*.json"))) == 2


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path, timed, capsys, monkeypatch):
    words = [commands(tmp_path, "a", "b"), "--out", "out"]
    publish = study_writer.publish_records

    def full(cell, *records):
        publish(cell, records[0])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(cell))

    with monkeypatch.context() as patch:
        patch.setattr(study_writer, "publish_records", full)
        assert main(words) == 2
        assert not (tmp_path / "out").exists()
        assert main(words[:1]) == 2
        assert not (tmp_path / "outputs").exists()
        (tmp_path / "out").mkdir()
        assert main(words) == 2
        assert list((tmp_path / "out").iterdir()) == []
    assert main(words) == 0


def test_what_could_change_the_answer_is_in_the_summary(timed, tmp_path, capsys):
    for pair in range(6):
        for place, arm in enumerate(("base", "head")):
            (tmp_path / arm).mkdir(exist_ok=True)
            times = [SPREAD[pair] + 1e-6 * place]
            timed(f"{arm}/{pair}", times, at=60.0 * (2 * pair + place))
    assert main(["head", "--against", "base", "--out", "out", "--summary", "s.md"]) in (0, 125)
    line = "always in the same order: a steady drift of the machine does not cancel"
    assert line in (tmp_path / "s.md").read_text()
    assert line in " ".join(capsys.readouterr().out.split())


def test_the_results_of_several_cases_are_named_cases(tmp_path, timed, capsys):
    lines = ["arm,run,case,latency:ms:lower"]
    pairs = [(arm, case) for arm in "ab" for case in "uv"]
    lines += [f"{arm},{i},{case},{x}" for arm, case in pairs for i, x in enumerate(SPREAD)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    assert main(["t.csv", "--out", "out"]) == 0
    printed = capsys.readouterr().out
    assert " case " in printed and " batch " not in printed


def errors(timed):
    one = timed("one", SPREAD)
    other = timed("other", [2 * x for x in SPREAD])
    copy = timed("copy", SPREAD)
    throughput = timed("throughput", SPREAD)
    with open(throughput, "w") as file:
        file.write('{"elapsed_time": 1, "num_requests": 2, "total_num_tokens": 5, ')
        file.write('"requests_per_second": 2.0, "tokens_per_second": 5.0}')
    return {
        "copy.json has the same content as": [copy, "--against", one],
        "is of vllm bench throughput, but": [throughput, "--against", one],
        "there is one arm; name others with --against": [one],
        "it names no arms; add --against FILE": [throughput],
        "no-such: No such file or directory": ["no-such", "--against", one],
        "must be above 0 and at most 50": [one, "--against", other, "--margin", "0"],
        "one.json: it is named on both sides": [one, "--against", one],
        "name another with --out": [one, "--against", other, "--out", "."],
    }


def test_a_mistake_is_one_line(timed, capsys):
    for line, words in errors(timed).items():
        try:
            status = main(words)
        except SystemExit as exit:
            status = exit.code
        error = capsys.readouterr().err
        assert status == 2 and line in error, error
        assert error.startswith("labkit.judge: ") and error.count("\n") == 1


NO_ERRORS = [0.0] * 8


@pytest.mark.parametrize(
    ("column", "base", "head", "status", "line"),
    [
        ("errors:%:lower", NO_ERRORS, NO_ERRORS, 0, "no effect in percent of it exists"),
        ("errors:%:lower", NO_ERRORS, [30.0] * 8, 1, "measures 30.0 points higher in errors"),
        ("errors:%:lower", NO_ERRORS, [*NO_ERRORS[1:], 2.0], 125, "has 0 % in every run"),
        ("errors:%:lower", [30.0, 31.0] * 4, NO_ERRORS, 0, "−100"),
        ("errors:%:lower", [30.0, 0.0] * 4, [0.0, 30.0] * 4, 125, "inconclusive"),
        ("goodput_req_s", NO_ERRORS, NO_ERRORS, 0, "has 0 req/s in every run"),
        ("total_tok_s", NO_ERRORS, NO_ERRORS, 125, "no complete block with values above 0"),
        ("latency2:ms:lower", NO_ERRORS, SPREAD, 125, "no complete block with values above 0"),
    ],
)
def test_no_errors_are_a_result(timed, tmp_path, capsys, column, base, head, status, line):
    rows = [f"arm,run,latency:ms:lower,{column}"]
    for arm, values in (("base", base), ("head", head)):
        rows += [f"{arm},{i},{x},{y}" for i, (x, y) in enumerate(zip(SPREAD, values, strict=True))]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    assert main(["t.csv", "--out", "out", "--summary", "s.md"]) == status
    printed = capsys.readouterr().out + (tmp_path / "s.md").read_text()
    assert line in " ".join(printed.split())
    assert status != 1 or "if nothing drifted" in printed
