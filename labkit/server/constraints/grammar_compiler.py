"""Compilation of grammars with llguidance.

This module imports neither the engine nor HTTP, so that the process that tries grammars
(:mod:`labkit.server.constraints.grammar_trial_worker`) starts fast and stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

# The same separators as json.dumps. With flexible white space, a model could generate white space
# without end.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# States of a grammar's lexer, of 0.4 kB each. A string with a maximum length needs one state per
# character.
MAX_LEXER_STATES = 50_000
MAX_ERROR_CHARACTERS = 200  # of a matcher's error, which may repeat the entire grammar


class GrammarError(ValueError):
    """llguidance cannot compile a grammar. The message is one line."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """The text of a JSON schema, of a grammar in llguidance's Lark syntax, or of a regex."""

    syntax: Literal["json_schema", "lark", "regex"]
    text: str


@dataclass(frozen=True)
class GrammarCompiler:
    """Compiles grammars for a model's vocabulary.

    ``tokenizer_json``: path of the model's tokenizer.json, read when ``tokenizer`` is first used
    (takes 0.3 s for 49,152 tokens). ``vocab_size``, ``eos_token_ids``: the model's vocabulary size
    and end-of-text token ids.
    """

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: Sequence[int]

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of llguidance, or ``GrammarError``. Reading it holds the GIL."""
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(
                self.tokenizer_json,
                n_vocab=self.vocab_size,
                eos_token=list(self.eos_token_ids) or None,
            )
        except ValueError as error:
            raise GrammarError(f"the tokenizer: {_first_line(str(error))}") from None

    def compile(self, source: GrammarSource) -> Any:
        """Return an llguidance matcher in its initial state.

        The GIL is released meanwhile, except while the first use reads ``tokenizer``. The first
        mask is computed too, because it takes longer than the later ones. Raises ``GrammarError``
        if llguidance does not support the tokenizer, or if the grammar is invalid, has features
        that llguidance does not support, or exceeds a limit of llguidance.
        """
        from llguidance import LLMatcher, LLParserLimits

        try:
            if source.syntax == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(source.text, overrides=JSON_STYLE)
            elif source.syntax == "regex":
                grammar = LLMatcher.grammar_from_regex(source.text)
            else:
                grammar = LLMatcher.grammar_from_lark(source.text)
        except ValueError as error:
            text = str(error)
            too_deep = text.startswith("recursion limit exceeded")
            raise GrammarError(
                "it is nested too deeply" if too_deep else _first_line(text)
            ) from None
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES)
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(error_text(matcher))
        return matcher


def error_text(matcher: Any) -> str:
    """Return the first line of a matcher's error, shortened to ``MAX_ERROR_CHARACTERS``."""
    return _first_line(matcher.get_error())


def _first_line(text: str) -> str:
    first = text.partition("\n")[0]
    return first if len(first) <= MAX_ERROR_CHARACTERS else f"{first[:MAX_ERROR_CHARACTERS]}..."
