"""The file of traced steps: small, complete, and refused in one line if it is not what it was."""

import copy
import gzip
import hashlib
import json

import pytest
from traced_steps import traced_steps

from labkit.records import RecordError, read_step_trace, step_counts, write_step_trace
from labkit.records import step_trace_file as module


@pytest.fixture(scope="module")
def trace():
    return traced_steps()


def test_what_is_read_is_what_was_written(trace, tmp_path):
    note = write_step_trace(tmp_path, trace)
    path = tmp_path / note["file"]
    assert read_step_trace(tmp_path, note) == {"schema_version": 1, **trace}
    assert hashlib.sha256(path.read_bytes()).hexdigest() == note["sha256"] in note["file"]
    assert note["bytes"] == path.stat().st_size < len(json.dumps(trace)) / 4
    assert note["steps"] == note["steps_total"] == len(trace["steps"])
    assert step_counts(trace) == {"steps": note["steps"], "steps_total": note["steps_total"]}
    assert write_step_trace(tmp_path, trace) == note  # the same bytes, hence the same name
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def stored(folder, content):
    digest = hashlib.sha256(content).hexdigest()
    (folder / "traces").mkdir(exist_ok=True)
    (folder / "traces" / f"{digest}.json.gz").write_bytes(content)
    return {"file": f"traces/{digest}.json.gz", "sha256": digest}


def refusal(folder, note):
    with pytest.raises(RecordError) as refused:
        read_step_trace(folder, note)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_files_that_are_cut_edited_missing_or_elsewhere_are_refused(trace, tmp_path, monkeypatch):
    note = write_step_trace(tmp_path, trace)
    path = tmp_path / note["file"]
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert "was edited after it was written" in refusal(tmp_path, note)
    path.unlink()
    assert "No such file" in refusal(tmp_path, note)
    for digest in ("../../passwd", "", None, "0" * 63 + "g"):
        assert "names no trace's SHA-256" in refusal(tmp_path, {"sha256": digest})
    assert "it is truncated" in refusal(tmp_path, stored(tmp_path, content[: len(content) // 2]))
    assert "not a valid trace" in refusal(tmp_path, stored(tmp_path, b"no gzip at all"))
    assert "not a valid trace" in refusal(tmp_path, stored(tmp_path, gzip.compress(b"[1")))
    monkeypatch.setattr(module, "MAX_TRACE_BYTES", 1 << 10)
    bomb = stored(tmp_path, gzip.compress(b" " * (1 << 20)))
    assert "more than 0 MiB" in refusal(tmp_path, bomb)


def change(path, value):
    def apply(data):
        *keys, last = path
        for key in keys:
            data = data[key]
        data[last] = value

    return apply


WRONG = {
    "schema": change(["schema_version"], 2),
    "no steps": lambda data: data.pop("steps"),
    "no object": lambda data: data["steps"].append([]),
    "request": change(["steps", 1, "chunks", 0, 0], 99),
    "negative": change(["steps", 1, "chunks", 0, 1], -1),
    "fraction": change(["steps", 1, "padding"], 0.5),
    "short chunk": lambda data: data["steps"][1]["chunks"][0].pop(),
    "block": change(["steps", 0, "blocks", 0, 2], [14]),
    "text": change(["steps", 0, "cu_seqlens_q"], ["<img>"]),
    "time": change(["steps", 0, "times_us", "schedule"], [0, "1"]),
    "part": change(["steps", 0, "times_us", "<b>"], [0, 1]),
    "id": change(["requests", 0, "id"], 5),
    **{
        f"{key} {value}": change([key], value)
        for key in ("block_size", "num_blocks", "token_bytes", "steps_total")
        for value in (-1, 0.5, "8", True)
    },
    "no token_bytes": change(["token_bytes"], None),
    "prompt": change(["requests", 0, "prompt_tokens"], -1),
    "lingering": change(["steps", 0, "lingering"], [12]),
}


@pytest.mark.parametrize("what", WRONG)
def test_values_that_no_trace_has_are_refused(what, trace, tmp_path):
    data = copy.deepcopy({"schema_version": 1, **trace})
    content = gzip.compress(json.dumps(data).encode())
    read_step_trace(tmp_path, stored(tmp_path, content))
    WRONG[what](data)
    note = stored(tmp_path, gzip.compress(json.dumps(data).encode()))
    assert "is not a valid trace: " in refusal(tmp_path, note)
