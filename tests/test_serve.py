"""Tests of ``python -m labkit.serve``: an invalid command is one line and exit code 2."""

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from labkit import config, serve
from labkit.config import Attention, Engine, ServeConfig, from_plain, to_plain
from labkit.engine import engine_factory
from labkit.engine.engine_protocol import EngineError
from labkit.engine.kv_cache_interface import KVCacheFactory
from labkit.engine.parallel.rank_messages import RankFailure
from labkit.engine.user_classes import UserClassError
from labkit.server import __main__ as server


def test_overrides_compose_a_config():
    options = serve.compose(["model=small", "engine=mlx_lm", "server.port=0", "server.grace_s=2"])
    assert (options.model.name, options.engine.name) == ("small", "mlx_lm")
    assert (options.server.port, options.server.grace_s, options.server.host) == (
        0,
        2.0,
        "127.0.0.1",
    )
    assert from_plain(ServeConfig, json.loads(json.dumps(to_plain(options)))) == options


def test_options_are_read_as_those_of_a_study():
    options = serve.compose([
        "server.api_key=12e3", "model=local", "model.path=/d/model (1).gguf",
        "engine.memory_limit=4GiB", "server.timeout_s=5m", "+engine/kv=float16",
    ])  # fmt: skip
    assert (options.server.api_key, options.model.path) == ("12e3", "/d/model (1).gguf")
    assert (options.engine.memory_limit, options.server.timeout_s) == (4 << 30, 300.0)
    assert options.engine.kv.dtype.value == "float16"


def test_the_api_key_can_come_from_an_environment_variable(monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_KEY", "sesame")
    options = serve.compose(["server.api_key=${oc.env:LABKIT_TEST_KEY}"])
    assert options.server.api_key == "sesame"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tiny"], "tiny: not an override; write key=value"),
        (["model=tinny"], "model=tinny: no such model (did you mean 'tiny'?)"),
        (["server.prt=1"], "server.prt=1: no option 'prt' (did you mean 'port'?)"),
        (["+colour=red"], "colour: no such option"),
        (["server.port=65536"], "server.port=65536: must be 0 to 65535"),
        (["server.port=x"], "server.port=x: must be an integer: 0 to 65535"),
        (["server.timeout_s=0"], "server.timeout_s=0.0: must be above 0 (seconds)"),
        (["server.timeout_s=inf"], "server.timeout_s=inf: must be a finite number"),
        (["server.stuck_s=nan"], "server.stuck_s=nan: must be a finite number"),
        (["server.port=inf"], "server.port=inf: must be an integer: 0 to 65535"),
        (["server.api_key=' '"], "server.api_key: must be printable ASCII"),
        (["server.host=''"], "server.host: must be an address"),
        (["server.hosts=http://a.example"], "server.hosts=http://a.example: must be names"),
        (["server.hosts=a.example:80"], "server.hosts=a.example:80: must be names"),
        (["model=local"], "model=local: set model.path=PATH"),
        (["engine.attention.resolver=identity"], "resolver=identity: it handles decode only"),
        (["engine=openai"], "engine=openai: it forwards to another server"),
        (["shell=true", "server.port=1"], "server.port=1: shell=true starts no server"),
        (["shell=true", "server.api_key=sesame"], "server.api_key: shell=true starts no server"),
        (["--colour"], "unrecognized arguments: --colour; --help"),
    ],
)
def test_an_invalid_command_is_one_line(overrides, message, capsys, monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("it would serve"))
    try:
        status = serve.main(overrides)
    except SystemExit as exit_error:  # raised by argparse
        status = exit_error.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == ""
    assert "sesame" not in captured.err
    assert message in captured.err and captured.err.count("\n") == 1
    assert captured.err.startswith("labkit.serve: ")


