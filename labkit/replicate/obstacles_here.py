"""What this machine cannot run of an author's question, and what the archive would have run here.

Each obstacle is one line, named before anything starts, with what to install or set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from labkit.config import ConfigError, Experiment
from labkit.config.env_interpolation import EXPRESSION
from labkit.experiment.compose.cell_composer import obstacles
from labkit.experiment.compose.input_digests import class_paths
from labkit.records import Arm
from labkit.replicate.authors_question import TIME_S, AuthorsCell, ReaderOptions

# Options of a server that run, install and reach nothing; others are the author's to be trusted.
SAFE = ("preset", "float32", "api_key", "pause", "model", "api", "start_timeout_s", "silence_s",
        "most_late_ms")  # fmt: skip
SMALLER = "workload.num_requests, workload.concurrency or workload.max_pool_bytes"


def trusted_parts(cell: AuthorsCell) -> Iterator[str]:
    """Yield what an author's arms would run or read here besides labkit itself, one line each."""
    for arm in cell.tested:
        server: Mapping[str, Any] = arm.config.get("engine", {}).get("server", {})
        found = [f"the class {key}={path}" for key, path in class_paths(arm.config).items()]
        found += [f"engine.server.{n}={v}" for n, v in server.items() if v and n not in SAFE]
        found += [f"environment.{name}={value}" for name, value in arm.environment.items()]
        variables = sorted(set(EXPRESSION.findall(json.dumps(dict(arm.config)))))
        found += [f"the environment variable {name}" for name in variables]
        for part in found:
            yield f"arm {arm.name}: {part}: it is the author's, not labkit's; --trust runs it"


def cell_obstacles(cell: AuthorsCell, reader: ReaderOptions) -> Iterator[str]:
    """Yield a line for each reason why an arm of a cell cannot run on this machine."""
    arms: dict[str, list[str]] = {}
    for arm in cell.tested:
        found: list[object] = []
        try:
            experiment = cell.experiment(arm, reader, TIME_S)
            found += obstacles(experiment)
            found += () if found else _server_and_memory(experiment)
        except ConfigError as error:
            found.append(error)
        for reason in map(str, found):
            arms.setdefault(f"{reason}{_digests(arm, reason)}", []).append(arm.name)
    for text, arm_names in arms.items():
        every = len(arm_names) == len(cell.tested)
        yield f"{'every arm' if every else 'arm ' + ', '.join(arm_names)}: {text}"
    if not arms:
        try:
            cell.composed(reader, TIME_S)
        except ConfigError as error:
            yield str(error)


def _digests(arm: Arm, reason: str) -> str:
    """Return what to set and the digests of the files that a reason names, or nothing."""
    inputs = {n: digest for n, digest in arm.inputs.items() if f"{n.partition('/')[0]}=" in reason}
    keys = " and ".join(dict.fromkeys(name.partition("/")[0] for name in inputs))
    names = ", ".join(f"{name} {digest}" for name, digest in inputs.items())
    return f"; set {keys} to your copy of the author's (SHA-256: {names})" if inputs else ""


def _server_and_memory(experiment: Experiment) -> Iterator[str]:
    from labkit import workload
    from labkit.engine import openai
    from labkit.machine.facts import memory_capacity

    if experiment.engine.name == "openai":
        openai.check_installed(experiment.engine)
    needed, total = workload.estimate(experiment).bytes, memory_capacity.this_machine().total
    if needed > total:
        yield (
            f"it needs about {needed / 2**30:.1f} GiB of memory, and this machine has "
            f"{total / 2**30:.1f}; a smaller {SMALLER} asks a smaller question, which is "
            "counted as another"
        )
