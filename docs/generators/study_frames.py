"""Generator of ``docs/study_frames.ipynb``, a notebook that reads a committed study with pandas.

    python -m docs.generators.study_frames > docs/study_frames.ipynb

The notebook's code runs here, in the repository's folder, and its printed text is stored in it.
"""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

STUDY = "outputs/reference/seq_map.zip"
CELLS = (
    """# A study in pandas

`labkit.analysis.load` gives a study's runs, verdicts and requests as data frames. This notebook
reads a committed study. Start it in the repository's folder, and put in your own study's.""",
    f"""from labkit.analysis import load

STUDY = "{STUDY}"
runs = load(STUDY)
print(runs.columns.to_list())
print(len(runs), "lines,", runs.run.nunique(), "runs")""",
    """The last columns are the options in which the arms or cells differ. A run's value is the
median of its repeats; the process is the unit of inference, so no test counts repeats.""",
    """times = runs[(runs.metric == "dispatch_us") & (runs.case == "decode, 64 reqs, ctx 128")]
by_arm = times.groupby(["engine.attention.resolver", "arm"]).value
print(by_arm.agg(["count", "median", "min", "max"]).round(1).to_string())""",
    """The arms of a block took turns, so the test is about their ratio within the block:""",
    """blocks = times.pivot(index="block", columns="arm", values="value")
change = 100 * (blocks["seq_map"] / blocks["binary_search"] - 1)
print(change.describe().round(2).to_string())""",
    """The verdicts, with corrected intervals, as the report shows them:""",
    """verdicts = load(STUDY, "verdicts")
decided = verdicts[(verdicts.role == "arm") & verdicts.primary]
columns = ["case", "effect_pct", "ci_low_pct", "ci_high_pct", "p_adjusted", "verdict"]
print(decided[columns].round(3).to_string(index=False))""",
    """Studies that served requests have a third table, `load(STUDY, "requests")`: one line per
request with `ttft_ms`, `e2e_ms` and the list `itl_ms`. labkit installs matplotlib, for figures:""",
    """axes = blocks.plot(marker=".", ylabel="us per launch", title="one process per block")""",
)


def notebook() -> str:
    """Return the notebook as nbformat 4.5 JSON, after running its code."""
    names: dict[str, Any] = {}
    cells = [_cell(index, source, names) for index, source in enumerate(CELLS)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    body = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def _cell(index: int, source: str, names: dict[str, Any]) -> dict[str, Any]:
    """Return a text cell if ``index`` is even, else a code cell with what its code printed."""
    cell: dict[str, Any] = {"id": f"cell{index}", "metadata": {}}
    lines = source.splitlines(keepends=True)
    if index % 2 == 0:
        return {"cell_type": "markdown", **cell, "source": lines}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, f"<cell {index}>", "exec"), names)
    text = printed.getvalue().splitlines(keepends=True)
    stream = {"name": "stdout", "output_type": "stream", "text": text}
    outputs = [stream] if text else []
    return {
        "cell_type": "code",
        "execution_count": (index + 1) // 2,
        **cell,
        "outputs": outputs,
        "source": lines,
    }


if __name__ == "__main__":
    import warnings

    import matplotlib

    matplotlib.use("Agg")
    warnings.simplefilter("ignore")
    print(notebook(), end="")
