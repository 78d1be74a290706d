"""Progress: lines without a terminal, a live line with one, never an effect."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest

from labkit.experiment import progress_display
from labkit.experiment.permuted_blocks import Run
from labkit.records import CaseRecord, Metric, Record


def a_record(outcome="ok", detail=None) -> Record:
    metric = Metric("dispatch_us", "us", "lower", True, (123456.0,))
    return Record(
        "seq_map",
        "arm",
        0,
        1,
        7,
        outcome,
        "t",
        detail=detail,
        cases=(CaseRecord("c", None, (metric,)),),
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_events_are_shown_but_never_a_metric(make_cell, stream, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = stream()
    show = progress_display.create_progress(out)
    show.begin(make_cell(blocks=2), 6, 1)
    show.started([Run(0, 1, "seq_map")])
    show.tick()
    show.run_ended(a_record())
    show.run_ended(a_record("timeout", "killed after 3 s"))
    show.note("a note")
    show.end()
    text = out.getvalue()
    assert "block 1/2, seq_map" in text
    assert "run 2/6" in text
    assert "timeout: killed after 3 s" in text
    assert "a note" in text
    assert "123456" not in text


def test_the_live_line_is_refreshed_at_most_once_a_second(make_cell, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now[0])
    show = progress_display.LiveProgress(Terminal())
    shown = []
    monkeypatch.setattr(show._live, "update", lambda line, refresh: shown.append(line))
    show.begin(make_cell(), 6, 0)
    for _ in range(50):
        show.tick()
        now[0] += 0.1
    show.end()
    assert 4 <= len(shown) <= 6


def test_the_remaining_time_is_the_mean_run_times_the_runs_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now[0])
    clock = progress_display.RemainingTime(10, 2)
    assert clock.line() == "run 3/10, 0:00 elapsed"
    now[0] = 100.0  # preparing
    clock.started()
    now[0] = 110.0
    clock.run_ended()
    assert clock.line() == "run 4/10, 1:50 elapsed, about 1:10 left"
    assert progress_display.format_duration(3725) == "1:02:05"


def test_runs_that_share_a_process_share_its_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now[0])
    clock = progress_display.RemainingTime(9, 0)
    for ended in (30.0, 60.0):
        clock.started(3)
        now[0] = ended
        for left in (8, 7, 6):
            clock.run_ended()
            left -= 3 * (ended == 60.0)
            assert clock.line().endswith(
                f"about {progress_display.format_duration(10 * left)} left"
            )


def test_one_run_in_one_block_is_singular(make_cell):
    out = io.StringIO()
    progress_display.create_progress(out).begin(make_cell(blocks=1), 1, 0)
    assert "1 run in 1 block\n" in out.getvalue()


def test_the_share_done_within_a_process_is_shown(make_cell, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    show = progress_display.create_progress(out)
    shown = []
    monkeypatch.setattr(show._live, "update", lambda line, refresh: shown.append(str(line)))
    monkeypatch.setattr(progress_display, "REFRESH_S", 0.0)
    show.begin(make_cell(blocks=2), 6, 0)
    show.started([Run(0, 1, "seq_map"), Run(0, 2, "base")])
    show.working("8 of 32 requests")
    show.tick()
    show.started([Run(1, 1, "seq_map"), Run(1, 2, "base")])
    show.end()
    assert shown[-2].startswith("block 1/2, 2 arms interleaved, 8 of 32 requests (25 %), run 1/6")
    assert shown[-1].startswith("block 2/2, 2 arms interleaved, run 1/6")


def test_without_a_terminal_a_long_process_has_a_line_now_and_then(make_cell, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    show = progress_display.create_progress(out)
    show.begin(make_cell(blocks=1), 3, 0)
    show.started([Run(0, 1, "seq_map")])
    for _ in range(90):
        now[0] += 1
        show.working("warming up")
        show.tick()
    lines = [line for line in out.getvalue().splitlines() if "warming up" in line]
    assert len(lines) == 3 and lines[0].startswith("block 1/1, seq_map, warming up, run 1/3")


def test_runs_lost_with_another_are_one_line(make_cell, monkeypatch):
    out = Terminal()
    show = progress_display.create_progress(out)
    show.begin(make_cell(blocks=1), 3, 0)
    lost = [
        dataclasses.replace(a_record("crashed", "x"), arm=arm, notes={"failed_by": "b00-p00-mine"})
        for arm in ("base", "control")
    ]
    for record in lost:
        show.run_ended(record)
    show.launch_ended(lost)
    show.end()
    assert out.getvalue().count("b00-p00-mine") == 1
    assert "also lost, because they shared its process (b00-p00-mine): base and control" in (
        " ".join(out.getvalue().split())
    )


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_table_fills_with_decided_rows_and_the_time_of_the_others(
    make_cell, stream, monkeypatch
):
    monkeypatch.setenv("TERM", "xterm")
    now, out = [0.0], stream()
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now[0])
    show = progress_display.create_progress(out)
    show.begin(make_cell(blocks=2), 6, 0)
    show.started([Run(0, 1, "seq_map")])
    now[0] = 20.0
    show.run_ended(a_record())
    row = progress_display.DecidedRow("clear", "seq_map", "worse", "+20 %", "+18 % to +22 %")
    show.rows_decided([row], ["noisy", "[heavy]"])
    show.end()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    text = " ".join(plain.split())
    if stream is Terminal:
        assert "row arm verdict effect interval" in text
        assert "clear seq_map worse +20 % +18 % to +22 %" in text
        assert "noisy about 1:40 left" in text and "[heavy]" in text
    else:
        assert "decided: clear: seq_map worse, +20 % (+18 % to +22 %)" in text
        assert "still measured, about 1:40 left: noisy and [heavy]" in text
