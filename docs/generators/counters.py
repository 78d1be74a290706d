"""Generator of docs/counters.md: a table of every counter that a run may record.

``python -m docs.generators.counters > docs/counters.md``.
"""

from __future__ import annotations

from labkit.records.counter_registry import COUNTERS, Counter

HEAD = """\
# Counters

Every counter that a run may record. The counters of a run are in its record (`runs/*.json`, key
`counters`). An ablation claims them by name (`claims.engaged`), and a claim on a name that is not
in this table is refused before anything runs. A star in a name stands for a word; the possible
words are in parentheses after the meaning. You name the counters of your own classes: an arm with
your own engine or attention backend may claim any counter, an arm with your own resolver any
`resolver.*`, and every arm any counter whose name begins with `own.`. The forward passes of a draft
model are counted apart, with `draft.` before the name: `draft.forward.replayed`, `draft.device_ms`.

This page is generated from `labkit/records/counter_registry.py`:
`python -m docs.generators.counters > docs/counters.md`.

| counter | unit | meaning |
| --- | --- | --- |
"""


def page() -> str:
    """Return ``docs/counters.md``."""
    return HEAD + "".join(map(_row, COUNTERS))


def _row(counter: Counter) -> str:
    suffixes = _suffixes(counter)
    meaning = f"{counter.meaning} ({suffixes})" if suffixes else counter.meaning
    return f"| `{counter.name}` | {counter.unit} | {meaning} |\n"


def _suffixes(counter: Counter) -> str:
    """Describe the names that a counter family's ``*`` stands for; empty for a single counter."""
    if counter.is_numbered:
        return "a number"
    option = [] if counter.option is None else [f"the choices of `{counter.option}`"]
    return ", ".join(option + [f"`{suffix}`" for suffix in counter.suffixes])


if __name__ == "__main__":
    print(page(), end="")
