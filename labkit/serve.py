"""``python -m labkit.serve engine=paged model=...``: serve a model over the OpenAI API.

This process validates the config and then replaces itself with :mod:`labkit.server`, which runs in
a worker's environment. Exit codes: 0 if a signal ended the server, 1 if its engine failed, 2 for an
invalid command (one line on stderr), 130 if ctrl-C was pressed before the server was ready.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import NoReturn

from labkit.cli.program_base import Program
from labkit.config import ConfigError, ServeConfig, from_plain, option_index, require, to_plain
from labkit.config.package_extras import MLX_PACKAGES, require_packages

# Packages of the extra ``server`` that the server imports.
REQUIRED_PACKAGES = (
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "msgspec",
    "prometheus_client",
    "llguidance",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. This returns, with an exit code, only if the server cannot start."""
    parser = Program(
        prog="python -m labkit.serve",
        description="Serve a model over the OpenAI API.",
        usage="%(prog)s [KEY=VALUE ...]",
        epilog="Options:\n\n" + option_index.help_lines(ServeConfig).replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="engine=, model=, ...")

    def body(options: argparse.Namespace) -> NoReturn:
        _become_server(compose(options.overrides))

    return parser.run(argv, body, refused=(ConfigError,))


def compose(overrides: Sequence[str]) -> ServeConfig:
    """Compose and validate the config; raise ``ConfigError`` for its first error."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from labkit.cli.hydra_arguments import CONF, read_override
    from labkit.experiment.hydra.hydra_error_text import config_errors_in_one_line

    for override in overrides:
        require("=" in override, f"{override}: not an override; write key=value")
    words = [read_override(override) for override in overrides]
    ConfigStore.instance().store(name="serve_schema", node=ServeConfig)
    with config_errors_in_one_line(overrides, ServeConfig):
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            composed = compose("serve", overrides=words)
        plain = OmegaConf.to_container(
            composed, resolve=True, throw_on_missing=True, enum_to_str=True
        )
        return from_plain(ServeConfig, plain)


def _become_server(config: ServeConfig) -> NoReturn:
    """Replace this process with the server's; raise ``ConfigError`` if it is not installed."""
    from labkit.machine import worker_environment

    require_packages((*REQUIRED_PACKAGES, *MLX_PACKAGES), "server")
    cores = worker_environment.core_count()
    environment, _ = worker_environment.worker_environment(
        os.environ, threads=config.engine.threads or cores, cores=cores
    )
    environment |= config.engine.mlx.environment()
    # Texts are tokenised one by one, so threads of the tokenizers library would be idle.
    environment["TOKENIZERS_PARALLELISM"] = "false"
    # Threads share one heap: glibc gives back the free end of the main one only, and each of the
    # others may keep 64 MB.
    environment.setdefault("MALLOC_ARENA_MAX", "1")
    # An unnamed file keeps the API key out of the process list and out of any directory.
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(to_plain(config)).encode())
        file.seek(0)
        os.set_inheritable(file.fileno(), True)
        command = [sys.executable, "-m", "labkit.server", str(file.fileno())]
        os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    sys.exit(main())
