"""Tests of the server against its OpenAPI document, with requests that Schemathesis generates."""

import http.client
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

COMMAND = Path(sys.executable).with_name("schemathesis")
CHECKS = "not_a_server_error,response_schema_conformance,status_code_conformance"


@pytest.fixture(scope="module")
def short_output_server(tiny_server):
    """A server that generates at most 8 tokens per response."""
    with tiny_server("server.max_output_tokens=8", "server.max_choices=3") as running:
        yield running


@pytest.mark.parametrize(
    ("examples", "phases"),
    [("3", "fuzzing"), pytest.param("300", "fuzzing,coverage", marks=pytest.mark.slow)],
    ids=["few", "many"],
)
@pytest.mark.skipif(not COMMAND.exists(), reason="schemathesis is not installed")
def test_schemathesis_finds_no_violation(short_output_server, tmp_path, examples, phases, capfd):
    completed = subprocess.run(
        [
            str(COMMAND), "run", f"{short_output_server.url}/openapi.json", "--checks", CHECKS,
            "--max-examples", examples, "--seed", "1", "--phases", phases,
            "--generation-database", "none", "--no-color", "--workers", "2",
            "--request-timeout", "120",  # a busy machine takes longer to compile a grammar
        ],
        capture_output=True, text=True, cwd=tmp_path, timeout=900,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-2000:]
    assert "Traceback" not in capfd.readouterr().err


def test_the_document_has_every_path(short_output_server):
    connection = http.client.HTTPConnection(urlsplit(short_output_server.url).netloc, timeout=30)
    connection.request("GET", "/openapi.json")
    document = json.loads(connection.getresponse().read())
    connection.close()
    assert set(document["paths"]) == {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize", "/detokenize", "/v1/models", "/v1/models/{model}", "/health", "/version",
        "/metrics", "/reset_prefix_cache",
    }  # fmt: skip
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False and "messages" in chat["required"]
    text = json.dumps(document)
    referenced = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', text))
    schemas = document["components"]["schemas"]
    assert referenced <= schemas.keys() and {"ErrorBody", "MessageError", "Usage"} <= referenced
    assert set(re.findall(r'"\$ref": "([^"]*)"', text)) == {
        f"#/components/schemas/{name}" for name in referenced
    }
    one_model = document["paths"]["/v1/models/{model}"]["get"]
    (parameter,) = one_model["parameters"]
    assert (parameter["name"], parameter["in"], parameter["required"]) == ("model", "path", True)
    assert {"200", "403", "404"} <= one_model["responses"].keys()
    metrics = document["paths"]["/metrics"]["get"]
    assert "parameters" not in metrics
    assert [*metrics["responses"]["200"]["content"]] == ["text/plain"]
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["required"] is True
    assert {*chat["responses"]["200"]["content"]} == {"application/json", "text/event-stream"}
    assert {"400", "401", "429", "500", "503", "504"} <= chat["responses"].keys()
    assert schemas["ChatRequest"]["properties"]["model"] == {"enum": ["tiny"]}
