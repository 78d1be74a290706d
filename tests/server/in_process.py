"""A service in this process, with a fake engine, and requests to its application without HTTP."""

import asyncio
import json

from fake_engine import CharTokenizer, FakeEngine
from fake_server import FakeModel, TemplatesHere

from labkit import config
from labkit.server.generation.service import Service
from labkit.server.http.routes import create_app


def run_scenario(
    scenario,
    tmp_path,
    *,
    tokenizer=None,
    engine=None,
    on_engine_failure=lambda: None,
    takes_priorities=False,
    **options,
):
    """Run ``scenario(service, engine)`` with a fake engine; return the engine."""
    engine = engine or FakeEngine()

    async def main():
        service = Service(
            config.Server(**options),
            "fake",
            tokenizer or CharTokenizer(),
            engine,
            FakeModel(tmp_path),
            takes_priorities=takes_priorities,
        )
        service.templates = TemplatesHere(service.tokenizer)
        service.app = create_app(service)
        await service.start(on_engine_failure)
        try:
            await asyncio.wait_for(scenario(service, engine), 30)
        finally:
            await service.stop(0.0)

    asyncio.run(main())
    return engine


async def send(service, method, path, body=b"", disconnected=None):
    """Send a request to the application; return the status and the response's body.

    The client disconnects when the event ``disconnected`` is set.
    """
    sent, received = [], []

    async def receive():
        if not received:
            received.append(body)
            return {"type": "http.request", "body": body, "more_body": False}
        await (disconnected or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def collect(message):
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": [],
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
        "asgi": {"version": "3.0"}, "server": ("localhost", 80), "client": ("localhost", 1),
    }  # fmt: skip
    await service.app(scope, receive, collect)
    return sent[0]["status"], b"".join(part.get("body", b"") for part in sent[1:])


async def get(service, path):
    """Send a GET request; return the status and the decoded body."""
    status, body = await send(service, "GET", path)
    return status, json.loads(body)


async def post(service, path, body, disconnected=None):
    """Send a POST request of a JSON body; return the status and the response's body."""
    return await send(service, "POST", path, json.dumps(body).encode(), disconnected)
