"""The memory timeline: when it samples, what it records, and its recorded cost."""

from labkit.engine.engine_protocol import KVBytes
from labkit.workload.requests import memory_timeline
from labkit.workload.requests.memory_timeline import MemoryTimeline
from labkit.workload.requests.serving_metrics import ServedRequest, request_notes


class Engine:
    """Admits one request per step and holds 100 bytes for each."""

    def __init__(self):
        self.running = []

    def is_running(self, request_id):
        return request_id in self.running

    def kv_bytes(self):
        return KVBytes(reserved=100 * len(self.running), used=10 * len(self.running))


def run(engine, count, step_s, steps, read=lambda: {"rss_bytes": 7}):
    watch = MemoryTimeline(engine, read)
    entries = [ServedRequest(f"r{i}", 3, submitted=1.0) for i in range(count)]
    for entry in entries:
        watch.submitted(entry)
    now = 1.0
    for step in range(steps):
        if step < count and hasattr(engine, "running"):
            engine.running.append(f"r{step}")
        watch.stepped(now, now + step_s)
        now += step_s
    return entries, watch.report()


def test_it_looks_at_most_five_times_a_second():
    _, report = run(Engine(), 2, 0.0625, 32)  # two seconds
    assert report["t_s"][0] == 0.062 and len(report["t_s"]) == 8
    gaps = [b - a for a, b in zip(report["t_s"], report["t_s"][1:], strict=False)]
    assert min(gaps) >= 0.2
    assert report["kv_reserved_bytes"] == [100] + [200] * 7
    assert report["kv_used_bytes"] == [10] + [20] * 7
    assert report["rss_bytes"] == [7] * 8
    assert 0 < report["cost_s"] < 1


def test_a_request_is_admitted_at_the_beginning_of_its_first_step():
    entries, _ = run(Engine(), 3, 0.5, 4)
    assert [entry.admitted for entry in entries] == [1.0, 1.5, 2.0]
    for entry in entries:
        entry.chunk_times, entry.tokens, entry.finish = [3.0], [1], "length"
    assert [n["admitted_ms"] for n in request_notes(entries)] == [0.0, 500.0, 1000.0]


def test_a_request_that_came_and_went_in_one_step_was_admitted_too():
    watch = MemoryTimeline(Engine(), dict)
    entry = ServedRequest("quick", 3, submitted=0.0)
    watch.submitted(entry)
    entry.chunk_times.append(0.5)
    watch.stepped(0.25, 0.5)
    assert entry.admitted == 0.25


def test_an_engine_that_cannot_be_looked_into_leaves_its_columns_out():
    entries, report = run(object(), 2, 1.0, 3)
    assert "kv_used_bytes" not in report and report["rss_bytes"] == [7] * 3
    assert entries[0].admitted is None
    entries[0].chunk_times, entries[0].tokens, entries[0].finish = [2.0], [1], "length"
    assert "admitted_ms" not in request_notes(entries[:1])[0]


def test_a_long_run_is_thinned_to_a_bounded_record(monkeypatch):
    monkeypatch.setattr(memory_timeline, "MAX_SAMPLES", 16)
    _, report = run(Engine(), 1, 0.25, 100)
    assert len(report["t_s"]) < 16 and report["period_s"] > 0.2
    assert report["t_s"][-1] > 20 and report["t_s"] == sorted(report["t_s"])


def test_the_memory_is_that_of_this_process():
    _, report = run(object(), 1, 1.0, 1, read=None)
    assert report["rss_bytes"][0] > 1 << 20
