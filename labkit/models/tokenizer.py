"""A model's tokenizer, loaded with the tokenizers library (without transformers)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.config import ConfigError
from labkit.machine.exception_text import one_line

if TYPE_CHECKING:
    import tokenizers

    from labkit.models.chat_template import ChatTemplate, Message, RenderOptions, Tools

LONG_TEXT = 10_000  # characters or ids


class Tokenizer:
    """A model's tokenizer and its chat template.

    Special tokens are added as the model's files specify. ``template``: the chat template, or None
    where the model has none.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._decode_one = lru_cache(maxsize=1 << 16)(self._decode)
        self.template = template

    @property
    def vocab_size(self) -> int:
        """The number of token ids, including special tokens."""
        return int(self._tokenizer.get_vocab_size())

    @cached_property
    def max_token_characters(self) -> int:
        """The length of the longest token (characters), special tokens included."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return a text's token ids; ``special``: whether to add the model's special tokens.

        Raises
        ------
        ConfigError
            The text is not valid Unicode.
        """
        try:
            if len(text) < LONG_TEXT:
                return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
            # A batch releases the GIL, so other threads run during the seconds this may take.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except TypeError:
            raise ConfigError("the text is not valid Unicode (lone surrogate)") from None
        return list(encoding.ids)

    def encode_chat(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the token ids of a conversation, up to the start of the model's next message.

        Raises
        ------
        ConfigError
            The model has no chat template, or the template refuses the conversation or the tools.
        """
        return self.encode(self.render_chat(messages, tools), special=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        options: RenderOptions | None = None,
    ) -> str:
        """Return the text of a conversation, by default up to the start of the next message.

        Raises the same errors as ``encode_chat``.
        """
        if self.template is None:
            raise ConfigError(
                "the model has no chat template; send a text instead of a conversation"
            )
        return self.template.render(messages, tools, options)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
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

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens as text."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token such as ``<|eos|>``, or None if there is no such token."""
        token_id = self._tokenizer.token_to_id(token)
        return None if token_id is None else int(token_id)


def load(model_dir: Path) -> Tokenizer:
    """Load ``tokenizer.json`` and the chat template of a model directory.

    Raises
    ------
    ConfigError
        ``tokenizer.json`` is missing or the tokenizers library cannot read it, or the template is
        not valid Jinja.
    """
    import tokenizers

    from labkit.models import chat_template

    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: {one_line(error)}") from None
    return Tokenizer(loaded, chat_template.load_template(model_dir))
