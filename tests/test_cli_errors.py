"""Error and note lines of the command-line programs."""

import pytest

from labkit.cli.cli_errors import OneLineParser, print_error, print_notes


def test_errors_and_notes_are_one_line_each_on_standard_error(capsys):
    assert print_error("python -m labkit.report", "DIR:\n  no such directory") == 2
    print_notes("labkit.report", ["one\ntwo", "three"])
    lines = ["DIR: no such directory", "note: one two", "note: three"]
    assert capsys.readouterr() == ("", "".join(f"labkit.report: {line}\n" for line in lines))


def test_a_parser_s_error_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as error:
        OneLineParser(prog="python -m labkit.report").parse_args(["--what"])
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and line.startswith(
        "labkit.report: unrecognized arguments: --what"
    )
