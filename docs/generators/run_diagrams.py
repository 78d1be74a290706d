"""Generator of the pictures in docs/inside.md: the life of a run, and the protocol of turns.

``python -m docs.generators.run_diagrams`` writes ``docs/images/life-of-a-run.svg`` and
``docs/images/turns.svg``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from labkit.experiment.launch.turn_coordinator import SLICE_S
from labkit.experiment.worker.turn_protocol import VERSION

FOLDER = Path(__file__).parents[1] / "images"
LINE = 17  # height of a line of text
STYLE = """
text{font:13px system-ui,sans-serif;fill:#1f2328}.code{font:12px ui-monospace,monospace}
.soft{fill:#59636e}.title{font-weight:600}.paper{fill:#fff}.parent{fill:#ddf4ff}
.worker{fill:#fff1e5}.disk{fill:#f0f1f3}path,.process{fill:none}path,.frame{stroke:#8c959f}
.stopped{stroke-dasharray:2 5}.head{fill:#8c959f;stroke:none}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.paper{fill:#0d1117}
.parent{fill:#12304d}.worker{fill:#42290f}.disk{fill:#21262d}}
"""
# Boxes of the life of a run: lane, first line of the grid, number and module, what it does.
BOXES = (
    (0, 0, "1  labkit/app.py, labkit/cli", "the command; later its exit code"),
    (0, 1, "2  labkit/experiment/compose", "YAML and overrides become checked cells"),
    (0, 2, "3  labkit/cli/study_runner.py", "model and prompts are built once"),
    (
        0,
        3,
        "4  labkit/experiment/schedule",
        "missing blocks, in random order",
    ),
    (0, 4, "5  labkit/experiment/launch", "a fresh process; a record however it ends"),
    (1, 4, "6  labkit/experiment/worker", "probe, load, warm up, measure, probe"),
    (1, 5, "7  labkit/workload", "arms take turns: launches, or slices of steps"),
    (1, 6, "8  labkit/engine", "schedule, forward, sample: a step"),
    (1, 7, "9  labkit/cpu, labkit/metal", "kernels, which count and stamp"),
    (0, 7, "10 labkit/experiment/schedule", "the record is checked and published"),
    (0, 8, "11 labkit/analysis", "gates, permutation tests, verdicts"),
    (0, 9, "12 labkit/analysis", "tables, charts, pages"),
)
FILES = (
    (2, "CELL/.hydra/config.yaml"),
    (3, "CELL/cell.json, design.json", "CELL/arms/ARM.json", "CELL/SHA256SUMS"),
    (4, "CELL/runs/b00-p02-ARM.log"),
    (6, "CELL/runs/pending/b00-p02-ARM.json", "CELL/traces/SHA256.json.gz"),
    (7, "CELL/runs/b00-p02-ARM.json", "CELL/SHA256SUMS"),
    (8, "CELL/cell.json, with the results"),
    (9, "study.json, tables/, plots/", "report.md, report.html"),
)
X, WIDTHS, STEP, TOP = (20, 385, 730), (330, 310, 265), 74, 64
# Arrows from a box to the next one: lane and row.
DOWN = (*((0, row) for row in range(4)), (0, 7), (0, 8), (1, 4), (1, 5), (1, 6))


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a rectangle with round corners."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return an arrow along one axis."""
    dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    wings = [(x2 - 8 * dx + 4 * s * dy, y2 - 8 * dy + 4 * s * dx) for s in (1, -1)]
    (ax, ay), (bx, by) = wings
    head = f'<path class="head" d="M{x2} {y2}L{ax} {ay}L{bx} {by}z"/>'
    return f'<path d="M{x1} {y1}L{x2 - 6 * dx} {y2 - 6 * dy}"/>{head}'


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return a picture with a background of its own, so that it can be read on any page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f'<rect class="paper" width="{width}" height="{height}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def life_of_a_run() -> str:
    """Return the picture of the life of a run, from the command to the table."""
    lanes = (
        "The parent process: no MLX",
        "A worker process: no Hydra",
        "On disk, in the study's folder",
    )
    parts = [text(x, 28, lane, "title") for x, lane in zip(X, lanes, strict=True)]
    y = [TOP - 16 + STEP * row for row in range(10)]
    for lane, row, module, does in BOXES:
        parts.append(box(X[lane], y[row], WIDTHS[lane], 50, ("parent", "worker")[lane]))
        parts.append(text(X[lane] + 10, y[row] + 21, module, "code"))
        parts.append(text(X[lane] + 10, y[row] + 40, does, "soft"))
    for row, *names in FILES:
        parts.append(box(X[2], y[row], WIDTHS[2], 12 + LINE * len(names), "disk"))
        lines = enumerate(names, 1)
        parts += [text(X[2] + 10, y[row] + 4 + LINE * i, name, "code") for i, name in lines]
    parts += [arrow(X[lane] + 40, y[row] + 50, X[lane] + 40, y[row + 1]) for lane, row in DOWN]
    right, left = X[0] + WIDTHS[0], X[1] - 9
    parts.append(box(left, y[4] - 9, WIDTHS[1] + 18, y[7] - y[4] + 68, "process frame"))
    parts += [arrow(right, y[4] + 25, left, y[4] + 25), arrow(left, y[7] + 25, right, y[7] + 25)]
    parts.append(arrow(X[0] + 40, y[7], X[0] + 40, y[4] + 50))
    parts.append(text(X[0] + 56, y[6] - 8, "the next process, the next block,", "soft"))
    parts.append(text(X[0] + 56, y[6] + 10, "until a look decides or all blocks are done", "soft"))
    return svg(1010, y[-1] + 70, "The life of a run: modules and files, in order", parts)


def messages() -> Iterator[tuple[str, int, str]]:
    """Yield the messages between the coordinator and two workers: direction, worker, text."""
    for worker in (0, 1):
        yield "from", worker, f'["hello", {VERSION}]'
    for worker in (0, 1):
        yield "to", worker, '["probe", null]'
        yield "from", worker, '["probed", null]'
    for direction, verb in (("to", "load"), ("from", "loaded")):
        for worker in (0, 1):
            yield direction, worker, f'["{verb}", null]'
    for worker in (0, 1):
        yield "to", worker, '["warm_up", null]'
        yield "from", worker, '["slices", null]'
    for worker, last in ((1, False), (0, False), (0, True), (1, True)):
        yield "to", worker, f'["turn", {SLICE_S}]'
        yield "from", worker, '["values", [...]]' if last else '["done", null]'
    for worker in (1, 0):
        yield "to", worker, '["gathered", [...]]'
        yield "end", worker, "writes its record and ends"


def turns() -> str:
    """Return the sequence diagram of the protocol of turns, for two arms that serve requests."""
    centre, sides, step, top = 505, (160, 850), 25, 84
    lanes = (
        (centre, "coordinator, in the parent", "labkit/experiment/launch/turn_coordinator.py"),
        (sides[0], "worker of arm A", "labkit/experiment/worker/granted_turns.py"),
        (sides[1], "worker of arm B", "labkit/experiment/worker/granted_turns.py"),
    )
    sent = list(messages())
    bottom = top + step * len(sent)
    parts = [text(x, 30, name, "title", "middle") for x, name, _ in lanes]
    parts += [text(x, 49, module, "code soft", "middle") for x, _, module in lanes]
    ends = [bottom, *(top + step * row for row, one in enumerate(sent) if one[0] == "end")]
    for (x, *_), end in zip((lanes[0], lanes[2], lanes[1]), ends, strict=True):
        parts.append(f'<path class="stopped" d="M{x} 60V{end}"/>')
    working = dict.fromkeys((0, 1), 60)  # since when a worker has worked
    for row, (direction, worker, words) in enumerate(sent):
        y, x = top + step * row, sides[worker]
        if direction == "to":
            working[worker] = y
            parts.append(arrow(centre, y, x, y))
        else:
            parts.append(box(x - 6, working[worker], 12, y - working[worker], "worker frame"))
        if direction == "from":
            parts.append(arrow(x, y, centre, y))
        if direction == "end":
            parts.append(text(x, y + 15, words, "soft", "middle"))
        else:
            parts.append(text((centre + x) / 2, y - 5, words, "code", "middle"))
    return svg(1010, bottom + 10, "The protocol of turns between two live workers", parts)


PICTURES = {"life-of-a-run.svg": life_of_a_run, "turns.svg": turns}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (FOLDER / name).write_text(picture(), encoding="utf-8")
