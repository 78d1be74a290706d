"""A model's tokenizer, loaded with the tokenizers library (without transformers)."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.config import ConfigError
from labkit.machine.exception_text import one_line

if TYPE_CHECKING:
    import tokenizers

    from labkit.models.chat_template import ChatTemplate, Message, RenderOptions, Tools

LONG_TEXT = 10_000  # characters or ids
# Splits a text for ``encode_pieces``: no token merges this character, which is none of Unicode's.
SEPARATOR = "\U0010fffe"


class Tokenizer:
    """A model's tokenizer and its chat template.

    Special tokens are added as the model's files specify. ``template``: the chat template, or None
    where the model has none. ``template_error``: why a model's template cannot be used, else None;
    such a model can complete texts.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: ChatTemplate | None = None,
        template_error: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._decode_one = lru_cache(maxsize=1 << 16)(self._decode)
        self.template = template
        self.template_error = template_error

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @cached_property
    def max_token_characters(self) -> int:
        """The length of the longest token (characters), special tokens included."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return a text's token ids; ``special``: whether to add the model's special tokens.

        Raises ``ConfigError`` if the text is not valid Unicode.
        """
        try:
            if len(text) < LONG_TEXT:
                return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
            # A batch releases the GIL, so other threads run during the seconds this may take.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except TypeError:
            raise ConfigError("the text is not valid Unicode (lone surrogate)") from None
        return list(encoding.ids)

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Return the ids of consecutive pieces of a text, where no token spans two pieces.

        No special tokens are added, and no space is put before a piece other than the first.
        """
        if len(pieces) == 1:
            return self.encode(pieces[0], special=False)
        ends = itertools.accumulate(len(piece) + 1 for piece in pieces[:-1])
        separators = {end - 1 for end in ends}
        text = SEPARATOR.join(pieces)
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return [
            token
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if not (start in separators and end <= start + 1 and token in self._separator_ids)
        ]

    @cached_property
    def _separator_ids(self) -> frozenset[int]:
        return frozenset(self.encode(SEPARATOR, special=False))

    def encode_turns(self, turns: Sequence[str]) -> list[int]:
        """Return the ids of one text, whose first turns have the same ids in a longer text.

        The model's special tokens are added once, around the whole text.
        """
        before, after = self._special_around
        first, *others = turns
        ids = self.encode(first, special=False)
        ids += [token for turn in others for token in self.encode_pieces(["", turn])]
        return [*before, *ids, *after]

    @property
    def text_prefix(self) -> list[int]:
        """The ids of the special tokens that begin every text, such as BOS."""
        return self._special_around[0]

    @cached_property
    def _special_around(self) -> tuple[list[int], list[int]]:
        """The ids of the special tokens that are added before and after a text."""
        text = "a"
        bare, whole = self.encode(text, special=False), self.encode(text)
        start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, up to the start of the model's next message.

        Raises ``ConfigError`` if the model has no chat template, or the template refuses the
        conversation.
        """
        return self.encode(self.render_chat(messages), special=False)

    def render_chat(
        self, messages: Sequence[Message], tools: Tools = (), options: RenderOptions | None = None
    ) -> str:
        """Return the text of a conversation, by default up to the start of the next message.

        Raises the same errors as ``encode_chat``.
        """
        if self.template is None:
            reason = self.template_error or "the model has no chat template"
            raise ConfigError(f"{reason}; send a text instead of a conversation")
        return self.template.render(messages, tools, options)

    def decode(self, ids: Sequence[int]) -> str:
        # Streaming decodes every token as a single id, so results for single ids are cached.
        if len(ids) == 1:
            return self._decode_one(ids[0])
        if len(ids) < LONG_TEXT:
            return self._decode(*ids)
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=False)
        return str(text)

    def _decode(self, *ids: int) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def piece(self, token: int) -> str:
        """Return the text of a token as it appears inside a text, including a leading space.

        Some tokenizers drop a text's first space. So the token is decoded twice in one
        sequence, and the text of the first is removed. The text of an unknown id is empty.
        """
        return self.decode([token, token])[len(self.decode([token])) :]

    def vocabulary_token(self, token: int) -> str:
        """Return a token as the vocabulary spells it, for example ``Ġthe`` for " the".

        The spelling of an unknown id is empty.
        """
        spelling = self._tokenizer.id_to_token(token)
        return "" if spelling is None else str(spelling)

    @cached_property
    def byte_tokens(self) -> Mapping[int, int]:
        """The byte that each byte token (``<0xE6>``) stands for, by id.

        Only a tokenizer that decodes with ByteFallback, such as Llama 2's, has such tokens.
        """
        decoder = self._tokenizer.decoder
        if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
            return {}
        ids = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return {token: byte for byte, token in enumerate(ids) if token is not None}

    @property
    def special_tokens(self) -> tuple[str, ...]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token such as ``<|eos|>``, or None if there is no such token."""
        token_id = self._tokenizer.token_to_id(token)
        return None if token_id is None else int(token_id)


def load(model_dir: Path) -> Tokenizer:
    """Load ``tokenizer.json`` and the chat template of a model directory.

    Raises ``ConfigError`` if ``tokenizer.json`` is missing or the tokenizers library cannot read
    it.
    """
    import tokenizers

    from labkit.models import chat_template, model_json

    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    model_json.check_not_pointer(path, str(model_dir))
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: {one_line(error)}") from None
    # Some files store the settings of their training, which would cut or lengthen every prompt.
    loaded.no_truncation()
    loaded.no_padding()
    try:
        return Tokenizer(loaded, chat_template.load_template(model_dir))
    except ConfigError as error:
        return Tokenizer(loaded, template_error=str(error))


class SpecialTokenEscape:
    """Keeps special tokens that a user wrote from acting as control tokens.

    A marker is inserted inside every special token in the user's strings. The rendered prompt is
    then split at the markers into pieces for ``Tokenizer.encode_pieces``. The chat template's own
    special tokens stay whole and keep their effect. The user's are cut in two and become plain
    text. If ``special_tokens`` is empty, nothing is marked.
    """

    def __init__(self, special_tokens: Sequence[str]) -> None:
        tokens = sorted((token for token in special_tokens if len(token) > 1), key=len)
        self._marker = f"<{uuid.uuid4().hex}>"
        self._pattern = re.compile("|".join(map(re.escape, reversed(tokens)))) if tokens else None

    def mark(self, value: Any) -> Any:
        """Return JSON-like data with a marker inside every special token of its strings."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._pattern.sub(self._mark_token, value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list | tuple) else value

    def _mark_token(self, match: re.Match[str]) -> str:
        return f"{match[0][0]}{self._marker}{match[0][1:]}"

    def split(self, text: str) -> list[str]:
        return text.split(self._marker)


