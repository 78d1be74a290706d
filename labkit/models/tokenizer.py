"""Text to token ids and back, with the tokenizers library alone (no transformers)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.config import ConfigError

if TYPE_CHECKING:
    import tokenizers

    from labkit.models.chat_template import ChatTemplate, Message, Tools


class Tokenizer:
    """A model's tokenizer. Special tokens are added as the model's own files say.

    ``template`` writes conversations as the model was trained to read them; None: the model
    knows no such form.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._decode_one = lru_cache(maxsize=1 << 16)(self._decode)
        self.template = template

    @property
    def vocab_size(self) -> int:
        """How many ids there are, the special tokens included."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Turn text into token ids; ``special``: with the tokens that the model's files add."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def encode_chat(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Turn a conversation into the token ids before the model's next answer.

        Raises
        ------
        ConfigError
            The model has no chat template, or it refuses the conversation or the tools.
        """
        if self.template is None:
            raise ConfigError("chat template: the model has none")
        return self.encode(self.template.render(messages, tools), special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text; special tokens are written out."""
        # A single id is asked for with every token of every stream.
        return self._decode_one(ids[0]) if len(ids) == 1 else self._decode(*ids)

    def _decode(self, *ids: int) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def piece(self, token: int) -> str:
        """Return the text of one id inside a text, with the space that it begins with.

        Some tokenizers drop the first space of a text, so the id is decoded twice in a row
        and its first time taken off. Empty for an id that there is not.
        """
        return self.decode([token, token])[len(self.decode([token])) :]

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts of the special tokens."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token given by its name, such as ``<|eos|>``."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)


def load(model_dir: Path) -> Tokenizer:
    """Load ``tokenizer.json`` and the chat template of a model directory.

    Raises
    ------
    ConfigError
        It is missing or the tokenizers library cannot read it, or the template is no Jinja.
    """
    import tokenizers

    from labkit.models import chat_template

    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        read = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    return Tokenizer(read, chat_template.load_template(model_dir))
