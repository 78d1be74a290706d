"""How a model wants a conversation written: the Jinja template in its directory.

The template comes with the model and is not trusted: it runs in Jinja's immutable sandbox,
where it reaches no code, what it writes has a limit, and texts cannot be multiplied. Its time
has none. It has no clock either, so the same conversation is the same prompt on any day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import meta
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from labkit.config import ConfigError

# Role (system, user, assistant or tool) and content, a text; an assistant's ``tool_calls``.
Message = Mapping[str, Any]
# What a model may call, as JSON: the OpenAI API's ``tools``.
Tools = Sequence[Mapping[str, Any]]

MAX_TEMPLATE_CHARACTERS = 1 << 18  # characters
MAX_ADDED_CHARACTERS = 1 << 20  # characters that a template may write besides what it is given


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up, without the shortest ways to fill memory."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply numbers; refuse the rest."""
        numbers = all(isinstance(side, int | float) and abs(side) < 1e9 for side in (left, right))
        if operator == "**" or not numbers:
            raise SecurityError(f"{operator} is for small numbers")
        return left * right


class ChatTemplate:
    """A template, compiled. ``takes_tools``: it reads what the model may call.

    Parameters
    ----------
    source
        Its text.
    tokens
        The special tokens that it may name: ``bos_token``, ``eos_token`` and the like.

    Raises
    ------
    ConfigError
        It is not Jinja, or too long.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ConfigError(
                f"chat template: it has {len(source)} characters; allowed are "
                f"{MAX_TEMPLATE_CHARACTERS}"
            )
        self.source = source
        self._tokens = dict(tokens)
        sandbox = TemplateSandbox()
        try:
            self._template = sandbox.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(sandbox.parse(source))
        except Exception as error:  # of Jinja, or of Python compiling what Jinja made of it
            raise ConfigError(f"chat template: {_line(error)}") from None

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Write a conversation up to where the model's next answer begins.

        Raises
        ------
        ConfigError
            The template fails, refuses these messages, or writes too much; or there are tools
            and it does not read them.
        """
        if tools and not self.takes_tools:
            raise ConfigError("chat template: the model's has no tools")
        room = MAX_ADDED_CHARACTERS + len(json.dumps([messages, tools]))
        written: list[str] = []
        try:
            for part in self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                **({"tools": [dict(tool) for tool in tools]} if tools else {}),
                **self._tokens,
            ):
                written.append(part)
                room -= len(part)
                if room < 0:
                    raise ConfigError("chat template: it writes without end")
        except ConfigError:
            raise
        except Exception as error:  # a template may fail in any way that Python can
            raise ConfigError(f"chat template: {_line(error)}") from None
        return "".join(written)


def load_template(model_dir: Path) -> ChatTemplate | None:
    """Return the template of a model directory, None where it has none.

    ``chat_template.jinja`` or ``chat_template`` in tokenizer_config.json; of several the one
    that is called default.
    """
    path = model_dir / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({_line(error)})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a JSON object")
    source = config.get("chat_template")
    own = model_dir / "chat_template.jinja"
    if own.is_file():
        source = own.read_text("utf-8")
    elif isinstance(source, list):
        named = [e for e in source if isinstance(e, dict) and e.get("name") == "default"]
        source = named[0].get("template") if named else None
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise ConfigError(f"chat template: it refuses the conversation ({message})")


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
