"""Grammar trials, in a process that can be killed (``python -m`` this module).

llguidance cannot be interrupted, and a short schema can occupy it for minutes and allocate
gigabytes. So the server has this process compile a grammar first. A task is a ``GrammarSource``;
its answer is the reason that the grammar cannot be enforced, or null.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from labkit.server.constraints.grammar_compiler import (
    GrammarCompiler,
    GrammarError,
    GrammarSource,
    error_text,
)
from labkit.server.killable_process_loop import answer_tasks

NICENESS = 5  # running requests go first
# Tokens to generate. Compiling is not enough: a grammar may fail after the first tokens, or its
# masks may be so slow that they would delay every step of the engine.
NUM_TOKENS = 4
MAX_MASK_CPU_S = 0.01


def prepare(setup: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return the function that tries a grammar. Without tokenizer it answers the reason."""
    os.nice(NICENESS)
    compiler = GrammarCompiler(**setup["compiler"])
    try:
        _ = compiler.tokenizer
    except GrammarError as error:
        reason = str(error)
        return lambda task: reason
    return lambda task: _try_grammar(compiler, GrammarSource(**task))


def _try_grammar(compiler: GrammarCompiler, source: GrammarSource) -> str | None:
    """Generate arbitrary tokens with a grammar; return the reason that it cannot be enforced."""
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
    """Return a token id that the mask allows, from its middle on, or None if it allows none."""
    middle = len(mask) // 2
    for start, part in ((middle, mask[middle:]), (0, mask[:middle])):
        for at, bits in enumerate(part, start):
            if bits:
                return 8 * at + bits.bit_length() - 1
    return None


if __name__ == "__main__":
    sys.exit(answer_tasks(prepare))
