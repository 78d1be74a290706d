"""The tools of a request: the functions that the model may call, and those that it must call.

Every API's tools become ``RequestedTools``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from labkit.server.constraints.grammar_compiler import GrammarSource
from labkit.server.constraints.structured_output import GrammarConstraint
from labkit.server.constraints.tool_call_parser import ToolCallFormat, ToolCallParser
from labkit.server.generation.service import Service
from labkit.server.types.api_error import invalid
from labkit.server.types.openai_types import Function, FunctionName


@dataclass(frozen=True, slots=True)
class RequestedTools:
    """The functions that the model may call in the next message."""

    # The format in which the model writes calls, or None if it may not call any function.
    call_format: ToolCallFormat | None = None
    # The functions as the chat template takes them, in the form of OpenAI's ``tools``.
    definitions: Sequence[Mapping[str, Any]] = ()
    # The model must call one of these functions. Empty: it may also answer with text.
    required: Sequence[Mapping[str, Any]] = ()
    single_call: bool = False  # whether the output ends after the first call

    def parser(self) -> ToolCallParser | None:
        """Return a parser for one choice's text, or None if the model may not call a function."""
        if self.call_format is None:
            return None
        return ToolCallParser(self.call_format, self.definitions, single_call=self.single_call)

    def single_call_parser(self) -> ToolCallParser | None:
        """Return a parser that ends a choice after its first call, or None if no call ends it."""
        return self.parser() if self.single_call else None

    async def grammar(self, service: Service) -> GrammarConstraint | None:
        """Return the grammar of the required call, or None if no call is required.

        Raises ``ApiError`` if the model's format does not allow enforced calls, or the functions'
        schemas cannot be enforced.
        """
        if self.call_format is None or not self.required:
            return None
        grammar = self.call_format.grammar(self.required, service.tokenizer)
        if grammar is None:
            raise invalid(
                "tool_choice: calls cannot be enforced in this model's tool format; use auto",
                "tool_choice",
            )
        return await service.grammars.build(GrammarSource("lark", grammar), "tools")

    def check_text_format(self, field: str) -> None:
        """Raise ``ApiError`` if the model may call functions, though ``field`` sets a format."""
        if self.call_format is not None:
            raise invalid(
                f"{field} cannot be combined with tools, unless tool_choice is none", field
            )


def resolve_tools(
    service: Service,
    functions: Sequence[Function],
    choice: str | FunctionName | None,
    *,
    single_call: bool,
) -> RequestedTools:
    """Return the tools of a request, which defines ``functions``.

    ``choice`` is ``auto`` (also None), ``none``, ``required``, or the function that must be called.
    With ``single_call``, the output ends after the first call. Raises ``ApiError`` if the model's
    template does not support tools, or ``choice`` requires a call of a function that the request
    does not define.
    """
    if not functions and choice not in (None, "none", "auto"):
        raise invalid("tool_choice needs tools, but the request has none", "tool_choice")
    if not functions or choice == "none":
        return RequestedTools()
    if service.tool_call_format is None:
        raise invalid(
            "tools: the model's chat template has no tool format that this server knows; leave "
            "tools out or set tool_choice to none",
            "tools",
        )
    definitions: list[dict[str, Any]]
    definitions = [
        {"type": "function", "function": {k: v for k, v in fields.items() if v is not None}}
        for fields in map(msgspec.structs.asdict, functions)
    ]
    required = definitions if choice == "required" else []
    if isinstance(choice, FunctionName):
        name = choice.name
        required = [tool for tool in definitions if tool["function"]["name"] == name]
        if not required:
            raise invalid(f"tool_choice: tools has no function {name!r}", "tool_choice")
    return RequestedTools(service.tool_call_format, definitions, required, single_call)
