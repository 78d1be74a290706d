"""Three mistakes in published benchmarks of servers, each reproduced and then avoided.

What reproduces a trap asks one server twice; labkit asks a fresh one, warmed up by other prompts.
"""

from pathlib import Path

import pytest

from labkit import config
from labkit.engine import openai

STUB = Path(__file__).with_name("stub_server.py")
PROMPTS = ((300, 301, 302), (303, 304, 305), (306, 307, 308))
LONG = tuple(range(260, 500)) * 3


@pytest.fixture
def fresh(tiny_dir):
    """Return a function from modes to an engine with a newly started server of its own."""
    opened = []

    def make(*modes):
        command = f"{{python}} {STUB} --port {{port}} {' '.join(modes)}"
        server = config.OpenAIServer(preset="other", command=command, start_timeout_s=60)
        opened.append(openai.create(config.Engine(name="openai", server=server), tiny_dir))
        opened[-1].reset_counters()
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def tpot(entries):
    """Return the shortest time per token: a busy machine only lengthens it."""
    return min(entry.tpot for entry in entries)


def test_a_running_server_has_cached_the_same_prompts(opponent, fresh, run_load, ask):
    """Repeated prompts hit the prefix cache; a fresh server has none."""
    running, _ = opponent("prefix_cache")
    first, second = (tpot(run_load(running, ask(*PROMPTS, tokens=3), 1).entries) for _ in range(2))
    assert second < 0.5 * first and running.counters()["tokens.cached"] > 0
    engine = fresh("prefix_cache")
    assert tpot(run_load(engine, ask(*PROMPTS, tokens=3), 1).entries) > 2 * second
    assert engine.counters()["tokens.cached"] == 0
    assert engine.notes["server"]["kept"] is None


def test_a_running_server_is_slow_after_a_long_test(opponent, fresh, run_load, ask):
    """If a long prompt slows a server for ever, the result depends on the order of tests."""
    running, _ = opponent("carries_over")
    before = tpot(run_load(running, ask(*PROMPTS, tokens=3)).entries)
    run_load(running, ask(LONG, tokens=2))
    after = tpot(run_load(running, ask(*PROMPTS, tokens=3)).entries)
    assert after > 2 * before
    engine = fresh("carries_over")
    run_load(engine, ask(LONG, tokens=2))
    engine.close()
    assert tpot(run_load(fresh("carries_over"), ask(*PROMPTS, tokens=3)).entries) < 0.5 * after


def test_a_first_chunk_without_a_token_is_not_the_first_token(opponent, run_load, ask):
    engine, _ = opponent("role_first", api=config.Api.chat)
    (entry,) = run_load(engine, ask(PROMPTS[0])).entries
    assert entry.ttft > 0.15  # the stub waits for so long after the role
    assert len(entry.chunk_times) == 6 and engine.counters()["stream.empty"] == 1
    assert engine.counters()["stream.chunks"] == 6
