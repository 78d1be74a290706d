"""Launchers: the time in which the host only waits for a step."""

from types import SimpleNamespace

from labkit.engine.engine_protocol import Counters
from labkit.engine.runner import step_launcher
from labkit.engine.runner.step_launcher import ThreadStepLauncher


def test_the_wait_for_a_step_is_counted_in_milliseconds(monkeypatch):
    times = iter([10.0, 10.25])
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr(step_launcher, "time", clock)
    counters = Counters()
    launcher = ThreadStepLauncher(lambda batch: batch, counters)
    assert launcher.launch("logits")() == "logits"
    assert counters.as_dict()["pipeline.wait_ms"] == 250
    launcher.close()
