"""Directions of imports between packages, imports inside functions included."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What each part imports of the others. The doors (``labkit/*.py``) may import all of them.
MAY = {
    "records": set(),
    "config": {"records"},
    "machine": set(),
    "models": {"config", "machine"},
    "kernel_constants": {"config"},
    "metal": {"config", "machine"},
    "cpu": {"kernel_constants", "machine"},
    "engine": {"config", "cpu", "kernel_constants", "metal", "models", "machine"},
    "workload": {"config", "cpu", "engine", "metal", "models", "machine", "records"},
    "server": {"cli.program_base", "config", "cpu", "engine", "models", "machine"},
    "analysis.statistics": set(),
    "analysis.number_format": set(),
    "analysis.text_format": set(),
    "analysis": {
        "analysis.number_format", "analysis.statistics", "analysis.text_format", "config",
        "records",
    },
    "importers": {"config", "machine", "records"},
    "conformance": {"config", "engine", "kernel_constants", "models", "workload"},
    "experiment": {
        "analysis.statistics", "analysis.text_format", "config", "cpu", "engine", "models",
        "machine", "records", "workload",
    },
    "cli.program_base": set(),
    "cli": {
        "analysis", "cli.program_base", "config", "engine", "experiment", "machine", "records",
        "workload",
    },
    "mac": {
        "analysis", "cli", "cli.program_base", "config", "experiment", "machine", "records",
        "workload",
    },
    "replicate": {
        "analysis", "analysis.number_format", "analysis.statistics", "cli", "cli.program_base",
        "config", "engine", "experiment", "machine", "models", "records", "workload",
    },
    "doctor": {
        "analysis", "analysis.statistics", "cli", "cli.program_base", "config", "cpu", "engine",
        "experiment", "metal", "models", "machine", "records", "workload",
    },
}  # fmt: skip
MAX_MODULES = 15
CLASS = re.compile(r"^class (\w+)[(:\[]", re.MULTILINE)
PACKAGES = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "labkit").rglob("__init__.py")}
SHARED = {""}  # labkit itself: the version
# The rooms of the analysis: each imports only the rooms before it.
ROOMS = (
    "number_format", "text_format", "statistics", "model", "comparison", "robustness", "findings",
    "studies", "document", "charts", "tables", "exports", "pages",
)  # fmt: skip


def part_of(module):
    """Name the part that a module of labkit belongs to."""
    words = module.split(".")[1:]
    leaves = ["number_format"], ["statistics"], ["text_format"]
    if words[:1] == ["analysis"] and words[1:2] in leaves:
        return ".".join(words[:2])
    if words[:2] == ["cli", "program_base"]:
        return ".".join(words[:2])
    return words[0] if words else ""


def at_import(tree):
    """Yield the statements that run when a module is imported, type checking aside."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from at_import(node)


def imported(path, nodes=ast.walk):
    """Return the modules of labkit that a file imports, with their lines."""
    return imported_both(path)[nodes is at_import]


@cache
def imported_both(path):
    """Return the imports of a whole file, and those that run when it is imported."""
    tree = ast.parse(path.read_text())
    return modules_of(path, ast.walk(tree)), modules_of(path, at_import(tree))


def modules_of(path, nodes):
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                deeper = ROOT.joinpath(*node.module.split("."), alias.name)
                whole = deeper.is_dir() or deeper.with_suffix(".py").is_file()
                found.append((f"{node.module}.{alias.name}" if whole else node.module, node.lineno))
    return found


@pytest.mark.parametrize("part", MAY)
def test_no_module_imports_upward(part):
    place = ROOT.joinpath("labkit", *part.split("."))
    wrong, files = [], 0
    for path in [*place.rglob("*.py"), *place.parent.glob(f"{place.name}.py")]:
        if part_of(".".join(path.relative_to(ROOT).with_suffix("").parts)) != part:
            continue
        files += 1
        for module, line in imported(path):
            target = part_of(module)
            if module.split(".")[0] == "labkit" and target not in MAY[part] | SHARED | {part}:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert files and not wrong


def test_every_package_has_its_directions():
    parts = {path.parent.name for path in (ROOT / "labkit").glob("*/__init__.py")}
    assert parts | {"kernel_constants"} == {part for part in MAY if "." not in part}


def test_rooms_of_the_analysis_import_only_those_before_them_and_hold_a_dozen_modules():
    folder, wrong = ROOT / "labkit" / "analysis", []
    for path in folder.rglob("*.py"):
        room = path.relative_to(folder).with_suffix("").parts[0]
        for module, line in imported(path) if room in ROOMS else ():
            target = module.removeprefix("labkit.analysis.").split(".")[0]
            later = target in ROOMS and ROOMS.index(target) > ROOMS.index(room)
            if later:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong
    sizes = {room: len(list((folder / room).glob("[!_]*.py"))) for room in ROOMS}
    assert sum(sizes.values()) > 60 and max(sizes.values()) <= 15


def test_no_two_modules_share_a_name():
    """A file name such as ``scheduler.py`` stands for one module.

    Only a module of ``config`` may have the name of what it configures.
    """
    config = ROOT / "labkit" / "config"
    paths = [p for p in (ROOT / "labkit").rglob("[!_]*.py") if config not in p.parents]
    names = [path.stem for path in paths]
    assert len(names) > 200 and len(names) == len(set(names))


def test_no_two_classes_share_a_name():
    """Only a class of ``config`` may have the name of what it configures."""
    config, homes = ROOT / "labkit" / "config", {}
    for path in (ROOT / "labkit").rglob("*.py"):
        for name in CLASS.findall(path.read_text()) if config not in path.parents else ():
            homes.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert len(homes) > 500 and not {n: found for n, found in homes.items() if len(found) > 1}


def test_no_modules_import_each_other():
    """``TopologicalSorter`` raises ``CycleError`` with the circle."""
    names = {
        path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "labkit").rglob("*.py")
    }
    graph = {
        name: {module for module, _ in imported(path, at_import) if module != name}
        for path, name in names.items()
    }
    order = list(TopologicalSorter(graph).static_order())
    assert order.index("labkit.config.option") < order.index("labkit.engine.llm_engine")


def rooms():
    """Yield each folder of labkit with its modules."""
    for folder in sorted({path.parent for path in (ROOT / "labkit").rglob("*.py")}):
        yield folder, [path for path in folder.glob("*.py") if path.name != "__init__.py"]


def test_no_folder_has_over_fifteen_modules():
    sizes = {".".join(folder.relative_to(ROOT).parts): len(files) for folder, files in rooms()}
    assert not {name for name, count in sizes.items() if count > MAX_MODULES}


def test_no_rooms_of_a_package_import_each_other():
    """A room is a folder of a package, whose own modules may lie under or over its rooms."""
    graph = {}
    for folder, files in rooms():
        name = ".".join(folder.relative_to(ROOT).parts)
        if name.count(".") < 2:
            continue
        package = name.rpartition(".")[0]
        graph[name] = {
            room
            for path in files
            for module, _ in imported(path)
            for room in [".".join(module.split(".")[: name.count(".") + 1])]
            if room != name
            and room.startswith(f"{package}.")
            and room.replace(".", "/") in PACKAGES
        }
    assert len(graph) > 20 and sum(map(len, graph.values())) > 20
    list(TopologicalSorter(graph).static_order())
