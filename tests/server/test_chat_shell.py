"""Tests of the chat shell."""

import io
import json
import os
import re
import signal
import sys

import pytest
from fake_engine import CharTokenizer, FakeEngine

from labkit import serve
from labkit.config import to_plain
from labkit.server import __main__ as command
from labkit.server.chat_shell import Shell


def run_shell(lines, engine=None, max_tokens=5, template=None):
    """Type lines and return the shell's output; an exception as a line is raised."""
    typed, out = iter(lines), io.StringIO()

    def read(prompt):
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        out.write(f"{prompt}{line}\n")
        return line

    tokenizer = CharTokenizer()
    tokenizer.template = template
    Shell(engine or FakeEngine(), tokenizer, max_tokens, out=out, read=read).run()
    return out.getvalue()


def test_a_reply_is_followed_by_its_speed():
    output = run_shell(["hello"])
    assert "> hello\naaaaa\n[5 tokens, the first after" in output and "tok/s]" in output


def test_the_conversation_continues_until_new():
    prompts = []

    class ChatTokenizer(CharTokenizer):
        template = object()

        def encode_chat(self, messages):
            prompts.append([message["content"] for message in messages])
            return [1]

    typed, out = iter(["one", "two", "/new", "three"]), io.StringIO()

    def read(prompt):
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    Shell(FakeEngine(), ChatTokenizer(), 3, out=out, read=read).run()
    assert prompts == [["one"], ["one", "aaa", "two"], ["three"]]


def test_ctrl_c_stops_only_the_current_reply(monkeypatch):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        engine = FakeEngine()
        steps = []

        def interrupt_third_step():
            steps.append(1)
            if len(steps) == 3:
                signal.raise_signal(signal.SIGINT)

        engine.before_step = interrupt_third_step
        output = run_shell(["hello", "again"], engine, max_tokens=5)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "aa\n[stopped, 2 tokens" in output
    assert engine.aborted[0] == "shell-0" and "aaaaa\n[5 tokens" in output


def test_ctrl_c_at_the_prompt_does_not_exit():
    output = run_shell([KeyboardInterrupt(), "hello"])
    assert "(ctrl-D exits)" in output and "aaaaa" in output


def test_the_command_reads_lines_that_are_no_terminal_s(chat_model, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "configure_process", lambda engine: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n"))
    overrides = ["shell=true", "model=local", f"model.path={chat_model}"]
    options = serve.compose([*overrides, "server.max_output_tokens=4"])
    (tmp_path / "options").write_text(json.dumps(to_plain(options)))
    descriptor = os.open(tmp_path / "options", os.O_RDONLY)
    monkeypatch.setattr(sys, "argv", ["labkit.server", str(descriptor)])
    assert command.main() == 0
    replies = r"\[4 tokens, the first after [\d.]+ s, [\d.]+ tok/s\]"
    assert len(re.findall(replies, capsys.readouterr().out)) == 2


def test_a_server_whose_output_nobody_reads_ends_quietly(monkeypatch, tmp_path):
    def closed(options):
        raise BrokenPipeError

    monkeypatch.setattr(command, "serve", closed)
    (tmp_path / "options").write_text(json.dumps(to_plain(serve.compose([]))))
    descriptor = os.open(tmp_path / "options", os.O_RDONLY)
    monkeypatch.setattr(sys, "argv", ["labkit.server", str(descriptor)])
    with open(tmp_path / "out", "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert command.main() == 141


def test_server_options_are_refused_with_shell():
    from labkit.config import ConfigError, Model, ModelShape, ServeConfig, Server

    with pytest.raises(ConfigError, match=r"server\.port=9: shell=true starts no server"):
        ServeConfig(model=Model(shape=ModelShape()), server=Server(port=9), shell=True)
