"""The server that computes nothing."""

import asyncio
import json

from labkit.engine.openai.null_server import NullServer

PATIENCE_S = 10.0


def test_the_stream_of_a_client_that_is_gone_ends():
    async def stream_and_leave():
        server = NullServer(first_ms=1.0, interval_ms=1.0)
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        ticks = asyncio.create_task(server.tick())
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        body = json.dumps({"prompt": [1, 2], "max_tokens": 10**9}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b"data: ")
        assert len(server._streams) == 1
        writer.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            while server._streams:
                await asyncio.sleep(0.001)
        ticks.cancel()
        listening.close()

    asyncio.run(stream_and_leave())
