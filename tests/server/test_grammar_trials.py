"""Processes that try grammars: limits, cancellation, cache, and what they leave behind."""

import asyncio
import dataclasses
import json
import os
import signal
import socket
import sys
import time

import psutil
import pytest
from in_process import post, run_scenario

from labkit import config
from labkit.server import killable_process_pool
from labkit.server.constraints import grammar_trial_worker
from labkit.server.constraints.grammar_compiler import (
    GrammarCompiler,
    GrammarError,
    GrammarSource,
)
from labkit.server.constraints.structured_output import Grammars
from labkit.server.types.api_error import ApiError

GOOD = GrammarSource("json_schema", '{"type": "object"}')
# The intersection of 20 patterns has 2**20 states.
PATTERNS = ", ".join(f'{{"pattern": ".*{letter}.*"}}' for letter in "abcdefghijklmnopqrst")
ENDLESS = GrammarSource("json_schema", f'{{"type": "string", "allOf": [{PATTERNS}]}}')


def children():
    """Return the running processes that this process started to try grammars."""
    return [child for child in psutil.Process().children() if tries_grammars(child)]


def tries_grammars(process):
    try:
        running = process.status() != psutil.STATUS_ZOMBIE
        return running and "grammar_trial_worker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it ended since it was listed
        return False


def run(scenario, chat_model, **limits):
    """Run ``scenario(processes)``; no process may be left behind."""
    limits = {"grammar_timeout_s": 60, "grammar_memory_bytes": 1 << 30, **limits}

    async def main():
        processes = Grammars(
            config.Server(**limits),
            GrammarCompiler(str(chat_model / "tokenizer.json"), 4096, [4095]),
        )
        assert children() == []  # they start when they are first needed
        try:
            await asyncio.wait_for(scenario(processes), 60)
        finally:
            await processes.close()
        await gone()

    asyncio.run(main())


async def gone(count=0):
    deadline = time.monotonic() + 20
    while len(children()) != count:
        assert time.monotonic() < deadline, children()
        await asyncio.sleep(0.01)


async def refusal(processes, source):
    with pytest.raises(GrammarError) as error_info:
        await processes.check(source)
    return str(error_info.value)


INVALID = {
    "an_unknown_type": '{"type": "colour"}',
    "no_json": "{",
    "too_deep": '{"items": ' * 200 + "{}" + "}" * 200,
    "endless_recursion": '{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}',
    "too_many_states": '{"type": "string", "pattern": "^(a{1000}){600}$"}',
}


def test_a_grammar_that_cannot_be_enforced_is_refused_in_one_short_line(chat_model):
    async def scenario(processes):
        await processes.check(GOOD)
        for name, text in INVALID.items():
            reason = await refusal(processes, GrammarSource("json_schema", text))
            assert reason and len(reason) < 300 and "\n" not in reason, name
            assert reason == await refusal(processes, GrammarSource("json_schema", text))
        await processes.check(GrammarSource("lark", 'start: "a" | "b"'))
        assert len(children()) == 1  # no grammar ended the process

    run(scenario, chat_model)


def answers(chat_model, eos_token, monkeypatch):
    """Return what the worker's process answers to a grammar."""
    monkeypatch.setattr(os, "nice", lambda niceness: 0)  # this process goes on as it was
    path = str(chat_model / "tokenizer.json")
    compiler = dataclasses.asdict(GrammarCompiler(path, 4096, [eos_token]))
    return grammar_trial_worker.prepare({"compiler": compiler})


def test_a_grammar_with_slow_masks_is_refused(chat_model, monkeypatch):
    answer = answers(chat_model, 4095, monkeypatch)
    monkeypatch.setattr(grammar_trial_worker, "MAX_MASK_CPU_S", 60.0)
    assert answer(dataclasses.asdict(GOOD)) is None
    monkeypatch.setattr(grammar_trial_worker, "MAX_MASK_CPU_S", 0.0)
    assert "masks take longer" in answer(dataclasses.asdict(GOOD))


def test_a_tokenizer_that_llguidance_refuses_is_the_answer_to_every_grammar(
    chat_model, monkeypatch
):
    answer = answers(chat_model, 100_000, monkeypatch)
    assert "the tokenizer: EOS token ID 100000 is out of range" in answer(dataclasses.asdict(GOOD))


async def answer_nothing(process, task):
    return None


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"grammar_timeout_s": 0.2}, "longer than 0.2 s"),
        ({"grammar_memory_bytes": 4 << 20}, "4194304 bytes"),
    ],
)
def test_a_limit_ends_the_process_and_the_next_grammar_starts_another(
    chat_model, limits, reason, monkeypatch
):
    async def scenario(processes):
        assert reason in await refusal(processes, ENDLESS)
        await gone()
        with monkeypatch.context() as patch:
            patch.setattr(killable_process_pool.TaskProcess, "answer", answer_nothing)
            if "grammar_memory_bytes" in limits:
                assert reason in await refusal(processes, ENDLESS)  # the result is cached
            else:
                await processes.check(ENDLESS)  # the time depends on what else runs
        await processes.check(GOOD)

    run(scenario, chat_model, **limits)


