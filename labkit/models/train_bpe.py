"""A byte-level BPE vocabulary of any size from a little text.

The ids are, in this order: the 256 bytes, the trained merges, invented words up to the
size asked for, ``<|bos|>``, ``<|eos|>``. Any text survives encode and decode; every id
decodes, and no two ids have the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = "<|bos|>", "<|eos|>"
SPACE_MARKER = "Ġ"  # how byte-level BPE writes the space in a token's name
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))


def train(texts: Iterable[str], *, vocab_size: int, seed: int) -> str:
    """Return the JSON of a tokenizer (``tokenizer.json``) with ``vocab_size`` ids.

    The same texts, size, seed and version of tokenizers give the same JSON.

    Parameters
    ----------
    texts
        What the merges are learned from; a pair must occur twice.
    vocab_size
        All ids, the special tokens included; at least 258.
    seed
        Of the invented words.
    """
    if vocab_size < 258:
        raise ValueError(f"vocab_size={vocab_size}: allowed are 258 or more (256 bytes, 2 special)")
    plain = vocab_size - 2
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=plain,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    description: dict[str, Any] = json.loads(trained.to_str())
    vocab: dict[str, int] = description["model"]["vocab"]
    words = _invented_words(seed)
    while len(vocab) < plain:
        vocab.setdefault(next(words), len(vocab))
    full = Tokenizer.from_str(json.dumps(description))
    full.add_special_tokens([BOS, EOS])
    return str(full.to_str(pretty=True))


def _invented_words(seed: int) -> Iterator[str]:
    """Yield words of three to nine letters with a leading space; repeats are possible."""
    generator = np.random.default_rng([seed, 0x766F6361])
    while True:
        lengths = generator.integers(3, 10, size=1024)
        letters = LETTERS[generator.integers(0, len(LETTERS), size=(1024, 9))]
        for length, row in zip(lengths, letters, strict=True):
            yield SPACE_MARKER + "".join(row[:length])
