"""Selection: which mutants are drawn from each package, and which tests run on a module.

The draw is stratified: each package has at least one mutant, and the rest in proportion to its
size. The tests of a module are the file that mirrors its name and that of its package, then files
beside them that share words with its name, then the nearest by imports: a file that imports the
module is nearer than a file that imports a module that imports it.
"""

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path, PurePosixPath

from mutation import Mutant

PACKAGE = "labkit"
MAX_TEST_FILES = 3


def package_of(path: str) -> str:
    """Return a file's package: ``labkit/NAME``, or ``labkit`` for the modules directly in it."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[: 2 if len(parts) > 2 else 1])


def by_package(candidates: Iterable[Mutant]) -> dict[str, list[Mutant]]:
    """Group mutants by package."""
    groups: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in candidates:
        groups[package_of(mutant.path)].append(mutant)
    return dict(sorted(groups.items()))


def allot(sizes: Mapping[str, int], number: int) -> dict[str, int]:
    """Divide a sample among packages: one each, the rest in proportion to their sizes.

    Raises
    ------
    ValueError
        The sample is smaller than the number of packages.
    """
    total, rest = sum(sizes.values()), number - len(sizes)
    if rest < 0:
        raise ValueError(f"a sample of {number} is too small for {len(sizes)} packages")
    if number >= total:
        return dict(sizes)
    shares = {name: 1 + rest * size / total for name, size in sizes.items()}
    parts = {name: int(share) for name, share in shares.items()}
    for name in cycle(sorted(sizes, key=lambda name: (parts[name] - shares[name], name))):
        if sum(parts.values()) == number:
            break
        parts[name] += parts[name] < sizes[name]
    return parts


def draw(candidates: Iterable[Mutant], number: int | None, seed: int) -> list[Mutant]:
    """Return ``number`` mutants (all if None), package by package.

    Which mutants of a package are drawn does not depend on changes elsewhere in the code.
    """
    groups = by_package(candidates)
    sizes = {package: len(group) for package, group in groups.items()}
    parts = sizes if number is None else allot(sizes, number)
    return [
        mutant
        for package, group in groups.items()
        for mutant in sorted(group, key=lambda m: digest(f"{seed} {m.name}"))[: parts[package]]
    ]


def digest(text: str) -> str:
    """Return 16 hexadecimal digits that identify a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class NearestTests:
    """The test files of a tree, ordered for each module by how near they are to it."""

    def __init__(self, root: Path) -> None:
        modules = {_module_name(f.relative_to(root)): f for f in root.glob(f"{PACKAGE}/**/*.py")}
        self._importers: dict[str, set[str]] = defaultdict(set)
        for name, file in modules.items():
            for imported in _imports(file.read_text(), modules.keys()) - {name}:
                self._importers[imported].add(name)
        self._imported = {
            str(file.relative_to(root)): _imports(file.read_text(), modules.keys())
            for file in sorted(root.glob("tests/**/test_*.py"))
        }
        for file, imported in self._imported.items():
            fixtures = (root / file).with_name("conftest.py")
            if fixtures.is_file() and len(PurePosixPath(file).parts) > 2:  # not those of all tests
                imported |= _imports(fixtures.read_text(), modules.keys())

    def nearest(self, path: str) -> list[str]:
        """Return the test files that run on a module, the nearest first."""
        mirror, distances = _mirror(path), self._distances(_module_name(Path(path)))
        ranks = {}
        for file, imported in self._imported.items():
            near = [distances[name] for name in imported & distances.keys()]
            if near:
                name = PurePosixPath(file)
                mirrors = name.name == mirror.name, name.name == f"test_{mirror.parts[1]}.py"
                beside = name.parts[:2] == mirror.parts[:2]
                shared = len(_words(name) & _words(mirror)) if beside else 0
                apart = name.parent != mirror.parent
                ranks[file] = (*(not each for each in mirrors), -shared, min(near), apart, file)
        return sorted(ranks, key=ranks.__getitem__)[:MAX_TEST_FILES]

    def _distances(self, module: str) -> dict[str, int]:
        """Return the length of the shortest chain of imports from each module to ``module``."""
        distances, reached = {module: 0}, [module]
        for name in reached:  # grows as it is read
            for importer in sorted(self._importers[name] - distances.keys()):
                distances[importer] = distances[name] + 1
                reached.append(importer)
        return distances


def _module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _mirror(path: str) -> PurePosixPath:
    """Return the test file that mirrors a module: ``labkit/a/b.py``'s is ``tests/a/test_b.py``."""
    parts = PurePosixPath(path).with_suffix("").parts[1:]
    parts = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
    return PurePosixPath("tests", *parts[:-1], f"test_{parts[-1]}.py")


def _words(file: PurePosixPath) -> set[str]:
    return set(file.stem.split("_")) - {"test"}


def _imports(source: str, modules: Iterable[str]) -> set[str]:
    """Return the modules that a file imports, or names in a text such as a command's."""
    names = set(re.findall(rf"\b{PACKAGE}(?:\.\w+)+", source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    known = set(modules)
    prefixes = {name.rsplit(".", 1)[0] for name in names}
    return (names | {prefix for prefix in prefixes if prefix != PACKAGE}) & known