def test_a_client_that_leaves_ends_the_process(chat_model):
    async def scenario(processes):
        client = asyncio.create_task(processes.check(ENDLESS))
        await gone(1)
        await asyncio.sleep(0.3)
        client.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client
        await gone()
        await processes.check(GOOD)

    run(scenario, chat_model)


def test_a_busy_server_refuses_after_a_while_and_closing_ends_everything(chat_model, monkeypatch):
    monkeypatch.setattr(killable_process_pool, "WAIT_S", 0.1)

    async def scenario(processes):
        endless = [
            asyncio.create_task(processes.check(GrammarSource("json_schema", ENDLESS.text + space)))
            for space in (" ", "  ")
        ]
        await gone(2)
        with pytest.raises(ApiError, match="compiling other grammars") as error_info:
            await processes.check(GOOD)
        assert error_info.value.status == 429
        await processes.close()
        for error in await asyncio.gather(*endless, return_exceptions=True):
            assert isinstance(error, ApiError) and error.status == 503
        with pytest.raises(ApiError, match="stopping"):
            await processes.check(GOOD)

    run(scenario, chat_model)


def test_closing_ends_a_process_that_is_about_to_start(chat_model):
    async def scenario(processes):
        client = asyncio.create_task(processes.check(GOOD))
        await asyncio.sleep(0)
        await processes.close()
        with pytest.raises(ApiError, match="stopping"):
            await client

    run(scenario, chat_model)


def test_a_process_that_somebody_kills_is_replaced(chat_model):
    async def scenario(processes):
        await processes.check(GOOD)
        (child,) = children()
        child.kill()
        await gone()
        await asyncio.sleep(0.2)  # for asyncio to learn of it
        await processes.check(dataclasses.replace(GOOD, text=GOOD.text + " "))
        client = asyncio.create_task(processes.check(ENDLESS))
        await asyncio.sleep(0.3)
        (child,) = children()
        child.kill()
        with pytest.raises(GrammarError, match="llguidance failed"):
            await client
        assert len(processes._results) == 2  # the grammar may not be the reason

    run(scenario, chat_model)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_process_inherits_no_socket_and_no_signal_of_the_terminal(chat_model):
    async def scenario(processes):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            await processes.check(GOOD)
            (child,) = children()
            assert child.net_connections(kind="inet") == []
            assert psutil.Process().net_connections(kind="inet") != []
            assert os.getsid(child.pid) == child.pid != os.getsid(0)
            assert listening.fileno() > 0

    run(scenario, chat_model)


def test_the_server_stops_although_a_grammar_compiles(chat_model):
    schema = {"name": "x", "schema": json.loads(ENDLESS.text)}
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "a"}],
        "response_format": {"type": "json_schema", "json_schema": schema},
    }

    async def scenario(service, engine):
        left = asyncio.Event()
        leaving = asyncio.create_task(post(service, "/v1/chat/completions", body, left))
        await gone(1)
        left.set()
        assert await leaving == (200, b"")  # nobody reads it
        await gone()
        waiting = asyncio.create_task(post(service, "/v1/chat/completions", body))
        await gone(1)
        await service.stop(10.0)
        assert (await waiting)[0] == 503
        await gone()

    run_scenario(scenario, chat_model)


PARENT = """\
import asyncio
from labkit import config
from labkit.server.constraints.grammar_compiler import GrammarCompiler, GrammarSource
from labkit.server.constraints.structured_output import Grammars

async def main():
    options = config.Server(grammar_timeout_s=600, grammar_memory_bytes=1 << 40)
    processes = Grammars(options, GrammarCompiler({path!r}, 4096, [4095]))
    await processes.check({good!r})
    print(processes._pool._idle[0]._process.pid, flush=True)
    await processes.check({endless!r})

asyncio.run(main())
"""


def test_a_process_dies_with_its_parent(chat_model, tmp_path):
    script = tmp_path / "parent.py"
    path = str(chat_model / "tokenizer.json")
    script.write_text(PARENT.format(path=path, good=GOOD, endless=ENDLESS))

    async def main():
        parent = await asyncio.create_subprocess_exec(
            sys.executable, str(script), stdout=asyncio.subprocess.PIPE
        )
        child = psutil.Process(int(await parent.stdout.readline()))
        spent = sum(child.cpu_times()[:2])
        while sum(child.cpu_times()[:2]) < spent + 0.1:  # busy, so that it does not read its input
            await asyncio.sleep(0.02)
        parent.send_signal(signal.SIGKILL)
        await parent.communicate()
        await asyncio.to_thread(psutil.wait_procs, [child], 10)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    asyncio.run(main())
