"""The config of a command as YAML (``--cfg job``), and Hydra's other flags that only print."""

from __future__ import annotations

from typing import Any

from labkit.cli.command_line import PRINT_FLAGS, Command
from labkit.cli.study_command import run_hydra
from labkit.cli.study_composer import initialized
from labkit.config import require


def print_config(command: Command) -> None:
    """Print what a command asks of its config; ``-m`` is ignored beside a flag that prints.

    Hydra does not know the overrides that a scale selects, so they are given to it. The config of
    a job is composed and printed here, because Hydra would compose it once more.
    """
    from labkit.experiment.compose.cell_composer import with_scale_overrides
    from labkit.experiment.hydra.hydra_composer import Composer

    overrides, flags = list(command.overrides), list(command.flags)
    topic = flags[flags.index("--cfg") + 1] if "--cfg" in flags else None
    if topic is None:
        run_hydra([*overrides, *flags])
        return
    others = {flag for flag in flags if flag in PRINT_FLAGS} - {"--cfg"}
    composer = Composer()
    with initialized():
        overrides = with_scale_overrides(overrides, composer)
        tree = composer.tree(overrides) if topic == "job" and not others else None
    if tree is None:
        run_hydra([*overrides, *flags])
        return
    package = flags[flags.index("--package") + 1] if "--package" in flags else ""
    print(config_text(tree, package, "--resolve" in flags), end="")


def config_text(tree: Any, package: str = "", resolve: bool = False) -> str:
    """Return a config as YAML, or its part ``package`` (``engine.kv``).

    Raises
    ------
    ConfigError
        The config has no such part.
    """
    from omegaconf import Container, OmegaConf

    if resolve:
        OmegaConf.resolve(tree)
    if package in ("", "_global_"):
        return OmegaConf.to_yaml(tree)
    part = OmegaConf.select(tree, package)
    require(part is not None, f"--package {package}: the config has no such part")
    if not isinstance(part, Container):
        return f"{part}\n"
    return f"# @package {package}\n{OmegaConf.to_yaml(part)}"
