"""The server's process: ``python -m labkit.server FD``, started by ``labkit.serve``.

``FD`` is an open file descriptor from which the validated config is read as JSON. Exit codes: 0
after a signal stopped the running server, 1 (and a one-line message) if the engine failed, 2 (and
a one-line message) if the server cannot start, 130 if ctrl-C was pressed before the server was
ready, 141 if nobody reads the output.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import TYPE_CHECKING

from labkit.cli.program_base import discard_output, flush_output, print_error
from labkit.config import ConfigError, Engine, ServeConfig, from_plain

if TYPE_CHECKING:
    from labkit.engine.engine_protocol import InferenceEngine
    from labkit.models import ModelDir
    from labkit.models.tokenizer import Tokenizer

PROG = "labkit.serve"
MAX_WARM_UP_REQUESTS = 16  # concurrent requests


def main() -> int:
    """Run the server and return the exit code."""
    with os.fdopen(int(sys.argv[1]), encoding="utf-8") as file:
        options = from_plain(ServeConfig, json.load(file))
    try:
        return (_run_shell if options.shell else serve)(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads what it prints
        return discard_output()
    except ValueError as error:
        if not isinstance(error, ConfigError) and not type(error).__module__.startswith("labkit."):
            raise
        return print_error(PROG, error)


def _run_shell(options: ServeConfig) -> int:
    """Load the model, run the chat shell, and return the exit code, 0."""
    from labkit.server.chat_shell import MAX_REPLY_TOKENS, Shell

    _, tokenizer, engine = load(options)
    Shell(engine, tokenizer, options.server.max_output_tokens or MAX_REPLY_TOKENS).run()
    return 0


def serve(options: ServeConfig) -> int:
    """Serve HTTP until a signal arrives; return the exit code: 0, or 1 if the engine failed."""
    from labkit.server.generation.service import Service
    from labkit.server.http import http_listener, routes

    bound = http_listener.bind(options.server)
    model, tokenizer, engine = load(options)
    name = options.server.model_name or model.name
    service = Service(
        options.server,
        name,
        tokenizer,
        engine,
        model,
        takes_priorities=options.engine.scheduler.takes_priorities,
    )
    service.grammars.load_tokenizer()
    url = http_listener.url(bound)

    # Loaded objects are never garbage; scanning them would pause every stream for about 0.1 s.
    gc.collect()
    gc.freeze()

    def ready() -> None:
        print_status(f"{url} serves {name} (engine={options.engine.name}); ctrl-C stops it")

    http_listener.run(service, routes.create_app(service), bound, ready)
    if service.engine_failure is not None:
        print(f"{PROG}: {service.engine_failure}", file=sys.stderr)
        return 1
    print_status("stopped")
    return 0


def print_status(line: str) -> None:
    """Print a line to standard output, prefixed with the program's name."""
    print(f"{PROG}: {line}", flush=True)


def load(options: ServeConfig) -> tuple[ModelDir, Tokenizer, InferenceEngine]:
    """Configure this process; return the model, its tokenizer and a warmed-up engine."""
    print_status(f"loading model={options.model.name}")
    configure_process(options.engine)
    from labkit import models
    from labkit.models.tokenizer import load as load_tokenizer

    model = models.resolve(options.model)
    tokenizer = load_tokenizer(model.path)
    return model, tokenizer, _create_engine(options.engine, model)


def _create_engine(options: Engine, model: ModelDir) -> InferenceEngine:
    """Create an engine and warm it up; raise ``EngineError`` if it, or a user's class, fails."""
    from labkit.engine.engine_factory import create
    from labkit.engine.engine_protocol import EngineError
    from labkit.machine.exception_text import one_line
    from labkit.server.generation.engine_thread import warm_up

    requests = min(MAX_WARM_UP_REQUESTS, options.scheduler.max_num_seqs)
    try:
        engine = create(options, model.path)
        warm_up(engine, requests, model.vocab_size)
    except (MemoryError, RuntimeError) as error:  # NaN, a rank, MLX, a user's class
        raise EngineError(f"the engine cannot generate: {one_line(error)}") from error
    return engine


def configure_process(engine: Engine) -> None:
    """Set the thread pool, memory limit, BLAS and thread count as an experiment's worker does."""
    from labkit.machine import openblas_for_mlx, worker_environment
    from labkit.machine.processes import process_memory_limit

    with worker_environment.numba_without_scipy():
        import numba

        from labkit.cpu.runtime import thread_pool

        thread_pool.choose_layer()  # the pool itself is compiled with the kernels
    if engine.memory_limit is not None:
        process_memory_limit.apply_memory_limit(engine.memory_limit)
    openblas_for_mlx.activate(
        engine.blas.value, worker_environment.blas_threads(engine.name, engine.threads)
    )
    budget = engine.threads or worker_environment.core_count()
    numba.set_num_threads(min(budget, numba.config.NUMBA_NUM_THREADS))


if __name__ == "__main__":
    status = main()
    flush_output()
    sys.stderr.flush()
    # Skip the teardown of LLVM and the thread pools, which takes time.
    os._exit(status)
