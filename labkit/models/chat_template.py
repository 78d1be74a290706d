"""A model's chat template: the Jinja template that turns a conversation into a prompt.

The template comes with the model and is not trusted. It runs in Jinja's immutable sandbox, where it
cannot reach Python code. The length of its output is limited, and strings cannot be multiplied;
running time and memory are limited in the server only
(:mod:`labkit.server.generation.template_worker`). The template cannot read the date, so a
conversation gives the same prompt on any day.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from labkit.config import ConfigError
from labkit.machine.exception_text import one_line
from labkit.models import model_json

# ``role`` (system, user, assistant or tool) and ``content``, a string; an assistant's message may
# have ``tool_calls``.
Message = Mapping[str, Any]
# Function definitions in the format of ``tools`` in OpenAI's API.
Tools = Sequence[Mapping[str, Any]]

RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt")

MAX_TEMPLATE_CHARACTERS = 1 << 18
MAX_ADDED_CHARACTERS = 1 << 20  # output in addition to the length of messages and tools
# Fields of a message that some templates do not use, and their names in error messages. The name
# in a tool's message is not checked, because it repeats that of the call.
OPTIONAL_FIELDS = {"name": "names", "tool_calls": "tool calls"}


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """How a prompt ends, and values for further variables that the template reads.

    Raises ``ValueError`` if ``add_generation_prompt`` and ``continue_final_message`` are both set.
    """

    add_generation_prompt: bool = True  # end with the start of the model's next message
    # End within the last message, which the model then continues.
    continue_final_message: bool = False
    # Variables that the template reads and does not set, for example ``enable_thinking``.
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt cannot be combined with continue_final_message")


class GenerationTag(Extension):
    """``{% generation %}`` marks the model's own text for training; a prompt has its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content of the block, with a scope of its own as in transformers."""
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(content, lineno=line)


class RuntimeCode(CodeGenerator):
    """Jinja's compiler, except that loading a template computes none of its expressions."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.optimizer = None

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_EvalContextModifier(self, node: Any, frame: Any) -> None:
        """Refuse ``autoescape``, whose value would have to be computed."""
        self.fail("autoescape is not supported", node.lineno)


class VariableFinder(RuntimeCode, meta.TrackingCodeGenerator):
    """Collects the variables that a template does not set itself (``undeclared_identifiers``)."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the settings of transformers, and without large multiplications.

    Multiplying strings or large numbers would be the easiest way to exhaust memory.
    """

    code_generator_class = RuntimeCode
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute products of numbers below 1e9. Refuse all other products, and every power."""
        numbers = all(isinstance(side, int | float) and abs(side) < 1e9 for side in (left, right))
        if operator == "**" or not numbers:
            raise SecurityError(f"{operator} works with small numbers only")
        return left * right


