"""``python -m labkit.server.grammar_trial_worker``: try grammars in a process that can be killed.

llguidance cannot be interrupted, and a short schema can occupy it for minutes and allocate
gigabytes. So the server has this process compile a grammar first. Standard input has a
``GrammarSource`` per line, as JSON. For each of them, a line of standard output has the reason that
the grammar cannot be enforced, or null. The first line of output, null, is written when the
process is ready.

The process ends when its input ends, when its parent dies, or when a grammar needs more memory than
allowed (``OUT_OF_MEMORY``). The parent kills it if a grammar takes too long.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil

from labkit.machine import parent_death
from labkit.server.grammar_compiler import (
    GrammarCompiler,
    GrammarError,
    GrammarSource,
    error_text,
)

OUT_OF_MEMORY = 3  # exit code
NICENESS = 5  # running requests go first
POLL_S = 0.01
# Tokens to generate. Compiling is not enough: a grammar may fail after the first tokens, or its
# masks may be so slow that they would delay every step of the engine.
NUM_TOKENS = 4
MAX_MASK_CPU_S = 0.01


def main() -> int:
    """Answer each line of standard input until it ends."""
    options = json.loads(sys.argv[1])
    parent_death.watch_parent(
        options["parent"], None, started_by_main_thread=options["started_by_main_thread"]
    )
    os.nice(NICENESS)
    compiler = GrammarCompiler(
        Path(options["tokenizer_json"]), options["vocab_size"], options["eos_token_ids"]
    )
    _ = compiler.tokenizer
    memory = MemoryLimit(options["memory_bytes"])
    _answer(None)
    for line in sys.stdin:
        memory.restart()
        _answer(try_grammar(compiler, GrammarSource(**json.loads(line))))
    return 0


def _answer(reason: str | None) -> None:
    print(json.dumps(reason), flush=True)


def try_grammar(compiler: GrammarCompiler, source: GrammarSource) -> str | None:
    """Compile a grammar and generate ``NUM_TOKENS`` arbitrary tokens with it.

    Returns
    -------
    str or None
        The reason that the grammar cannot be enforced (one line), or None.
    """
    try:
        matcher = compiler.compile(source)
    except GrammarError as error:
        return str(error)
    started = time.thread_time()
    for _ in range(NUM_TOKENS):
        token = _allowed_token(matcher.compute_bitmask())
        if token is None or matcher.is_stopped():
            break
        matcher.consume_token(token)
    if time.thread_time() - started > NUM_TOKENS * MAX_MASK_CPU_S:
        return f"its token masks take longer than {MAX_MASK_CPU_S * 1000:g} ms each"
    return error_text(matcher) if matcher.is_error() else None


def _allowed_token(mask: bytes) -> int | None:
    """Return a token id that the mask allows, or None if it allows none.

    The search begins in the middle of the mask.
    """
    middle = len(mask) // 2
    for start, part in ((middle, mask[middle:]), (0, mask[:middle])):
        for at, bits in enumerate(part, start):
            if bits:
                return 8 * at + bits.bit_length() - 1
    return None


class MemoryLimit:
    """A thread that ends this process when its memory has grown by more than ``limit_bytes``.

    The growth is that of the resident size since the last call of ``restart``.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._process = psutil.Process()
        self._most_bytes: float = float("inf")
        threading.Thread(target=self._watch, daemon=True).start()

    def restart(self) -> None:
        """Measure the growth from the current resident size on."""
        self._most_bytes = self._resident_bytes() + self._limit_bytes

    def _resident_bytes(self) -> Any:
        return self._process.memory_info().rss

    def _watch(self) -> NoReturn:
        while True:
            time.sleep(POLL_S)
            if self._resident_bytes() > self._most_bytes:
                os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    sys.exit(main())
