"""The store of records: written by rename, read strictly, never overwritten."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from labkit.records import (
    Arm,
    CaseRecord,
    Metric,
    Record,
    RecordError,
    machine_difference,
    name_order,
    parse_run_name,
    read_arm,
    read_arms,
    read_cell,
    read_json,
    read_record,
    read_runs,
    run_name,
    write_json,
    write_record,
)
from labkit.records.atomic_write import atomic_write


def a_record(**changes) -> Record:
    metric = Metric("dispatch_us", "us", "lower", True, (1.5, 2.0))
    case = CaseRecord("decode", None, (metric,), {"kind": "array", "digest": "ab"}, {"n": 1})
    facts = {
        "arm": "seq_map",
        "role": "arm",
        "block": 1,
        "position": 2,
        "seed": 3,
        "outcome": "ok",
        "started": "2026-11-20T20:00:00Z",
        "seconds": {"measure": 1.0},
        "counters": {"engine.paged": 2.0},
        "cases": (case, CaseRecord("long", "its pool exceeds the limit")),
    }
    return Record(**{**facts, **changes})


def written(tmp_path, **changes):
    record = a_record(**changes)
    path = tmp_path / f"{record.run}.json"
    write_record(path, record)
    return path, record


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested more than 100 levels"),
        ('{"a":' * 101 + "1" + "}" * 101, "nested more than 100 levels"),
        ("1" * 400, r"a number above 1\.8e\+308"),
        ("[-1e999]", r"a number above 1\.8e\+308"),
        ("2" * 5000, "not valid JSON"),
        (
            '[{"a": 1}, "' + "[" * 200 + '", 1.5e22, "e999", "' + "3" * 400 + '", 1e-320, true]',
            None,
        ),
    ],
)
def test_values_that_nobody_can_compute_with_are_one_line(tmp_path, value, reason):
    path = tmp_path / "a.json"
    path.write_text(f'{{"schema_version":1,"x":{value}}}')
    if reason is None:
        assert len(read_json(path)["x"]) == 7
        return
    with pytest.raises(RecordError, match=rf"a\.json (is|has) {reason}") as caught:
        read_json(path)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_a_written_record_is_read_back(tmp_path):
    path, record = written(tmp_path)
    assert read_record(path) == record
    assert list(tmp_path.iterdir()) == [path]


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(1 / 3)
@example(322.61234567890123)
@example(5e-324)
def test_numbers_are_read_back_to_the_last_bit(value):
    """Reports rebuild every digit from records: six digits, or float32, would move them."""
    case = CaseRecord(
        "x", metrics=(Metric("m", "us", "lower", True, (value,)),), notes={"n": value}
    )
    numbers = {"counters": {"c": value}, "seconds": {"s": value}, "probe": {"before": {"a": value}}}
    with tempfile.TemporaryDirectory() as folder:
        path, record = written(Path(folder), cases=(case,), **numbers)
        again = read_record(path)
    assert again == record and repr(again) == repr(record)


def test_a_key_of_a_later_version_is_kept(tmp_path):
    path, _ = written(tmp_path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "energy_j": 12.5}))
    again = read_record(path)
    assert again.extra == {"energy_j": 12.5}
    path.unlink()
    write_record(path, again)
    assert json.loads(path.read_text())["energy_j"] == 12.5


def test_every_truncated_file_is_refused_with_its_name(tmp_path):
    path, _ = written(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole.rstrip()), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(RecordError, match=path.name) as error:
            read_record(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema version 2, but this labkit reads 1"),
        ({"schema_version": None}, "schema version None"),
        ({"run": "b00-p00-other"}, "run is 'b00-p00-other'"),
        ({"arm": "other", "run": "b01-p02-other"}, "holds run b01-p02-other"),
        ({"outcome": "great"}, "outcome 'great'"),
        ({"outcome": "crashed"}, "needs a detail"),
        ({"role": "king"}, "role 'king'"),
        ({"block": "1"}, "block is '1', not of type int"),
        ({"block": True}, "block is True"),
        ({"cases": {}}, "cases is {}"),
        ({"cases": [3]}, "a case is not an object"),
        ({"counters": None}, "counters is None"),
    ],
)
def test_an_invalid_record_is_refused(tmp_path, change, message):
    path, _ = written(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RecordError, match=message) as error:
        read_record(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"benchmarks": []}', "\x00\x01", ""])
def test_a_file_that_is_no_record_is_refused(tmp_path, text):
    path = tmp_path / "b00-p00-a.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"b00-p00-a\.json"):
        read_record(path)
    path.unlink()
    with pytest.raises(RecordError, match="No such file"):
        read_record(path)


@pytest.mark.parametrize(
    "repeats", ["[NaN]", "[Infinity]", "[-Infinity]", "[1e999]", "[]", "[true]"]
)
def test_a_metric_that_is_not_a_number_is_refused(tmp_path, repeats):
    path, _ = written(tmp_path)
    path.write_text(path.read_text().replace("[1.5, 2.0]", repeats))
    with pytest.raises(RecordError):
        read_record(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_not_written(tmp_path, value):
    with pytest.raises(ValueError, match="finite"):
        Metric("m", "us", "lower", True, (value,))
    with pytest.raises(ValueError, match="JSON"):
        written(tmp_path, counters={"x": value})
    assert not list(tmp_path.iterdir())


def test_a_record_is_never_overwritten(tmp_path):
    path, record = written(tmp_path)
    with pytest.raises(RecordError, match="never overwritten"):
        write_record(path, a_record(seed=99))
    assert read_record(path) == record
    with pytest.raises(RecordError, match="the file of run b01-p02-seq_map must be"):
        write_record(tmp_path / "b09-p09-seq_map.json", record)


def test_a_full_disk_leaves_no_partial_record(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            written(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_failed_rename_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "cell.json"
    write_json(path, {"schema_version": 1, "n": 1})
    old = path.read_bytes()

    def fail(*names):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_json(path, {"schema_version": 1, "n": 2})
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_only_runs_are_read_in_order(tmp_path):
    runs = tmp_path / "runs"
    for folder in (runs, runs / "pending", runs / "abandoned"):
        folder.mkdir(exist_ok=True)
    order = [(0, 0), (0, 1), (0, 99), (0, 100), (10, 0), (99, 0), (100, 0)]  # not by name
    for block, position in reversed(order):
        record = a_record(block=block, position=position)
        write_record(runs / f"{record.run}.json", record)
    (runs / "abandoned" / "b00-p00-seq_map.json").write_text("{}")
    (runs / "pending" / "b00-p00-seq_map.json").write_text("{}")
    (runs / ".b00-p02-seq_map.json.1.tmp").write_text("{")
    (runs / "b00-p00-seq_map.log").write_text("")
    assert [(r.block, r.position) for r in read_runs(tmp_path)] == order
    (runs / "notes.json").write_text('{"schema_version": 1}')
    with pytest.raises(RecordError, match=r"notes\.json"):
        read_runs(tmp_path)


def test_names_are_sorted_by_the_size_of_their_numbers():
    names = ["b16", "b2", "rate=2.5", "rate=2", "rate=10", "b1", "a"]
    expected = ["a", "b1", "b2", "b16", "rate=2", "rate=2.5", "rate=10"]
    assert sorted(names, key=name_order) == expected


def test_arms_are_read_baseline_first_control_last(tmp_path):
    (tmp_path / "arms").mkdir()
    for name, role in (
        ("zeta", "baseline"),
        ("control", "control"),
        ("b10", "arm"),
        ("b9", "arm"),
        ("a", "arm"),
    ):
        arm = Arm(name, role, {"engine.blas": "stock"}, {"seed": 1}, "tokens", ("x.y",))
        write_json(tmp_path / "arms" / f"{name}.json", arm.to_json())
        assert read_arm(tmp_path / "arms" / f"{name}.json") == arm
    assert [arm.name for arm in read_arms(tmp_path)] == ["zeta", "a", "b9", "b10", "control"]
    (tmp_path / "arms" / "a.json").rename(tmp_path / "arms" / "c.json")
    with pytest.raises(RecordError, match=r"c\.json.*describes arm a"):
        read_arms(tmp_path)


def test_a_cell_without_its_design_is_refused(tmp_path):
    write_json(tmp_path / "cell.json", {"schema_version": 1, "arms": []})
    with pytest.raises(RecordError, match="design is missing"):
        read_cell(tmp_path)


@pytest.mark.parametrize("rows", [[None], [{"comparisons": [3]}]])
def test_a_cell_whose_rows_are_no_objects_is_refused(tmp_path, rows):
    cell = {"schema_version": 1, "arms": [], "design": {}, "rows": rows}
    write_json(tmp_path / "cell.json", cell)
    with pytest.raises(RecordError, match=r"cell\.json is not a valid cell: "):
        read_cell(tmp_path)


def test_an_older_cell_has_todays_verdicts(tmp_path):
    rows = [{"comparisons": [{"verdict": word} for word in ("faster", "slower", "trivial")]}]
    cell = {"schema_version": 1, "arms": [], "design": {}, "rows": rows}
    write_json(tmp_path / "cell.json", cell)
    (row,) = read_cell(tmp_path)["rows"]
    assert [one["verdict"] for one in row["comparisons"]] == ["better", "worse", "trivial"]


@given(
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.from_regex(r"[A-Za-z0-9_][\w.-]*", fullmatch=True),
)
def test_run_names_round_trip(block, position, arm):
    assert parse_run_name(run_name(block, position, arm)) == (block, position, arm)


@pytest.mark.parametrize("name", ["", "b00", "b0-p0-a", "b00-p00-", "b00-p00-a/b", "x00-p00-a"])
def test_other_names_are_refused(name):
    with pytest.raises(RecordError):
        parse_run_name(name)


@pytest.mark.parametrize(
    ("config", "counter"),
    [
        ({"engine": {"name": "paged"}}, "engine.paged"),
        ({"engine": {"name": "my.package:Engine"}}, "engine.Engine"),
        ({"engine": {}}, None),
        ({}, None),
    ],
)
def test_an_arm_claims_its_engine_by_name_or_class(config, counter):
    assert Arm("base", "baseline", {}, config).engine_counter == counter


def test_the_same_machine_is_recognised_without_the_host_s_name():
    mine = {"cpu_model": "one", "cores": 2, "memory_bytes": 24 << 30, "os": "Linux", "host": "a"}
    assert machine_difference(mine, {**mine, "host": "another", "os_release": "newer"}) is None
    nearly = {**mine, "memory_bytes": mine["memory_bytes"] + 4096}
    assert machine_difference(mine, nearly) is None
    for field, value in (
        ("cpu_model", "other"),
        ("cores", 999),
        ("memory_bytes", mine["memory_bytes"] * 2),
        ("os", "Plan 9"),
        ("accelerator", "a big one"),
    ):
        changed = {**mine, field: value}
        assert machine_difference(mine, changed) == field


def test_no_link_is_followed_when_a_file_is_written(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "a.json").symlink_to(tmp_path / "mine")
    write_json(tmp_path / "a.json", {})
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "a.json").is_symlink()


def test_two_that_write_a_file_at_once_each_write_a_whole_one(tmp_path):
    """Even if their processes have equal numbers, as in two containers."""
    path = tmp_path / "a.txt"
    with atomic_write(path) as one:
        one.write_text("one")
        with atomic_write(path) as other:
            other.write_text("other")
        assert path.read_text() == "other" and one.read_text() == "one"
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_names_the_file(tmp_path):
    path = tmp_path / "table.tex"
    with pytest.raises(OSError, match=r"No space: '.*table\.tex'"), atomic_write(path):
        raise OSError(28, "No space")
    assert not any(tmp_path.iterdir())
    with pytest.raises(OSError, match=r"No such .*: '.*absent/t\.zip'"):
        write_json(tmp_path / "absent" / "t.zip", {})
