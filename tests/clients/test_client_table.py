"""The pins of the clients, how results are read and rendered, and the committed table."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from client_table import lost, page_rows, read_results, table  # noqa: E402
from clients import CLIENTS, TASKS, Client  # noqa: E402

CLIENT = Client("example", ("example[http]==1.2.3",), "x.py", ("chat", "tools"))


def test_every_package_is_pinned_to_one_version():
    packages = {package for client in CLIENTS for package in client.packages}
    assert [p for p in packages if not re.fullmatch(r"[\w.-]+(\[[\w,]+\])?==\d[\w.]*", p)] == []
    names = [re.split(r"[\[=]", package)[0] for package in packages]
    assert len(names) == len(set(names))  # no package has two versions


def test_clients_have_scripts_that_do_their_tasks():
    for client in CLIENTS:
        tree = ast.parse((HERE / client.script).read_text(encoding="utf-8"))
        done = {
            node.args[0].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "task"
        }
        # The script for LiteLLM's proxy runs that for OpenAI's client.
        assert done >= set(client.tasks) or client.script == "litellm_proxy_client.py", client
    scripts = {path.name for path in HERE.glob("*_client.py")}
    assert scripts == {client.script for client in CLIENTS}


def test_results_of_a_script():
    output = 'noise\n{"task": "chat"}\n{"task": "tools", "error": "E:\\n a | b"}\n'
    assert read_results(CLIENT, output, "the script ended with 0") == {
        "chat": "yes",
        "stream": "-",
        "turns": "-",
        "tools": "no: E: a \\| b",
        "structured": "-",
    }


def test_of_an_api_error_only_the_message_is_shown():
    error = """BadRequestError: 400 - {'error': {'message': "x=false isn't y", 'type': 'z'}}"""
    line = json.dumps({"task": "chat", "error": error})
    assert read_results(CLIENT, line, "")["chat"] == "no: x=false isn't y"


def test_a_task_without_a_result_failed():
    results = read_results(CLIENT, '{"task": "chat"}', "the script ended with 1")
    assert (results["chat"], results["tools"]) == ("yes", "no: the script ended with 1")


def test_a_result_that_the_client_does_not_list_is_an_error():
    with pytest.raises(ValueError, match=re.escape("x.py: stream is not a task of example")):
        read_results(CLIENT, '{"task": "stream"}', "")


def test_table():
    results = dict.fromkeys(TASKS, "yes")
    columns = "whole | streamed | repeated turns | tools | structured output"
    assert table({CLIENT: results}).splitlines() == [
        f"| client | version | {columns} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| example | 1.2.3 | yes | yes | yes | yes | yes |",
    ]


def test_a_task_that_worked_before_is_reported():
    results = {CLIENT: {task: "no: x" if task in CLIENT.tasks else "-" for task in TASKS}}
    assert lost(results, {"example": ["1.0", "no: y", "-", "-", "yes", "-"]}) == [
        "example: tools: no: x"
    ]
    assert lost(results, {}) == []


def test_the_page_has_the_clients_with_their_versions_and_tasks():
    rows = page_rows()
    assert [(name, row[0]) for name, row in rows.items()] == [(c.name, c.version) for c in CLIENTS]
    for client in CLIENTS:
        for task, cell in zip(TASKS, rows[client.name][1:], strict=True):
            did_run = re.match(r"yes$|no: |not installed: ", cell) is not None
            assert did_run == (task in client.tasks) and (did_run or cell == "-"), (client, cell)
