"""Generator of docs/options.md: a table of every option of the configuration schema.

``python -m docs.generators.options > docs/options.md``.
"""

from __future__ import annotations

from collections.abc import Iterator

from labkit.config import EXTERNAL_ENGINES, ServeConfig
from labkit.config.option import override_text
from labkit.config.option_index import OptionEntry, OptionGroup, option_groups

HEAD = """\
# Options

Every option of a study, as `group.option=value` on the command line, in a file of `conf/` or in an
arm. `python -m labkit --help all` shows them with the values of a command, `--cfg job` their
values alone. An option that is read only under certain choices of another one (column "read by")
must be left at its default under the others. An option of `engine` that `engine=mlx_lm` or
`engine=openai` does not have must be left at its default there; column "read by" names those that
they have. A server (`python -m labkit.serve`) has `engine`, `model` and the options at the end of
this page.

Seconds and bytes may have a unit (`10m`, `1GiB`) on the command line, in an arm, in a sweep's
values and in an experiment's scale. Elsewhere in a file they are plain numbers.

Column "default" is what an option is if nothing sets it. Files of `conf/` set others, such as
`design=standard` (two minutes) and `workload=chat`, which every command has unless it chooses
another, and `out` gets a folder named by the time; `python -m labkit --help design` shows them.

This page is generated from `labkit/config/`: `python -m docs.generators.options > docs/options.md`.
"""

TABLE_HEAD = "| option | default | allowed | meaning | read by |\n| --- | --- | --- | --- | --- |"


def page() -> str:
    """Return ``docs/options.md``."""
    sections = "\n".join(map(_section, _titled_groups()))
    return f"{HEAD}\n{sections}"


def _titled_groups() -> Iterator[tuple[str, OptionGroup]]:
    """Yield each section's title and group: the study's groups, then those only of a server."""
    study_groups = list(option_groups())
    study_paths = {group.path for group in study_groups if group.path}
    titled = [(group.path or "The command", group) for group in study_groups]
    for group in option_groups(ServeConfig):
        if group.path not in study_paths:
            titled.append((group.path or "`python -m labkit.serve`", group))
    yield from ((title, group) for title, group in titled if group.entries)


def _section(titled_group: tuple[str, OptionGroup]) -> str:
    title, group = titled_group
    rows = "\n".join(_row(entry, group) for entry in group.entries)
    return f"## {title}\n\n{group.meaning}\n\n{TABLE_HEAD}\n{rows}\n"


def _row(entry: OptionEntry, group: OptionGroup) -> str:
    name, default = entry.key.removeprefix(f"{group.path}."), override_text(entry.option.default)
    readers = [f"`{entry.readers}`"] if entry.readers else []
    readers += [f"`{engine}`" for engine in EXTERNAL_ENGINES if getattr(entry.option, engine)]
    cells = (
        f"`{name}`",
        f"`{default}`" if default else "",
        entry.allowed,
        entry.meaning,
        ", ".join(readers),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
