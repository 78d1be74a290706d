"""The messages of a conversation with tool calls, in the form that chat templates render."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from labkit.server.types.api_error import invalid


class TemplateMessages:
    """Collects a conversation's messages for the chat template, in ``messages``.

    A message of the assistant holds its text and the tool calls that follow it. Text of the
    assistant that comes after the calls is appended to the same message. ``param`` is the request's
    field that contains the messages, for error messages.
    """

    def __init__(self, param: str) -> None:
        self.messages: list[dict[str, Any]] = []
        self._param = param
        self._function_names: dict[str, str] = {}  # by call id

    def add(self, role: str, content: str) -> None:
        """Add a message of the role system, user or assistant."""
        last = self.messages[-1] if self.messages else {}
        if role == last.get("role") == "assistant" and "tool_calls" in last:
            last["content"] += content
        else:
            self.messages.append({"role": role, "content": content})

    def add_call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
        if not (self.messages and self.messages[-1]["role"] == "assistant"):
            self.add("assistant", "")
        self.messages[-1].setdefault("tool_calls", []).append(
            template_call(call_id, name, arguments)
        )
        self._function_names[call_id] = name

    def add_result(self, call_id: str, content: str) -> None:
        """Add the result of an earlier tool call. Raises ``ApiError`` if no call has this id."""
        name = self._function_names.get(call_id)
        if name is None:
            raise invalid(
                f"{self._param}: a tool result's id matches no earlier tool call; send the call "
                "before its result",
                self._param,
            )
        self.messages.append(
            {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}
        )


def in_call_order(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with the results of parallel calls in the order of the calls.

    Clients may send the results in any order. Most chat templates write no ids, so the model can
    match results to calls only by their order.
    """
    ordered: list[Mapping[str, Any]] = []
    places: dict[str, int] = {}  # of the latest calls, by id
    for is_result, group in itertools.groupby(messages, lambda m: bool(m["role"] == "tool")):
        run = list(group)
        if is_result:
            run.sort(key=lambda m: places.get(m.get("tool_call_id", ""), len(places)))
        else:
            calls = run[-1].get("tool_calls", ())
            places = {call["id"]: place for place, call in enumerate(calls)}
        ordered += run
    return ordered


def template_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call as a dict for the chat template. Its arguments are not JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def decode_arguments(name: str, arguments: str, param: str) -> dict[str, Any]:
    """Decode a call's arguments. Raises ``ApiError`` if they are not a JSON object."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise invalid(f"{param}: the arguments of {name} are not a JSON object", param) from None