class ChatTemplate:
    """A compiled chat template.

    ``source``: the template's text. ``tokens``: the special tokens that the template may use:
    ``bos_token``, ``eos_token`` and so on. Raises ``ConfigError`` if the text is not valid Jinja,
    or longer than ``MAX_TEMPLATE_CHARACTERS``.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ConfigError(
                f"the chat template has {len(source)} characters; it must have at most "
                f"{MAX_TEMPLATE_CHARACTERS}"
            )
        self.source = source
        self._tokens = dict(tokens)
        sandbox = TemplateSandbox()
        try:
            self._template = sandbox.from_string(source)
            finder = VariableFinder(sandbox)
            finder.visit(sandbox.parse(source))
            self._variables = finder.undeclared_identifiers
        except Exception as error:  # from Jinja, or from Python compiling Jinja's output
            raise ConfigError(f"chat template: {one_line(error)}") from None

    @property
    def takes_tools(self) -> bool:
        return "tools" in self._variables

    def render(
        self, messages: Sequence[Message], tools: Tools = (), options: RenderOptions | None = None
    ) -> str:
        """Return the prompt of a conversation, by default up to the start of the next message.

        Raises ``ConfigError`` if the template fails, refuses the messages or writes too much; or it
        ignores something that it was given: the tools, a variable of ``options``, a message's
        ``name`` or its ``tool_calls``.
        """
        options = options or RenderOptions()
        if tools and not self.takes_tools:
            raise ConfigError("the model's chat template does not support tools")
        for name in options.variables:
            if name in RESERVED_VARIABLES or name in self._tokens:
                raise ConfigError(f"chat_template_kwargs: {name} is set by labkit; remove it")
            if name not in self._variables:
                raise ConfigError(
                    f"chat_template_kwargs: the model's chat template has no variable {name}; "
                    "leave it out"
                )
        text = self._render(messages, tools, options)
        for what, without in _without_optional_fields(messages):
            if self._text_or_none(without, tools, options) == text:
                raise ConfigError(f"the model's chat template drops {what}; leave them out")
        return self._continued(messages, tools, options) if options.continue_final_message else text

    def _continued(self, messages: Sequence[Message], tools: Tools, options: RenderOptions) -> str:
        """Return the prompt up to the end of the last message's content."""
        end = f"<{uuid.uuid4().hex}>"
        last = {**messages[-1], "content": f"{messages[-1]['content']}{end}"}
        before, found, _ = self._render([*messages[:-1], last], tools, options).rpartition(end)
        if not found:
            raise ConfigError(
                "the model's chat template does not end with the last message's content"
            )
        return before

    def _text_or_none(
        self, messages: Sequence[Message], tools: Tools, options: RenderOptions
    ) -> str | None:
        try:
            return self._render(messages, tools, options)
        except ConfigError:  # the template fails without the removed field
            return None

    def _render(self, messages: Sequence[Message], tools: Tools, options: RenderOptions) -> str:
        remaining = MAX_ADDED_CHARACTERS + len(json.dumps([messages, tools]))
        parts: list[str] = []
        try:
            for part in self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=options.add_generation_prompt,
                **({"tools": [dict(tool) for tool in tools]} if tools else {}),
                **self._tokens,
                **options.variables,
            ):
                parts.append(part)
                remaining -= len(part)
                if remaining < 0:
                    raise ConfigError(
                        f"the chat template adds more than {MAX_ADDED_CHARACTERS} characters to "
                        "its input"
                    )
        except ConfigError:
            raise
        except Exception as error:  # a template may raise anything
            raise ConfigError(f"chat template: {one_line(error)}") from None
        return "".join(parts)


def _without_optional_fields(
    messages: Sequence[Message],
) -> Iterator[tuple[str, Sequence[Message]]]:
    """Yield each optional field that is set, once per role, and the messages without this field."""
    roles = dict.fromkeys(m["role"] for m in messages)
    for name, role in itertools.product(OPTIONAL_FIELDS, roles):
        if role != "tool" and any(m.get(name) and m["role"] == role for m in messages):
            without = [
                {k: v for k, v in m.items() if k != name} if m["role"] == role else m
                for m in messages
            ]
            yield f"the {OPTIONAL_FIELDS[name]} of {role} messages", without
    calls = [call for m in messages for call in m.get("tool_calls") or ()]
    if any(call["function"]["arguments"] for call in calls):
        bare = [
            {**m, "tool_calls": [_without_arguments(call) for call in m["tool_calls"]]}
            if m.get("tool_calls")
            else m
            for m in messages
        ]
        yield "the arguments of tool calls", bare


def _without_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": {}}}


def load_template(model_dir: Path) -> ChatTemplate | None:
    """Return the chat template of a model directory, or None if the directory has none.

    The template is read from ``chat_template.jinja``, or else from ``chat_template`` in
    tokenizer_config.json. If that is a list of templates, the one named ``default`` is returned.
    Raises ``ConfigError`` if a file cannot be read, or the template is not valid Jinja.
    """
    config = model_json.read_optional(model_dir / "tokenizer_config.json")
    source = config.get("chat_template")
    jinja_file = model_dir / "chat_template.jinja"
    if jinja_file.is_file():
        try:
            source = jinja_file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{jinja_file}: {one_line(error)}") from None
    elif isinstance(source, list):
        default = [e for e in source if isinstance(e, dict) and e.get("name") == "default"]
        source = default[0].get("template") if default else None
    if not isinstance(source, str):
        return None
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = {name: model_json.special_token(config, name) for name in names}
    return ChatTemplate(source, {name: text for name, text in tokens.items() if text is not None})


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON text, with the parameters that transformers' filter has."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise ConfigError(f"the chat template refuses the conversation ({message})")
