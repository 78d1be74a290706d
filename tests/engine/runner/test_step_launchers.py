"""Launchers of steps: the wait is counted, and a closed one refuses every step."""

from types import SimpleNamespace

import pytest

from labkit.engine import EngineError
from labkit.engine.engine_protocol import Counters
from labkit.engine.runner import step_launchers
from labkit.engine.runner.step_launchers import LazyStepLauncher, ThreadStepLauncher


def test_the_wait_for_a_step_is_counted_in_milliseconds(monkeypatch):
    times = iter([10.0, 10.25])
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr(step_launchers, "time", clock)
    counters = Counters()
    launcher = ThreadStepLauncher(lambda batch: batch, counters)
    assert launcher.launch("logits")() == "logits"
    assert counters.as_dict()["pipeline.wait_ms"] == 250
    launcher.close()


@pytest.mark.parametrize("kind", [ThreadStepLauncher, LazyStepLauncher])
def test_a_closed_launcher_refuses_every_step(kind):
    launcher = kind(SimpleNamespace(launch=lambda batch: lambda: batch), Counters())
    launcher.close()
    with pytest.raises(EngineError, match=r"^the engine is closed$"):
        launcher.launch("batch")
