"""The config of a command as YAML (``--cfg job``), and Hydra's other flags that only print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from labkit.cli.hydra_arguments import CONF, Command
from labkit.cli.multirun_composition import initialized, register
from labkit.cli.run_study import run_hydra
from labkit.config import ConfigError, require
from labkit.config.option_index import OptionEntry, value_of


def print_config(command: Command) -> None:
    """Print what a command asks of its config; ``-m`` is ignored beside a flag that prints.

    Hydra does not know the overrides that a scale selects, so they are given to it. The config of
    a job is composed and printed here, because Hydra would compose it once more.
    """
    overrides, flags = list(command.overrides), list(command.flags)
    if "--help" in flags:
        print(_help(command))
        return
    if "--shell-completion" in flags:
        from labkit.cli.shell_completion import completion_script

        shells = [word for word in overrides if word.startswith("install=")]
        print(completion_script(shells[-1].partition("=")[2]), end="")
        return
    register()
    from labkit.experiment.compose.cell_composer import with_scale_overrides
    from labkit.experiment.hydra.hydra_composer import Composer

    topic = flags[flags.index("--cfg") + 1] if "--cfg" in flags else None
    if topic is None:
        run_hydra([*overrides, *flags])
        return
    composer = Composer()
    with initialized():
        overrides = with_scale_overrides(overrides, composer)
        tree = composer.tree(overrides) if topic == "job" else None
    if tree is None:
        run_hydra([*overrides, *flags])
        return
    package = flags[flags.index("--package") + 1] if "--package" in flags else ""
    print(config_text(tree, package, "--resolve" in flags), end="")


def _help(command: Command) -> str:
    """Return the page that ``--help`` asks for; overrides beside it change the values shown."""
    from labkit.cli import help_pages

    flags, overrides = command.flags, command.overrides
    topic = next((word for word in flags if not word.startswith("-")), None)
    folders: list[Path] = []
    if any(word.startswith("hydra.searchpath=") for word in overrides):
        from labkit.experiment.hydra.hydra_composer import config_folders

        folders = [Path(folder) for folder in config_folders(overrides)]
    own = len(overrides) > bool(folders)
    if topic is None and not own:
        return help_pages.overview(folders)
    if topic in (None, help_pages.ALL) or own:
        return help_pages.topic_page(topic or help_pages.ALL, folders, _values(overrides))
    return help_pages.topic_page(topic, folders, _value_of_default_files())


def _value_of_default_files() -> Callable[[OptionEntry], Any]:
    """Return what gives an option's value in a command without overrides, without composing it."""
    import yaml  # type: ignore[import-untyped]

    def read(file: Path) -> dict[str, Any]:
        content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        return content

    tree = read(CONF / "config.yaml")
    for choice in tree.pop("defaults"):
        for group, name in choice.items() if isinstance(choice, dict) else ():
            if (CONF / group / f"{name}.yaml").is_file():
                tree[group] = read(CONF / group / f"{name}.yaml")

    return lambda entry: value_of(tree, entry.key, entry.option.default)


def _values(overrides: Sequence[str]) -> Callable[[OptionEntry], Any]:
    """Return what gives an option's value, as it is written, in the config of a command."""
    from omegaconf import OmegaConf

    from labkit.experiment.compose.cell_composer import with_scale_overrides
    from labkit.experiment.hydra.hydra_composer import Composer

    register()
    composer = Composer()
    with initialized():
        tree = composer.tree(overrides)
        with suppress(ConfigError):  # a page is shown even if options contradict each other
            tree = composer.tree(with_scale_overrides(overrides, composer))
    # Not resolved: a value may be that of an environment variable, and secret.
    plain = OmegaConf.to_container(tree)
    return lambda entry: value_of(plain, entry.key)


def config_text(tree: Any, package: str = "", resolve: bool = False) -> str:
    """Return a config as YAML, or its part ``package`` (``engine.kv``).

    Raises ``ConfigError`` if the config has no such part.
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
