"""The files of questions: each ablation and experiment of conf/ as commands that ask them."""

from pathlib import Path

import yaml

from labkit.app import CONF

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
ABLATIONS = sorted(path.stem for path in (CONF / "ablation").glob("*.yaml"))


def source(group: str, name: str) -> str:
    """Return a file's text."""
    return Path(CONF, group, f"{name}.yaml").read_text("utf-8")


def scales(experiment: str) -> list[str]:
    """Name the scales that an experiment has; one without any is asked as it is."""
    return list((yaml.safe_load(source("experiment", experiment)) or {}).get("scales") or {})


def commands() -> list[tuple[str, ...]]:
    """Return every ablation's overrides, and every experiment's at each of its scales."""
    asked = [(f"ablation={name}",) for name in ABLATIONS]
    for name in EXPERIMENTS:
        asked += [(f"experiment={name}", f"scale={scale}") for scale in scales(name)]
    return asked
