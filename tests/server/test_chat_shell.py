"""The prompt in the terminal."""

import io
import os
import re
import signal
import subprocess
import sys

import pytest
from engines import Engine, Words

from labkit.server.chat_shell import Shell


def talk(lines, engine=None, max_tokens=5, template=None):
    """Type lines; return what the shell says. A line may be an exception."""
    typed, out = iter(lines), io.StringIO()

    def read(prompt):
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        out.write(f"{prompt}{line}\n")
        return line

    words = Words()
    words.template = template
    Shell(engine or Engine(), words, max_tokens, out=out, read=read).run()
    return out.getvalue()


def test_an_answer_and_its_rate():
    said = talk(["hello"])
    assert "> hello\naaaaa\n[5 tokens, the first after" in said and "tok/s]" in said


def test_the_conversation_goes_on_until_it_begins_anew():
    asked = []

    class Chatty(Words):
        template = object()

        def encode_chat(self, messages):
            asked.append([message["content"] for message in messages])
            return [1]

    typed, out = iter(["one", "two", "/new", "three"]), io.StringIO()

    def read(prompt):
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    Shell(Engine(), Chatty(), 3, out=out, read=read).run()
    assert asked == [["one"], ["one", "aaa", "two"], ["three"]]


def test_ctrl_c_stops_the_answer_and_no_more(monkeypatch):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        engine = Engine()
        steps = []

        def before():
            steps.append(1)
            if len(steps) == 3:
                signal.raise_signal(signal.SIGINT)

        engine.before_step = before
        said = talk(["hello", "again"], engine, max_tokens=5)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "aa\n[stopped, 2 tokens" in said
    assert engine.aborted[0] == "shell-0" and "aaaaa\n[5 tokens" in said


def test_ctrl_c_at_the_prompt_ends_nothing():
    said = talk([KeyboardInterrupt(), "hello"])
    assert "(ctrl-D ends)" in said and "aaaaa" in said


def test_the_command_talks_through_a_pipe(chat_model):
    command = [sys.executable, "-m", "labkit.serve", "shell=true", "model=local"]
    command += [f"model.path={chat_model}", "server.max_output_tokens=4"]
    found = subprocess.run(
        command, input="hello\nagain\n", capture_output=True, text=True, timeout=600,
        env=dict(os.environ),
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert (
        len(re.findall(r"\[4 tokens, the first after [\d.]+ s, [\d.]+ tok/s\]", found.stdout)) == 2
    )


def test_what_only_a_server_has_is_refused():
    from labkit.config import ConfigError, Model, ModelShape, Serve, Server

    with pytest.raises(ConfigError, match=r"server\.port=9: shell=true starts no server"):
        Serve(model=Model(shape=ModelShape()), server=Server(port=9), shell=True)
