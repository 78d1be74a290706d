"""Digests of records and arms: an edited file is refused, and an unlisted one is counted."""

import json
import shutil
import subprocess

import pytest

from labkit.records import (
    DIGESTS_FILE,
    Arm,
    CaseRecord,
    Metric,
    Record,
    RecordError,
    publish_arm,
    publish_records,
    read_arms,
    read_digests,
    read_runs,
    record_digests,
    unlisted_records,
    write_record,
)


def make_record(position=0, value=100.0):
    metrics = (Metric("dispatch_us", "us", "lower", True, (value,)),)
    case = CaseRecord("decode", metrics=metrics)
    return Record("base", "baseline", 0, position, 1, "ok", "2026-11-24T00:00:00Z", cases=(case,))


@pytest.fixture
def cell_dir(tmp_path):
    """Return a cell with one arm and two records, all with digests."""
    for folder in ("arms", "runs"):
        (tmp_path / folder).mkdir()
    publish_arm(tmp_path, Arm("base", "baseline", {}, {"seed": 1}))
    for position in (0, 1):
        publish_records(tmp_path, make_record(position))
    return tmp_path


def test_published_files_are_listed_and_read(cell_dir):
    assert sorted(read_digests(cell_dir)) == [
        "arms/base.json",
        "runs/b00-p00-base.json",
        "runs/b00-p01-base.json",
    ]
    assert len(read_runs(cell_dir)) == 2 and len(read_arms(cell_dir)) == 1
    assert unlisted_records(cell_dir) == 0


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="no sha256sum on this machine")
def test_sha256sum_reads_the_list(cell_dir):
    command = ["sha256sum", "--strict", "--quiet", "-c", DIGESTS_FILE]
    assert subprocess.run(command, cwd=cell_dir).returncode == 0
    (cell_dir / "runs" / "b00-p01-base.json").write_text("{}")
    assert subprocess.run(command, cwd=cell_dir, capture_output=True).returncode == 1


def test_a_doubled_number_is_refused_by_name(cell_dir):
    path = cell_dir / "runs" / "b00-p01-base.json"
    data = json.loads(path.read_text())
    data["cases"][0]["metrics"][0]["repeats"] = [200.0]
    path.write_text(json.dumps(data) + "\n")
    with pytest.raises(RecordError, match=r"b00-p01-base\.json was edited after it was") as error:
        read_runs(cell_dir)
    assert "\n" not in str(error.value) and "command again" in str(error.value)


def test_an_edited_arm_is_refused_by_name(cell_dir):
    path = cell_dir / "arms" / "base.json"
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 2'))
    with pytest.raises(RecordError, match=r"base\.json was edited after it was written") as error:
        read_arms(cell_dir)
    assert str(error.value).endswith("restore it from a copy")  # no run repairs an arm


def test_records_without_a_digest_are_read_and_counted(cell_dir):
    record = make_record(position=2)
    write_record(cell_dir / "runs" / f"{record.run}.json", record)
    assert len(read_runs(cell_dir)) == 3 and unlisted_records(cell_dir) == 1
    (cell_dir / DIGESTS_FILE).unlink()
    assert len(read_runs(cell_dir)) == 3 and unlisted_records(cell_dir) == 3


def test_records_that_are_published_together_need_one_list(cell_dir, monkeypatch):
    """Reading and writing the list for each of thousands of imported runs takes minutes."""
    read: list = []
    monkeypatch.setattr(
        record_digests, "read_digests", lambda cell: read.append(cell) or read_digests(cell)
    )
    publish_records(cell_dir, make_record(2), make_record(3))
    assert len(read) == 1 and len(read_digests(cell_dir)) == 5
    assert len(read_runs(cell_dir)) == 4 and unlisted_records(cell_dir) == 0


def test_a_published_record_is_never_overwritten(cell_dir):
    before = read_digests(cell_dir)
    with pytest.raises(RecordError, match="records are never overwritten"):
        publish_records(cell_dir, make_record(value=1.0))
    assert read_digests(cell_dir) == before


@pytest.mark.parametrize("line", [b"abc  runs/x.json\n", b"0" * 64 + b"\n", b"\xff\n"])
def test_a_broken_list_is_one_line(cell_dir, line):
    path = cell_dir / DIGESTS_FILE
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(RecordError, match=DIGESTS_FILE) as error:
        read_runs(cell_dir)
    assert "\n" not in str(error.value)