@dataclass(eq=False)
class Detokenizer:
    """Converts ids to text and back, for servers that accept or return text instead of ids.

    The model's own tokenizer is loaded on first use. Texts of two servers are compared without
    special tokens, without surrounding space, and without U+FFFD (which a decoder writes where a
    token ends inside a character). Servers differ in all three.
    """

    model_dir: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load(self.model_dir)

    def prompt_text(self, ids: Sequence[int]) -> tuple[str, bool]:
        """Return a prompt as text, and whether the tokenizer encodes that text to the same ids.

        Encoding adds special tokens such as BOS. If the prompt already begins with BOS, its full
        text would get a second one, so the text without the first id is tried as well.
        """
        prompt = list(ids)
        for text in (self.tokenizer.decode(prompt), self.tokenizer.decode(prompt[1:])):
            if self.tokenizer.encode(text) == prompt:
                return text, True
        return self.tokenizer.decode(prompt), False

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text, special=False))

    def normalized_text(self, ids: Sequence[int]) -> str:
        return self.normalize(self.tokenizer.decode(ids))

    def normalize(self, text: str) -> str:
        """Return a text for comparison: without special tokens, U+FFFD and surrounding space."""
        for token in self.tokenizer.special_tokens:
            text = text.replace(token, "")
        return text.replace("\ufffd", "").strip()
