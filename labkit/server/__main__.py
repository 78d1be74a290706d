"""The server's process: ``python -m labkit.server FD``, started by ``labkit.serve``.

``FD`` is an open file that holds the checked config as JSON. Exit codes: 0 where a signal
ended it, 2 with one line where it cannot serve, 130 where ctrl-C came before it served.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.cli_errors import print_error
from labkit.config import ConfigError, Engine, Serve, from_plain

if TYPE_CHECKING:
    from labkit.engine.engine_protocol import InferenceEngine
    from labkit.models import ModelDir
    from labkit.models.tokenizer import Tokenizer

PROG = "labkit.serve"
WARM_ROWS = 16  # requests that the warm-up serves together at most


def main() -> int:
    """Serve; return the exit code."""
    with os.fdopen(int(sys.argv[1]), encoding="utf-8") as file:
        asked = from_plain(Serve, json.load(file))
    try:
        serve(asked)
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        if not isinstance(error, ConfigError) and not type(error).__module__.startswith("labkit."):
            raise
        return print_error(PROG, error)
    return 0


def serve(asked: Serve) -> None:
    """Load, warm up, and serve until a signal; or talk in this terminal."""
    if asked.shell:
        from labkit.server.chat_shell import Shell

        loaded = load(asked)
        Shell(loaded.engine, loaded.tokenizer, asked.server.max_output_tokens).run()
        return
    from labkit.server import http_listener, routes
    from labkit.server.serving_service import Service

    bound = http_listener.bind(asked.server)
    loaded, name = load(asked), asked.server.model_name
    service = Service(
        asked.server, name or loaded.model.name, loaded.tokenizer, loaded.engine, loaded.model
    )
    where = http_listener.url(bound)

    # What was loaded stays: looking through it again would stop every stream for some 0.1 s.
    gc.collect()
    gc.freeze()

    def ready() -> None:
        engine = asked.engine.name
        note(f"{where} serves {service.name} (engine={engine}); ctrl-C stops it")

    http_listener.run(service, routes.create_app(service), bound, ready)
    note("stopped")


def note(line: str) -> None:
    """Print a line for whoever started the server."""
    print(f"{PROG}: {line}", flush=True)


@dataclass(frozen=True)
class Loaded:
    """A model that has generated tokens."""

    model: ModelDir
    tokenizer: Tokenizer
    engine: InferenceEngine


def load(asked: Serve) -> Loaded:
    """Settle what the process has one of, load the model, and generate a token."""
    note(f"loading model={asked.model.name}")
    settle(asked.engine)
    from labkit import models
    from labkit.engine.engine_factory import create
    from labkit.models import tokenizer
    from labkit.server.engine_thread import warm_up

    model = models.resolve(asked.model)
    reader = tokenizer.load(model.path)
    engine = create(asked.engine, model.path)
    warm_up(engine, min(WARM_ROWS, asked.engine.scheduler.max_num_seqs), model.vocab_size)
    return Loaded(model, reader, engine)


def settle(engine: Engine) -> None:
    """Set what a process has one of, as a run's worker does."""
    from labkit.machine import openblas_for_mlx, process_memory_limit, worker_environment

    with worker_environment.numba_without_scipy():
        import numba

        from labkit.cpu import thread_pool

        thread_pool.install()
    if engine.memory_limit is not None:
        process_memory_limit.apply_memory_limit(engine.memory_limit)
    openblas_for_mlx.activate(
        engine.blas.value, worker_environment.blas_threads(engine.name, engine.threads)
    )
    budget = engine.threads or worker_environment.core_count()
    numba.set_num_threads(min(budget, numba.config.NUMBA_NUM_THREADS))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking LLVM and the thread pools apart would only cost time.
    os._exit(status)