def test_help_lists_every_option(capsys):
    with pytest.raises(SystemExit) as exit_info:
        serve.main(["--help"])
    help_text = capsys.readouterr().out
    assert exit_info.value.code == 0
    for name in config.option.options(config.Server):
        assert f"server.{name}=" in help_text
    assert "engine.kv.block_size=" in help_text and "shell=false" in help_text


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("it would serve"))
    monkeypatch.setattr(serve, "REQUIRED_PACKAGES", ("starlette", "no_such_package"))
    assert serve.main([]) == 2
    says = "not installed: no_such_package; run: pip install 'mlx-labkit"
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("given", "arenas"), [(None, "1"), ("4", "4")])
def test_the_servers_threads_share_one_heap(monkeypatch, given, arenas):
    """glibc does not give back what is free at the end of the others, up to 64 MB each."""
    environments = []
    monkeypatch.setattr(os, "execve", lambda *words: environments.append(words[2]))
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if given is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", given)
    serve.main([])
    (environment,) = environments
    assert environment["MALLOC_ARENA_MAX"] == arenas
    assert environment["TOKENIZERS_PARALLELISM"] == "false"


def run_command(*overrides):
    """Run the command; return its exit code, its output, and the last line of its stderr."""
    completed = subprocess.run(
        [sys.executable, "-m", "labkit.serve", *overrides],
        capture_output=True, text=True, timeout=600, env=dict(os.environ),
    )  # fmt: skip
    assert "Traceback" not in completed.stderr, completed.stderr
    return completed.returncode, completed.stdout, completed.stderr.splitlines()[-1]


def test_a_port_in_use_is_reported_before_the_model_loads():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert run_command("model=small", f"server.port={port}") == (
            2, "", f"labkit.serve: server.port={port}: Address already in use",
        )  # fmt: skip


def test_a_config_that_the_engine_refuses_is_one_line():
    code, _, message = run_command("model=tiny", "server.port=0", "engine.budget.bytes=1000",
                         "engine.budget.policy=fixed")  # fmt: skip
    assert code == 2 and message.startswith("labkit.serve: engine.budget")


STUCK = """
class Stuck:
    name = "stuck"

    def __init__(self, options, model_dir):
        pass

    def has_work(self):
        return True

    def step(self):
        return {}["gone"]

    def __getattr__(self, method):
        return lambda *arguments: None
"""


def test_an_own_engine_that_fails_at_the_warm_up_is_refused(tmp_path, monkeypatch):
    """It was a traceback."""
    (tmp_path / "own_stuck.py").write_text(STUCK)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = SimpleNamespace(path=tmp_path, vocab_size=64)
    line = r"^the engine cannot generate: engine.name=own_stuck:Stuck: step\(\) .*KeyError: 'gone'"
    with pytest.raises(EngineError, match=line):
        server._create_engine(Engine(name="own_stuck:Stuck"), model)


def of_a_rank(error):
    return RankFailure.from_exception(error).to_exception(1)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (of_a_rank(UserClassError("queue=a:B: key() failed", "a:B")),
         r"rank 1: UserClassError: queue=a:B: key\(\) failed"),
        (of_a_rank(RuntimeError("[ring] no\nsocket")), r"rank 1: \[ring\] no socket"),
        (MemoryError(), "MemoryError"),
    ],
)  # fmt: skip
def test_an_engine_that_fails_at_its_start_is_refused_in_one_line(monkeypatch, error, line):
    monkeypatch.setattr(engine_factory, "create", Mock(side_effect=error))
    with pytest.raises(EngineError, match=f"^the engine cannot generate: {line}$"):
        server._create_engine(Engine(), SimpleNamespace(path="none", vocab_size=64))


@pytest.mark.parametrize("option", ["backend", "resolver"])
def test_an_own_attention_that_cannot_be_created_is_refused(option):
    options = Engine(attention=Attention(**{option: "no_such_module:Mine"}))
    with pytest.raises(EngineError, match=f"{option}=no_such_module:Mine: ModuleNotFoundError"):
        KVCacheFactory(options)
