"""Generator of docs/architectures.md: whether and how labkit serves each mlx_lm architecture.

``python -m docs.generators.architectures > docs/architectures.md``. The tables are those of
``tests/engine/architectures.py``, which ``tests/engine/model/test_architectures.py`` checks with a
tiny model of every architecture.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

TABLES = Path(__file__).parents[2] / "tests" / "engine" / "architectures.py"
HEAD = """\
# Architectures

How `engine=paged` serves the text models of mlx_lm 0.32. The tests build a tiny model of each
architecture with random weights. Its greedy tokens for three prompts of unequal lengths, computed
in one batch and in chunks, must equal those of plain mlx_lm, computed one prompt at a time. On
*NumPy*, mlx_lm's unedited class runs on NumPy arrays and labkit's kernels. On *MLX*, the class runs
on MLX and only attention is labkit's; the record of a run says why (`forward_reason`). Every model
is checked again when it is loaded.

*Fused* stands for `engine.attention.backend=fused`, the default. Its kernels read keys and values
of one width, and latent keys (DeepSeek V3 and its relatives) of up to 256 numbers, a multiple of
16. Other widths are refused in one line that names `engine.attention.backend=gather`. The layouts
`contiguous` and `padded` take any width. What is refused here says what to set instead.

This page is generated: `python -m docs.generators.architectures > docs/architectures.md`.

"""


def page() -> str:
    """Return ``docs/architectures.md``."""
    tables = _load_tables()
    served, on_numpy = tables.SERVED, sum(one.numpy for one in tables.SERVED.values())
    rows = [
        f"| `{name}` | {'NumPy' if one.numpy else 'MLX'} | {'yes' if one.fused else 'no'} |\n"
        for name, one in served.items()
    ]
    refused = {
        name: tables.REASONS.get(one.words, one.words) for name, one in tables.REFUSED.items()
    }
    return (
        f"{HEAD}{len(served)} are served, {on_numpy} of them on NumPy. {len(refused)} are refused, "
        f"and {len(tables.LEFT_OUT)} were not tried.\n\n## Served\n\n"
        "| architecture | runs on | fused |\n| --- | --- | --- |\n"
        + "".join(rows)
        + _reasons("Refused", refused)
        + _reasons("Not tried", tables.LEFT_OUT)
    )


def _load_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architectures_of_tests", TABLES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _reasons(title: str, reasons: Mapping[str, str]) -> str:
    rows = "".join(f"| `{name}` | {reason} |\n" for name, reason in reasons.items())
    return f"\n## {title}\n\n| architecture | reason |\n| --- | --- |\n{rows}"


if __name__ == "__main__":
    print(page(), end="")
