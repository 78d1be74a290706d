"""Generator of the articles' pictures: videos, throughput by clients, a GPU's ladder, Q-blocks.

``python -m docs.generators.article_pictures`` writes them to ``docs/images``. They are 400 units
wide, which a phone can show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from docs.generators.binary_search_steps import BATCH, prefix_sums, qblock_keys
from docs.generators.run_diagrams import FOLDER, text
from labkit.analysis.document.svg_chart_renderer import COLOURS
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import value_text
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.kernel_constants import BQ
from labkit.records import open_study

WIDTH, MARGIN = 400, 12
INSIDE = WIDTH - 2 * MARGIN
STYLE = """
text{font:13px system-ui,sans-serif;fill:#1f2328}.soft{fill:#59636e}.title{font-weight:600}
.small{font-size:11px}.paper{fill:#fff}.key{fill:#9fcbe8}.past{fill:#e3e7eb}.both{fill:#f7f8f9}
.frame{stroke:#8c959f;stroke-width:1}.read{stroke:#1f2328;stroke-width:2}
path,line{fill:none;stroke:#59636e}.grid{stroke:#d0d7de}.level{fill:#0072b2;fill-opacity:.12}
.surplus{fill:none;stroke-dasharray:3 3}.pick{fill:#d55e00}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#a3adb8}.paper{fill:#0d1117}
.key{fill:#1f5f87}.past{fill:#39414a}.both{fill:#1d2226}.read{stroke:#e6edf3}
path,line{stroke:#a3adb8}.grid{stroke:#39414a}.level{fill-opacity:.3}}
"""
GOP = "IBBPBBPBBP"
PICK = 15  # a B-frame of the second of two GOPs
WORST_POINTS = 60  # the length of the scale, a little beyond the largest loss
KINDS = {"I": "key", "P": "past", "B": "both"}


def svg(height: float, title: str, parts: Sequence[str], style: str = "") -> str:
    """Return a picture with a background of its own."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" role="img"><title>{escape(title)}</title>'
        f"<style>{style}{STYLE}</style>"
        f'<rect class="paper" width="{WIDTH}" height="{height:g}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'


def needed(frames: str, pick: int) -> list[int]:
    """Return the frames that a pick is decoded from: its own references and theirs."""
    last_anchor = max(i for i in range(pick + 1) if frames[i] != "B")
    start = max(i for i in range(pick + 1) if frames[i] == "I")
    anchors = [i for i in range(start, last_anchor + 1) if frames[i] != "B"]
    if frames[pick] == "B":
        anchors.append(next(i for i in range(pick, len(frames)) if frames[i] != "B"))
    return sorted({*anchors, pick})


def gop_strip() -> str:
    """Return two GOPs in presentation order, and the frames that each method decodes for a pick."""
    frames = 2 * GOP
    step = INSIDE / len(frames)
    centre = [MARGIN + step * (i + 0.5) for i in range(len(frames))]
    parts, top = [text(MARGIN, 20, "Two GOPs, in order of presentation", "title")], 62.0
    for here in needed(frames, PICK):
        others = [i for i in needed(frames, PICK) if frames[i] != "B" and i != here]
        before = [i for i in others if i < here][-1:] if frames[here] != "I" else []
        after = [i for i in others if i > here][:1] if frames[here] == "B" else []
        for other in before + after:
            a, b = centre[here], centre[other]
            bow = f"M{a:.1f} {top - 3}Q{(a + b) / 2:.1f} {top - 34} {b:.1f} {top - 3}"
            parts.append(f'<path d="{bow}"/>')
    for i, kind in enumerate(frames):
        parts.append(box(centre[i] - step / 2 + 1, top, step - 2, 30, f"{KINDS[kind]} frame"))
        parts.append(text(round(centre[i], 1), top + 20, kind, "", "middle"))
    parts.append(f'<circle class="pick" cx="{centre[PICK]:.1f}" cy="{top + 38}" r="3.5"/>')
    parts.append(text(round(centre[PICK] - 9, 1), top + 42, "picked", "small", "end"))
    start, end = len(GOP), needed(frames, PICK)[-1]
    for row, (name, first, last) in enumerate(
        (("stream", 0, end), ("seek", start, end), ("keyframes", start, start))
    ):
        y = 140 + 40 * row
        count = last - first + 1
        words = f"{name} decodes {count} packet{'s' * (count > 1)}"
        note = ", and shows frame 10 in its place" if name == "keyframes" else ""
        parts.append(text(MARGIN, y - 5, words + note, "small"))
        for i in range(len(frames)):
            edge = "read" if first <= i <= last else "frame"
            x, kind = centre[i] - step / 2 + 2, KINDS[frames[i]]
            parts.append(box(x, y, step - 4, 12, f"{kind} {edge}"))
    for x, kind, words in (
        (MARGIN, "key", "I: a whole picture"), (142, "past", "P: from before"),
        (254, "both", "B: from both sides"),
    ):  # fmt: skip
        parts += [box(x, 250, 11, 11, f"{kind} frame"), text(x + 16, 260, words, "small")]
    return svg(274, "I, P and B frames of two GOPs, and what each method decodes of them", parts)


def _cells(study: str) -> list[Cell]:
    archive = FOLDER.parents[1] / "outputs" / "reference" / f"{study}.zip"
    return [analysis.cell for analysis in AnalysisCache().study(open_study(archive))]


def _keyframes_cell() -> Cell:
    (cell,) = _cells("keyframes")
    return cell


def decode_times() -> str:
    """Return the decode times of ``experiment=keyframes`` by clip, on a logarithmic axis."""
    cell = _keyframes_cell()
    rows = [row for row in cell.rows if row.metric == "decode_ms"]
    rows.sort(key=lambda row: float(row.case.split()[0]))  # clips are named by their length
    published = {row.case: row.arms for row in cell.published_rows}
    arms = {"opencv": 1, "stream": 0, "seek": 2, "keyframes": 3}
    low, high, step, top = 0.3, 3.7, 34, 50

    def place(ms: float) -> float:
        return round(MARGIN + (math.log10(ms) - low) / (high - low) * INSIDE, 1)

    floor = top + step * len(rows)
    parts = [text(MARGIN, 18, "Decoding 16 frames, or as many as named (ms)", "title")]
    for tick in (10, 100, 1000):
        parts.append(f'<line class="grid" x1="{place(tick)}" x2="{place(tick)}" y1="{top - 18}" '
                     f'y2="{floor}"/>')  # fmt: skip
        parts.append(text(place(tick), floor + 14, f"{tick:,}", "small soft", "middle"))
    for index, row in enumerate(rows):
        y = top + step * index
        parts.append(text(MARGIN, y, row.case, "small"))
        parts.append(f'<line class="grid" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y + 13}" '
                     f'y2="{y + 13}"/>')  # fmt: skip
        for arm, colour in arms.items():
            if (ms := row.median(arm)) is not None:
                tip = f"<title>{row.case}, {arm}: {value_text(ms)} ms</title>"
                parts.append(_mark(arm, place(ms), y + 13, f"a{colour}", tip))
        for ms in published.get(row.case, {}).values():
            tip = f"<title>{row.case}, opencv, published: {ms:,} ms</title>"
            parts.append(_mark("opencv", place(ms), y + 13, "hollow", tip))
    x = float(MARGIN)
    for arm, kind in ((*((arm, f"a{colour}") for arm, colour in arms.items()),
                       ("published (opencv)", "hollow"))):  # fmt: skip
        parts.append(_mark(arm.split("(")[-1].rstrip(")"), x + 5, floor + 31, kind))
        parts.append(text(x + 14, floor + 35, arm, "small"))
        x += 25 + 6.2 * len(arm)
    style = "".join(f".a{i}{{fill:{COLOURS[i]};stroke:none}}" for i in arms.values())
    hollow = ".hollow{fill:none;stroke:#59636e;stroke-width:1.5}"
    return svg(floor + 46, "Decode time by clip and method, logarithmic", parts, style + hollow)


def accuracy_changes() -> str:
    """Return the published changes of a model's accuracy by benchmark and subtask, as bars."""
    published = _keyframes_cell().published
    assert published is not None
    (table,) = [table for table in published.tables if "accuracy" in table.title]
    top, step, zero, width = 44, 24, 182, 178
    title = "Answers with keyframes alone, against all frames"
    parts = [text(MARGIN, 18, title, "title"), text(MARGIN, 34, "points, published", "small soft")]
    for index, (name, _, _, change) in enumerate(table.rows):
        y = top + step * index
        points = float(change.replace("\N{MINUS SIGN}", "-").removeprefix("within ±"))
        length = round(width * abs(points) / WORST_POINTS, 1)
        parts.append(text(MARGIN, y + 13, name, "small"))
        within = change.startswith("within")
        parts.append(box(zero, y + 3, length, 13, "within" if within else "loss"))
        parts.append(text(zero + length + 5, y + 13, change, "small"))
    floor = top + step * len(table.rows)
    parts.append(f'<line class="axis" x1="{zero}" x2="{zero}" y1="{top}" y2="{floor}"/>')
    style = ".loss{fill:#0072b2}.within{fill:none;stroke:#0072b2;stroke-dasharray:3 2}"
    return svg(floor + 12, "Published changes of accuracy by benchmark and subtask", parts, style)


ENGINES = {"mlx_lm": ("mlx_lm", "mlx_lm"), "paged": ("vllm-metal", "paged")}  # there, here
ASKED = 100  # published prompts of each run


def client_throughput() -> str:
    """Return the published throughputs of two engines by clients, and ours on their own scale.

    A bar is hatched where some of the published prompts got no tokens.
    """
    parts, y = [], 18.0
    for study, split in (("chat_clients", "Chat"), ("agent_clients", "Agent")):
        published, here = [], []
        for cell in _cells(study):
            clients = cell.cell.rpartition("=")[2]
            numbers = {row.metric: row.arms for row in cell.published_rows}
            (row,) = (row for row in cell.rows if row.metric == "output_tok_s")
            for arm, (there, ours) in ENGINES.items():
                finished = numbers["requests.finished"][arm]
                note = f" ({finished} of {ASKED} answered)" if finished < ASKED else ""
                tok_s = numbers["output_tok_s"][arm]
                published.append((f"{clients}, {there}", tok_s, arm, note))
                here.append((f"{clients}, {ours}", row.median(arm) or 0.0, arm, ""))
        for place, bars in (("published", published), ("here", here)):
            parts.append(text(MARGIN, y, f"{split} split, {place} (tok/s, by clients)", "title"))
            parts += _bars(bars, y + 8)
            y += 32 + 16 * len(bars)
    style = (
        f".mlx_lm{{fill:{COLOURS[1]}}}.paged{{fill:{COLOURS[0]}}}"
        ".mlx_lm.some{fill:url(#some)}.some{stroke:#d55e00}"
    )
    hatch = (
        '<pattern id="some" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="2.5" height="6" fill="#d55e00"/></pattern>'
    )
    return svg(y - 12, "Throughput by clients, published and here", [hatch, *parts], style)


def _bars(bars: Sequence[tuple[str, float, str, str]], top: float) -> list[str]:
    """Return horizontal bars with their names and numbers; a note makes a bar hatched."""
    left, width, most = 108, 150, max(number for _, number, _, _ in bars)
    parts = []
    for index, (name, number, arm, note) in enumerate(bars):
        y, length = top + 16 * index, round(width * number / most, 1)
        kind = f"{arm} some" if note else arm
        parts.append(text(left - 6, y + 11, name, "small", "end"))
        parts.append(box(left, y + 1, length, 12, kind))
        parts.append(text(left + length + 5, y + 11, value_text(number) + note, "small"))
    return parts


def _mark(arm: str, x: float, y: float, kind: str, tip: str = "") -> str:
    """Return an arm's mark, whose shape does not depend on colours."""
    shapes = {
        "opencv": f"M{x} {y - 5}L{x + 5} {y}L{x} {y + 5}L{x - 5} {y}z",
        "stream": f"M{x - 4} {y - 4}h8v8h-8z",
        "seek": f"M{x} {y - 5}L{x + 5} {y + 4}h-10z",
        "keyframes": f"M{x - 4.5} {y}a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    }
    return f'<path class="{kind}" d="{shapes[arm]}">{tip}</path>'


LADDER = (  # a level of the article's Mac; how many are in the level above
    ("chip: M1 Pro", "its memory is shared with the CPU"),
    ("GPU core: runs whole threadgroups, several in turn", "14 on the chip"),
    (
        "threadgroup: up to 1,024 threads, 32 KB",
        "with memory of its own; one for each unit of work",
    ),
    ("simdgroup: 32 lanes in lockstep", "8 in the decode kernel, 4 in the tiled one"),
    ("lane: a thread", "32 in a simdgroup"),
)


def ladder() -> str:
    """Return the levels from a chip to a lane, each inside the one above."""
    parts, step, depth = [], 50, len(LADDER)
    for level, (name, count) in enumerate(LADDER):
        x, y = MARGIN + 8 * level, 10 + step * level
        height = step * (depth - level) - 8 + 6 * (depth - level)
        parts.append(box(x, y, WIDTH - 2 * x, height, "level frame"))
        parts.append(text(x + 8, y + 18, name, "small title"))
        parts.append(text(x + 8, y + 34, count, "small soft"))
    return svg(step * depth + 46, "From the chip to a lane", parts)


def qblocks() -> str:
    """Return a batch as query tokens and as Q-blocks, and the keys that both searches compare."""
    prefix, keys = prefix_sums(BATCH), qblock_keys(prefix_sums(BATCH))
    parts, token, block = [], INSIDE / prefix[-1], INSIDE / keys[-1]
    top, below = 44, 148
    parts.append(text(MARGIN, 18, f"cu, in query tokens: {', '.join(map(str, prefix))}", "small"))
    parts.append(text(MARGIN, 34, f"query lengths: {', '.join(map(str, BATCH))}", "small soft"))
    words = f"cu[i] / {BQ} + i, in Q-blocks: {', '.join(map(str, keys))}"
    parts.append(text(MARGIN, below + 50, words, "small"))
    for i, length in enumerate(BATCH):
        colour = f"s{i % len(COLOURS)}"
        x, end = MARGIN + token * prefix[i], MARGIN + token * prefix[i + 1]
        parts.append(box(round(x, 1), top, round(end - x, 1), 26, f"{colour} frame"))
        if length > 1:
            parts.append(text(round((x + end) / 2, 1), top + 18, f"request {i}", "small", "middle"))
        to = MARGIN + block * (keys[i] + 0.5)
        parts.append(
            f'<path d="M{(x + min(end, x + 4)) / 2:.1f} {top + 28}L{to:.1f} {below - 3}"/>'
        )
        for number in range(keys[i], keys[i + 1]):
            row = BQ * (number - keys[i])
            left = round(MARGIN + block * number + 1.5, 1)
            kind = f"{colour} frame" if row < length else "surplus frame"
            parts.append(box(left, below, round(block - 3, 1), 34, kind))
            rows = f"{min(BQ, length - row)}" if row < length else "none"
            middle = round(left + block / 2 - 1.5, 1)
            parts.append(text(middle, below + 15, str(number), "small", "middle"))
            parts.append(text(middle, below + 28, rows, "small soft", "middle"))
    note = "In a block: its number, and its rows. Dashed: surplus."
    parts.append(text(MARGIN, below + 68, note, "small soft"))
    style = "".join(f".s{i}{{fill:{c};fill-opacity:.4}}" for i, c in enumerate(COLOURS))
    return svg(below + 80, "One array for query tokens and for Q-blocks", parts, style)


PICTURES = {
    "one-launch-ladder.svg": ladder,
    "one-launch-qblocks.svg": qblocks,
    "video-gop.svg": gop_strip,
    "video-decode-times.svg": decode_times,
    "video-accuracy.svg": accuracy_changes,
    "kv-caches-clients.svg": client_throughput,
}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (FOLDER / name).write_text(picture(), encoding="utf-8")
