"""Mutants of a Python file: one small change each, made by rule from its syntax tree.

Rules: a comparison becomes its neighbour, ``and`` becomes ``or``, a condition is negated, an
operator becomes another, a number grows, a truth value flips, a function returns None, a
statement is deleted. Annotations, decorators and strings are not changed.
"""

import ast
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_PLAIN = (ast.Name, ast.Attribute, ast.Call)
_TEXT = (ast.JoinedStr, ast.Constant)


@dataclass(frozen=True)
class Mutant:
    """One mutant of a file.

    ``what`` is the line and the change in it: unique in the file, and independent of changes
    elsewhere. ``new`` replaces the bytes of ``source`` from ``begin`` to ``end``.
    """

    path: str
    what: str
    source: bytes
    begin: int
    end: int
    new: str

    @property
    def name(self) -> str:
        """Its name in the list of survivors."""
        return f"{self.path} | {self.what}"

    @property
    def text(self) -> str:
        """The content of the whole changed file."""
        changed = self.source[: self.begin] + self.new.encode() + self.source[self.end :]
        return changed.decode()

    @property
    def diff(self) -> str:
        """The change as a unified diff with one line of context."""
        lines = (text.splitlines(keepends=True) for text in (self.source.decode(), self.text))
        return "".join(unified_diff(*lines, self.path, self.path, n=1))


def mutants(path: str, source: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of its lines."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    whole, results, seen = b"".join(lines), [], Counter[str]()
    for node, new in _changes(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = " ".join(whole[begin:end].decode().split())
        line = lines[node.lineno - 1].decode().strip()
        what = f"{old} -> {new}" if old == line else f"{line} | {old} -> {new}"
        seen[what] += 1
        what += f" | {seen[what]}" if seen[what] > 1 else ""
        results.append(Mutant(path, what, whole, begin, end, new))
    return results


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield what a node and all below it may become: the part replaced, and its new text."""
    if isinstance(node, ast.JoinedStr) or _only_types(node):
        return
    yield from _of_node(node)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child)


def _only_types(node: ast.AST) -> bool:
    """Tell whether a statement says something to type checkers alone."""
    checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    return checking or isinstance(node, ast.Import | ast.ImportFrom)


def _of_node(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield what a node itself may become: the part that is replaced, and its new text."""
    match node:
        case ast.Compare(left, ops, comparators):
            for i, op in enumerate(ops):
                swapped = [*ops[:i], _SWAPS[type(op)](), *ops[i + 1 :]]
                yield node, _text(ast.Compare(left, swapped, comparators))
        case ast.BoolOp(op, values):
            yield node, _text(ast.BoolOp(_SWAPS[type(op)](), values))
        case ast.BinOp(left, op, right) if type(op) in _SWAPS and not _are_texts(left, right):
            yield node, _text(ast.BinOp(left, _SWAPS[type(op)](), right))
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield node, _text(operand)
        case ast.Constant(bool() as value):
            yield node, str(not value)
        case ast.Constant(int() as value):
            yield node, str(value + 1)
        case ast.Constant(float() as value) if math.isfinite(value):
            yield node, repr(value * 1.5 if value else 1.0)
        case ast.Return(ast.AST() as value) if ast.unparse(value) != "None":
            yield node, "return None"
        case ast.AugAssign(target, op, value) if type(op) in _SWAPS:
            yield node, ast.unparse(ast.AugAssign(target, _SWAPS[type(op)](), value))
        case ast.Expr(ast.Call()) | ast.Raise() | ast.Continue() | ast.Break():
            yield node, "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.If(test) | ast.While(test) | ast.IfExp(test) if isinstance(test, _PLAIN):
            yield test, _text(ast.UnaryOp(ast.Not(), test))


def _are_texts(*nodes: ast.AST) -> bool:
    return any(isinstance(n, _TEXT) and not _is_number(n) for n in nodes)


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"
