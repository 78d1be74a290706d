"""Structured output: token masks from llguidance grammars, computed on the CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.server.api_error import invalid

# The same separators as json.dumps. With flexible white space, a model could generate white space
# without end.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Builds grammar constraints for a model's vocabulary.

    Parameters
    ----------
    tokenizer_json
        The model's tokenizer.json, read when the first grammar is built (takes 0.3 s for 49,152
        tokens).
    vocab_size, eos_token_ids
        The model's vocabulary size and end-of-text token ids.
    """

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer(
            str(self._path), n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
        )

    def from_schema(self, schema: Mapping[str, Any], param: str) -> GrammarConstraint:
        """Return a constraint that enforces a JSON schema.

        ``param`` is the request's field that contains the schema, for error messages.

        Raises
        ------
        ApiError
            llguidance cannot enforce the schema, or the model has no end-of-text token.
        """
        from llguidance import LLMatcher

        return self._build(
            LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_STYLE), param
        )

    def from_lark(self, grammar: str, param: str) -> GrammarConstraint:
        """Return a constraint that enforces a grammar in llguidance's Lark syntax.

        Raises the same errors as ``from_schema``.
        """
        from llguidance import LLMatcher

        return self._build(LLMatcher.grammar_from_lark(grammar), param)

    def _build(self, grammar: str, param: str) -> GrammarConstraint:
        from llguidance import LLMatcher

        if not self._eos_token_ids:
            raise invalid(f"{param}: the model has no end-of-text token", param)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise invalid(f"{param}: {matcher.get_error()}", param)
        return GrammarConstraint(matcher, self._eos_token_ids)


class GrammarConstraint:
    """A grammar and its parser state after a request's output so far.

    Implements ``labkit.engine.request.Constraint``.
    """

    def __init__(self, matcher: Any, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = list(eos_token_ids)
        self._consumed: list[int] = []

    def copy(self) -> GrammarConstraint:
        """Return a constraint of the same grammar in its initial state, for another request."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return GrammarConstraint(matcher, self._eos_token_ids)

    def allowed(self, output: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
        """Return a boolean mask over the vocabulary: which token ids may follow ``output``.

        If the grammar is complete after ``output``, only end-of-text ids may follow.
        """
        self._advance(output)
        if self._matcher.is_stopped():
            mask = np.zeros(vocab_size, np.bool_)
            mask[self._eos_token_ids] = True
            return mask
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=min(vocab_size, 8 * len(bits)), bitorder="little")
        mask = np.zeros(vocab_size, np.bool_)
        mask[: len(allowed)] = allowed
        return mask

    def _advance(self, output: Sequence[int]) -> None:
        """Roll the matcher back to the prefix shared with ``output``, then feed it the rest."""
        common = 0
        for old, new in zip(self._consumed, output, strict=False):
            if old != new:
                break
            common += 1
        rolled_back = common == len(self._consumed) or self._matcher.rollback(
            len(self._consumed) - common
        )
        new_tokens = list(output[common:])
        if not (rolled_back and (not new_tokens or self._matcher.consume_tokens(new_tokens))):
            raise RuntimeError(f"the output violates the grammar: {self._matcher.get_error()}")
        self._consumed = list(output)
