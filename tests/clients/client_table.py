"""Third-party clients of the server, each in an environment of its own, and the table of results.

    python tests/clients/client_table.py [--only NAME,...] [--write]

Starts ``labkit.serve`` on smollm2, with a chat template that supports tools. uv installs each
client's packages into an environment in labkit's cache folder, in which the client's script does
its tasks and prints a line of JSON for each. Logs are written to ``build/clients``. ``--only``
selects the clients whose names start with one of the given texts. ``--write`` puts the table of all
clients into docs/server.md. The exit status is 1 if a client could not do a task that it could do
according to that page.

A model this small need not choose the right words. So the tasks check what a grammar enforces
(structured output and required calls of tools), and otherwise that the client accepts the responses
and that they contain text.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from clients import CLIENTS, PACKAGES_UNTIL, TASKS, Client  # noqa: E402

PAGE = ROOT / "docs" / "server.md"
BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"
LOGS = ROOT / "build" / "clients"
MODEL = "smollm2"
INSTALL_TIMEOUT_S = 900
TIMEOUT_S = 900  # of a client on a busy machine
YES, NOT_APPLICABLE = "yes", "-"


@dataclass(frozen=True)
class Server:
    """A running server: its address without ``/v1``, and the folder of its model."""

    url: str
    model: Path


def tool_model(folder: Path) -> Path:
    """Create the directory of smollm2 with a chat template that supports tools."""
    from labkit import models
    from labkit.serve import compose

    shutil.copytree(models.resolve(compose(["model=smollm2"]).model).path, folder)
    path = folder / "tokenizer_config.json"
    template = (HERE / "tools.jinja").read_text()
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Start ``labkit.serve`` with its defaults on a free port."""
    model = tool_model(folder / "model")
    command = [sys.executable, "-m", "labkit.serve", "model=local", f"model.path={model}"]
    command += [f"server.model_name={MODEL}", "server.port=0"]
    log = LOGS / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=_with_path(os.environ), cwd=ROOT
        )
    try:
        deadline = time.monotonic() + 600  # kernels may have to be compiled
        while not (match := re.search(r"(http://\S+) serves", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {log.read_text()}")
            time.sleep(0.1)
        yield Server(match.group(1), model)
    finally:
        process.terminate()
        process.wait()


def _with_path(environ: Mapping[str, str]) -> dict[str, str]:
    return {**environ, "PYTHONPATH": str(ROOT)}


def install(client: Client, folder: Path) -> str | None:
    """Create the client's environment; return why that failed, or None."""
    uv = uv_path()
    create = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]
    add = [uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
    add += ["--exclude-newer", PACKAGES_UNTIL, *client.packages]
    with _log(client, "install").open("w") as log:
        for command in (create, add):
            try:
                code = subprocess.run(
                    command, stdout=log, stderr=log, timeout=INSTALL_TIMEOUT_S
                ).returncode
            except (OSError, subprocess.TimeoutExpired) as error:
                return _one_line(str(error))
            if code:
                return _one_line(_log(client, "install").read_text())
    return None


def outcomes(client: Client, python: Path, server: Server, folder: Path) -> dict[str, str]:
    """Run the client's script; return the result of each task of the table."""
    environ = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    environ |= {
        "HOME": str(folder),
        "SERVER_URL": server.url,
        "SERVER_MODEL": MODEL,
        "TOKENIZER": str(server.model),
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": "none",
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = [str(python), str(HERE / client.script)]
    command += [] if client.argument is None else [client.argument]
    log = _log(client, "run")
    log.unlink(missing_ok=True)
    with (
        log.open("a") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environ,
            cwd=folder,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
            end = f"the script ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the client's own processes
            output, _ = process.communicate()
            end = f"no result in {TIMEOUT_S} s"
    with log.open("a") as file:
        file.write(output)
    return read_results(client, output, end)


def read_results(client: Client, output: str, end: str) -> dict[str, str]:
    """Return the result of each task from the script's output.

    A task of the client without a line failed; ``end`` says how the script ended.
    """
    results = {task: f"no: {end}" if task in client.tasks else NOT_APPLICABLE for task in TASKS}
    for line in output.splitlines():
        if not line.startswith('{"task"'):
            continue
        result = json.loads(line)
        if result["task"] not in client.tasks:
            raise ValueError(f"{client.script}: {result['task']} is not a task of {client.name}")
        error = result.get("error")
        results[result["task"]] = YES if error is None else f"no: {_one_line(_message(error))}"
    return results


def _message(error: str) -> str:
    """Return the message of the API's error object in a client's error, or the whole text."""
    match = re.search(r"""'message': (["'])(.*?)\1""", error)
    return match.group(2) if match else error


def _one_line(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= 120 else f"{line[:117]}..."


def _log(client: Client, kind: str) -> Path:
    return LOGS / f"{re.sub(r'[^a-z0-9]+', '-', client.name)}.{kind}.log"


def run(clients: Sequence[Client]) -> dict[Client, dict[str, str]]:
    """Install and run the clients, one after the other."""
    from labkit.machine import cache_entries

    results: dict[Client, dict[str, str]] = {}
    LOGS.mkdir(parents=True, exist_ok=True)
    environments = cache_entries.root() / "clients"
    environments.mkdir(parents=True, exist_ok=True)
    installed: tuple[tuple[str, ...], str | None] | None = None
    with (
        tempfile.TemporaryDirectory(dir=environments) as name,
        serving(Path(name)) as server,
    ):
        environment = Path(name) / "environment"
        for number, client in enumerate(clients):
            if installed is None or installed[0] != client.packages:
                installed = client.packages, install(client, environment)
            folder = Path(name) / str(number)
            folder.mkdir()
            if installed[1] is not None:
                results[client] = {
                    task: f"not installed: {installed[1]}" if task in client.tasks else "-"
                    for task in TASKS
                }
            else:
                results[client] = outcomes(client, environment / "bin/python", server, folder)
            print(f"{client.name}: {results[client]}", flush=True)
    return results


def table(results: Mapping[Client, Mapping[str, str]]) -> str:
    """Return the table in Markdown."""
    head = ["client", "version", *TASKS.values()]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for client, outcome in results.items():
        cells = [client.name, client.version, *(outcome[task] for task in TASKS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page_rows() -> dict[str, list[str]]:
    """Return the rows of the page's table: of each client's name, its version and its results."""
    text = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {name: cells for name, *cells in rows}


def lost(
    results: Mapping[Client, Mapping[str, str]], rows: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the tasks that clients could do according to the page's rows and can no longer do."""
    return [
        f"{client.name}: {task}: {outcome[task]}"
        for client, outcome in results.items()
        for task, before in zip(TASKS, rows.get(client.name, ())[1:], strict=False)
        if before == YES and outcome[task] != YES
    ]


def write(results: Mapping[Client, Mapping[str, str]]) -> None:
    """Put the table, with today's date, into the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    date = f"Run on {datetime.now(UTC):%Y-%m-%d}."
    PAGE.write_text(f"{before}{BEGIN}\n{date}\n\n{table(results)}\n{END}{after}", encoding="utf-8")


def uv_path() -> str | None:
    """Return the path of uv, on PATH or beside Python; None if there is none."""
    beside = Path(sys.executable).with_name("uv")
    return shutil.which("uv") or (str(beside) if beside.exists() else None)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME,...", help="clients whose names start so")
    parser.add_argument("--write", action="store_true", help="put the table into docs/server.md")
    options = parser.parse_args()
    clients = CLIENTS
    if options.only:
        if options.write:
            parser.error("--write needs all clients: leave out --only")
        clients = tuple(c for c in CLIENTS if c.name.startswith(tuple(options.only.split(","))))
        if not clients:
            parser.error(f"--only={options.only}: no such client")
    if uv_path() is None:
        parser.error("uv installs the clients; make clients installs it, or pip install uv")
    results, before = run(clients), page_rows()
    print(table(results))
    if options.write:
        write(results)
    worse = lost(results, before)
    for line in worse:
        print(line, file=sys.stderr)
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
