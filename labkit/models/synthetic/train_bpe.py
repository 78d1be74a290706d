"""Train a byte-level BPE tokenizer of any vocabulary size on little text.

The ids are, in this order: the 256 bytes, the trained merges, invented words that fill the
vocabulary, ``<|bos|>``, ``<|eos|>``. Encoding and then decoding any text gives the same text. Every
id can be decoded, and no two ids have the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = "<|bos|>", "<|eos|>"
SPACE_MARKER = "Ġ"  # stands for a space in the vocabulary of byte-level BPE
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))


def train(texts: Iterable[str], *, vocab_size: int, seed: int) -> str:
    """Return the content of ``tokenizer.json`` for a tokenizer with ``vocab_size`` ids.

    The result depends only on the arguments and on the version of the tokenizers library.
    ``texts``: the texts from which merges are learned. A pair is merged if it occurs at least
    twice. ``vocab_size``: the number of ids, including special tokens; at least 258. ``seed``: the
    seed of the invented words.
    """
    if vocab_size < 258:
        raise ValueError(f"vocab_size={vocab_size}: must be 258 or more (256 bytes, 2 special)")
    num_plain = vocab_size - 2  # without the special tokens
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_plain,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    description: dict[str, Any] = json.loads(trained.to_str())
    vocab: dict[str, int] = description["model"]["vocab"]
    words = _invented_words(seed)
    while len(vocab) < num_plain:
        vocab.setdefault(next(words), len(vocab))
    full = Tokenizer.from_str(json.dumps(description))
    full.add_special_tokens([BOS, EOS])
    return str(full.to_str(pretty=True))


def _invented_words(seed: int) -> Iterator[str]:
    """Yield random words of three to nine letters with a leading space, without end."""
    generator = np.random.default_rng([seed, 0x766F6361])
    while True:
        lengths = generator.integers(3, 10, size=1024)
        letters = LETTERS[generator.integers(0, len(LETTERS), size=(1024, 9))]
        for length, row in zip(lengths, letters, strict=True):
            yield SPACE_MARKER + "".join(row[:length])
