"""The frame of the command-line programs."""

import os
import subprocess
import sys

import pytest

from labkit.cli.program_base import Program, print_error, print_notes
from labkit.experiment.progress_display import create_progress


def test_errors_and_notes_are_one_line_each_on_standard_error(capsys):
    assert print_error("python -m labkit.report", "DIR:\n  no such directory") == 2
    print_notes("labkit.report", ["one\ntwo", "three"])
    lines = ["DIR: no such directory", "note: one two", "note: three"]
    assert capsys.readouterr() == ("", "".join(f"labkit.report: {line}\n" for line in lines))


def test_a_parser_s_error_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as error:
        Program(prog="python -m labkit.report").parse_args(["--what"])
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and line.startswith(
        "labkit.report: unrecognized arguments: --what"
    )


class Refused(Exception):
    pass


class Failed(Exception):
    pass


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        (None, 0, ""),
        (3, 3, ""),
        (Refused("no"), 2, "labkit.x: no\n"),
        (Failed("no"), 125, "labkit.x: no\n"),
        (FileNotFoundError(2, "no such file", "a.json"), 2, "labkit.x: a.json: no such file\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_program_s_status_is_that_of_how_it_ends(raised, status, line, capsys):
    def body(options):
        if isinstance(raised, BaseException):
            raise raised
        return raised

    program = Program(prog="python -m labkit.x")
    ended = program.run([], body, refused=(Refused,), failed=(Failed,), failed_status=125)
    assert (ended, capsys.readouterr().err) == (status, line)


def test_a_program_raises_what_it_does_not_expect():
    with pytest.raises(ZeroDivisionError):
        Program(prog="python -m labkit.x").run([], lambda _: 1 // 0, refused=(Refused,))


def test_a_closed_standard_output_is_no_verdict(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert Program(prog="python -m labkit.x").run([], lambda options: 3) == 3


def test_what_is_written_to_a_closed_standard_error_is_lost(monkeypatch, capsys):
    """``print`` wrote it to standard output, and the progress was a traceback."""

    def body(options):
        create_progress(sys.stderr).note("begins")
        print_notes("labkit.x", ["one"])
        sys.stderr.close()

    monkeypatch.setattr("sys.stderr", None)
    assert Program(prog="python -m labkit.x").run([], body) == 0
    assert capsys.readouterr().out == ""


def test_a_closed_pipe_is_no_verdict(tmp_path, monkeypatch):
    def body(options):
        raise BrokenPipeError

    with open(tmp_path / "out", "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        ended = Program(prog="python -m labkit.x").run([], body, failed=(OSError,), failed_status=1)
    assert ended == 141


@pytest.mark.parametrize("words", [["labkit", "--version"], ["labkit.report", "--help"]])
def test_a_program_whose_output_nobody_reads_ends_quietly(words):
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with open(writer, "w") as output:
        command = [sys.executable, "-m", *words]
        ended = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, env=buffered
        )
    assert (ended.returncode, ended.stderr) == (141, "")
