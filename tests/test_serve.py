"""The server's door: every mistake is one line and exit code 2, found before anything is loaded."""

import json
import os
import socket
import subprocess
import sys

import pytest

from labkit import config, serve
from labkit.config import ConfigError, Serve, from_plain, to_plain


def test_a_command_becomes_a_checked_config():
    asked = serve.compose(["model=small", "engine=mlx_lm", "server.port=0", "server.grace_s=2"])
    assert (asked.model.name, asked.engine.name) == ("small", "mlx_lm")
    assert (asked.server.port, asked.server.grace_s, asked.server.host) == (0, 2.0, "127.0.0.1")
    assert from_plain(Serve, json.loads(json.dumps(to_plain(asked)))) == asked


def test_a_key_comes_from_a_variable(monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_KEY", "sesame")
    asked = serve.compose(["server.api_key=${oc.env:LABKIT_TEST_KEY}"])
    assert asked.server.api_key == "sesame"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny"], "tiny: not an override; write key=value"),
        (["model=tinny"], "model=tinny: no such model (did you mean 'tiny'?)"),
        (["server.prt=1"], "server.prt=1: no option 'prt' (did you mean 'port'?)"),
        (["+colour=red"], "colour: no such option"),
        (["server.port=65536"], "server.port=65536: allowed are 0 to 65535"),
        (["server.port=x"], "server.port=x: must be of type integer; allowed are 0 to 65535"),
        (["server.timeout_s=0"], "server.timeout_s=0.0: allowed are above 0 (seconds)"),
        (["server.api_key=' '"], "server.api_key: allowed are printable ASCII characters"),
        (["server.host=''"], "server.host: must be an address"),
        (["model=local"], "model=local: set model.path=PATH"),
        (["engine.attention.resolver=identity"], "resolver=identity: it serves pure decode only"),
        (["engine=openai"], "engine=openai: it forwards to another server"),
        (["shell=true", "server.port=1"], "server.port=1: shell=true starts no server"),
        (["--colour"], "unrecognized arguments: --colour; --help"),
    ],
)
def test_a_mistake_is_one_line(words, said, capsys, monkeypatch):
    monkeypatch.setattr(serve, "become_server", lambda asked: pytest.fail("it would serve"))
    try:
        status = serve.main(words)
    except SystemExit as ended:  # argparse's own
        status = ended.code
    out = capsys.readouterr()
    assert status == 2 and out.out == ""
    assert said in out.err and out.err.count("\n") == 1 and out.err.startswith("labkit.serve: ")


def test_help_says_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        serve.main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    for name in config.option.options(config.Server):
        assert f"server.{name}=" in said
    assert "engine.kv.block_size=" in said and "shell=false" in said


def test_without_the_extra_one_line_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(serve, "REQUIRED_PACKAGES", ("fastapi", "no_such_package"))
    with pytest.raises(ConfigError, match=r"no_such_package not installed: pip install 'labkit"):
        serve.become_server(serve.compose([]))


def started(*words):
    """Run the command to its end; return the exit code, its output and what it said last."""
    done = subprocess.run(
        [sys.executable, "-m", "labkit.serve", *words],
        capture_output=True, text=True, timeout=600, env=dict(os.environ),
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr.splitlines()[-1]


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert started("model=small", f"server.port={port}") == (
            2, "", f"labkit.serve: server.port={port}: Address already in use",
        )  # fmt: skip


def test_what_the_engine_refuses_is_one_line():
    code, _, said = started("model=tiny", "server.port=0", "engine.budget.bytes=1000",
                         "engine.budget.policy=fixed")  # fmt: skip
    assert code == 2 and said.startswith("labkit.serve: engine.budget")
