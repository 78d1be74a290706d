"""Chat templates, rendered in processes of their own: a template is not trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from labkit.config import ConfigError
from labkit.models.chat_template import Message, RenderOptions, Tools
from labkit.models.tokenizer import Tokenizer
from labkit.server.killable_process_pool import (
    TaskFailed,
    TooLarge,
    TooSlow,
    WorkerOptions,
    WorkerPool,
)

TIMEOUT_S = 10.0
MEMORY_BYTES = 256 << 20


class TemplateProcesses:
    """Renders the chat template of a model, within limits of time and memory."""

    def __init__(self, tokenizer: Tokenizer, model_dir: Path) -> None:
        self._tokenizer = tokenizer
        self._pool = WorkerPool(
            WorkerOptions(
                "labkit.server.generation.template_worker",
                {"model_dir": str(model_dir)},
                "rendering other conversations",
                TIMEOUT_S,
                MEMORY_BYTES,
            )
        )

    async def start(self) -> None:
        """Start a process if the model has a template."""
        if self._tokenizer.template is not None:
            await self._pool.start()

    async def render(
        self, messages: Sequence[Message], tools: Tools, options: RenderOptions | None
    ) -> str:
        """Return the text of a conversation. Cancelling this call ends the rendering.

        Raises ``ConfigError`` if the model has no template, or the template fails, exceeds a limit
        or refuses the conversation. Raises ``ApiError`` if all processes are busy with other
        conversations (429), or the server is stopping (503).
        """
        if self._tokenizer.template is None:
            return self._tokenizer.render_chat(messages, tools, options)  # which says so
        task = {
            "messages": messages,
            "tools": tools,
            "options": dataclasses.asdict(options or RenderOptions()),
        }
        try:
            async with self._pool.worker() as worker:
                answer: dict[str, str] = await worker.answer(task)
        except TooSlow:
            raise ConfigError(f"the chat template takes longer than {TIMEOUT_S:g} s") from None
        except TooLarge:
            raise ConfigError(f"the chat template needs more than {MEMORY_BYTES} bytes") from None
        except TaskFailed:
            raise ConfigError("the chat template cannot be rendered") from None
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer["text"]

    async def close(self) -> None:
        """Kill the processes. Calls of ``render`` that wait for them raise ``ApiError`` (503)."""
        await self._pool.close()
