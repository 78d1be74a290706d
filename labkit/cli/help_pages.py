"""``--help``: the overview, or one topic. Hydra is not needed for either."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from labkit.cli.hydra_arguments import CONF
from labkit.config import ConfigError, count_text
from labkit.config.option_index import OptionEntry, did_you_mean, entry_lines, option_groups

ALL = "all"
HEAD = """labkit: a laboratory for LLM inference engines on MLX

A question is an ablation (its arms), asked of a workload, on an engine and a model.
Choose one of each group; -m goes last.
"""
FOOT = """Examples
  python -m labkit engine=paged ablation=seq_map -m          one question, one table
  python -m labkit workload=chat,ragged ablation=seq_map -m  one cell per combination
  python -m labkit engine.kv.block_size=8,16,32 -m           the best value, with the others like it
  python -m labkit ablation=seq_map plan=true                the schedule, nothing run
  python -m labkit ablation=seq_map design.blocks=8 out=outputs/NAME -m
                                                             name a study; again: resume it
  python -m labkit --cfg job                                 every option's value, as YAML
  python -m labkit.doctor                                    what a minute can see here
  python -m labkit.report DIR                                rebuild tables and plots

Exit codes: 0 all gates held, 1 a gate or a run failed, 2 a mistake in the config, 130 interrupted.
""".rstrip()
QUESTION = re.compile(r"^question: *(.+)$", re.M)
Value = Callable[[OptionEntry], Any]


def overview(folders: Sequence[Path] = ()) -> str:
    """Return the groups with their choices, the topics, and examples."""
    files = (f"{group}: {', '.join(names)}" for group, names in choices(folders).items())
    groups = [group for group in option_groups() if group.path and group.entries]
    width = max(len(group.path) for group in groups)
    topics = (
        f"  {group.path:{width}}  {count_text(len(group.entries), 'option'):>10}  {group.meaning}"
        for group in groups
    )
    title = (
        "Change any option as group.option=value. --help TOPIC shows a topic's options, such as\n"
        "--help engine.kv; --help ablation the questions; --help all every option, with its value\n"
        "in this command:"
    )
    return "\n".join([HEAD, *files, "", title, "", *topics, "", FOOT])


def topic_page(topic: str, folders: Sequence[Path], value_of: Value) -> str:
    """Return a topic: the choices of a group, and the options of a part of the config.

    Raises ``ConfigError`` if there is no such topic.
    """
    groups, files = list(option_groups()), choices(folders)
    wanted = [
        entry
        for group in groups
        for entry in group.entries
        if topic == ALL or f"{entry.key}.".startswith((f"{topic}.", f"{topic}[]"))
    ]
    names = files.get(topic.replace(".", "/"), ())
    if topic != ALL and not wanted and not names:
        known = [*files, *(group.path for group in groups), ALL]
        raise ConfigError(f"--help {topic}: no such topic{did_you_mean(topic, known)}; see --help")
    options = [line for entry in wanted for line in entry_lines(entry, value_of(entry))]
    return "\n".join([*_choice_lines(topic.replace(".", "/"), names, folders), *options])


def choices(folders: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Return the files of each group of the config, labkit's own and those in ``folders``."""
    found: dict[str, set[str]] = {}
    for root in (CONF, *folders):
        for path in root.rglob("*.yaml"):
            group = path.parent.relative_to(root).as_posix()
            if group != ".":
                found.setdefault(group, set()).add(path.stem)
    return {group: sorted(found[group]) for group in sorted(found)}


def _choice_lines(group: str, names: Sequence[str], folders: Sequence[Path]) -> Iterator[str]:
    """Yield a line for each file of a group, with the question that it asks, if it does."""
    width = max(map(len, names), default=0)
    for name in names:
        paths = (root / group / f"{name}.yaml" for root in (*folders, CONF))
        text = next(path for path in paths if path.is_file()).read_text("utf-8")
        question = QUESTION.search(text)
        line = f"  {group}={name:{width}}  {question[1] if question else ''}".rstrip()
        yield from textwrap.wrap(line, 100, subsequent_indent=" " * (len(group) + width + 5))
    if names:
        yield ""
