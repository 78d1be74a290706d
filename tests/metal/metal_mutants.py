"""Mutants made by rule from the kernels' text: one small change each.

Rules: a barrier is dropped; a comparison becomes its neighbour or its opposite; an integer
constant grows or shrinks by one; a sum of indices becomes a difference; `&&` and `||` swap.
"""

import re
from dataclasses import dataclass

from labkit.metal.kernels import source

FILES = ("common", "resolve", "decode", "tiled", "reduce")
_COMPARISONS = {
    " < ": (" <= ", " >= "),
    " > ": (" >= ", " <= "),
    " <= ": (" < ", " > "),
    " >= ": (" > ", " < "),
    " == ": (" != ",),
}
_LOGIC = {" && ": (" || ",), " || ": (" && ",)}
_BARRIER = re.compile(r"(threadgroup|simdgroup)_barrier\([^)]*\);")
_INTEGER = re.compile(r"(?<![\w.])(\d+)u?(?![\w.])")
_TYPE = re.compile(r"<[\w, ]+>")
_SUM = re.compile(r"(?<=[\w)\]]) ([+-]) (?=[\w(])")


@dataclass(frozen=True)
class Mutant:
    """``text`` is the whole changed file; ``what`` says where and how, for a person."""

    file: str
    line: int
    what: str
    text: str

    @property
    def name(self):
        return f"{self.file}:{self.line} {self.what}"


def mutants(files=FILES):
    """Every mutant of the kernel files, in order."""
    return [mutant for name in files for mutant in _of_file(name)]


def _of_file(name):
    lines = source(name).split("\n")
    for number, line in enumerate(lines):
        code = line.split("//")[0]
        if not code.strip() or code.startswith(("#", "template", "enum", "using")):
            continue
        for start, end, new in _changes(code):
            changed = code[:start] + new + code[end:]
            text = "\n".join([*lines[:number], changed, *lines[number + 1 :]])
            yield Mutant(name, number + 1, f"{code.strip()} -> {changed.strip()}", text)


def _changes(code):
    """Every (start, end, new text) of one line."""
    for match in _BARRIER.finditer(code):
        yield *match.span(), ""
    for table in (_COMPARISONS, _LOGIC):
        for old, news in table.items():
            for match in re.finditer(re.escape(old), code):
                for new in news:
                    yield *match.span(), new
    types = [match.span() for match in _TYPE.finditer(code)]
    for match in _INTEGER.finditer(code):
        if any(start < match.start() < end for start, end in types):
            continue  # another type's size: it does not compile
        value = int(match.group(1))
        for new in (value + 1, value - 1):
            if new >= 0:
                yield *match.span(), match.group(0).replace(str(value), str(new))
    if "=" in code or "[" in code:
        for match in _SUM.finditer(code):
            yield *match.span(1), "-" if match.group(1) == "+" else "+"
