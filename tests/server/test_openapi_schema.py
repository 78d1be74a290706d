"""The server against its own description: Schemathesis makes up requests, valid and not."""

import http.client
import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

COMMAND = Path(sys.executable).with_name("schemathesis")
CHECKS = "not_a_server_error,response_schema_conformance,status_code_conformance"


@pytest.fixture(scope="module")
def brief(chat_model, serving, tmp_path_factory):
    """A server whose answers are short."""
    with serving(
        tmp_path_factory.mktemp("brief") / "log",
        "model=local",
        f"model.path={chat_model}",
        "server.model_name=tiny",
        "server.max_output_tokens=8",
        "server.max_choices=3",
    ) as running:
        yield running


@pytest.mark.parametrize(
    "examples", [10, pytest.param(300, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.skipif(not COMMAND.exists(), reason="schemathesis is not installed")
def test_schemathesis_finds_nothing(brief, tmp_path, examples):
    found = subprocess.run(
        [
            str(COMMAND), "run", f"{brief.url}/openapi.json", "--checks", CHECKS,
            "--max-examples", str(examples), "--seed", "1", "--phases", "fuzzing,coverage",
            "--generation-database", "none", "--no-color", "--workers", "2",
        ],
        capture_output=True, text=True, cwd=tmp_path, timeout=900,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert "Traceback" not in brief.log.read_text()


def test_the_description_has_every_address(brief):
    connection = http.client.HTTPConnection(urlsplit(brief.url).netloc, timeout=30)
    connection.request("GET", "/openapi.json")
    described = json.loads(connection.getresponse().read())
    connection.close()
    assert set(described["paths"]) == {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
        "/tokenize", "/detokenize", "/v1/models", "/v1/models/{model}", "/health", "/version",
        "/metrics",
    }  # fmt: skip
    chat = described["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False and "messages" in chat["required"]
