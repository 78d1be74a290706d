"""Selection: which mutants are drawn from each package, and which tests run on a module.

The draw is stratified: each package has at least one mutant, and the rest in proportion to its
size. The tests of a module are the file that mirrors its name and that of its package, then files
beside them that share words with its name, then the nearest by imports: a file that imports the
module, itself or by its fixtures and helpers, is nearer than a file that imports a module that
imports it. Added to them are files that may reach it through a command, an option or a server:
those that mention most of its terms (its public names, and the words of its texts), each weighted
by its rarity in the tests; files for the same package and those titled by its names come sooner.

    python tests/mutants/selection.py FILE ...

prints the test files of changed files, for ``make test FILES="..."``: the tests of a module, a test
file itself, all test files beside another file of ``tests``, and those of pages and of ``conf``.
"""

import ast
import hashlib
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import cycle
from pathlib import Path, PurePosixPath

from mutation import Mutant

PACKAGE = "labkit"
MAX_TEST_FILES = 7
MIN_NEAREST_FILES = 4  # the others mention the module, if they do
OPTIONS = ("labkit/config", "tests/test_options.py")  # compares a page of all defaults and bounds
OTHER_TESTS = {
    "conf": ("tests/test_config.py", "tests/test_published.py", "tests/test_published_tables.py"),
    "docs": ("tests/test_docs.py",),
    "README.md": ("tests/test_docs.py", "tests/test_readme.py"),
}


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
        sources = {name: file.read_text() for name, file in modules.items()}
        origins = {name: _origins(text, sources) for name, text in sources.items()}
        self._importers: dict[str, set[str]] = defaultdict(set)
        for name, text in sources.items():
            for imported in _imports(text, origins) - {name}:
                self._importers[imported].add(name)
        self._imported = {
            str(file.relative_to(root)): _imports_of_test(file, root / "tests", origins)
            for file in sorted(root.glob("tests/**/test_*.py"))
        }
        self._names = {name: _public_names(text) for name, text in sources.items()}
        self._terms = {name: self._names[name] | _terms(text) for name, text in sources.items()}
        self._words = {
            file: set(re.findall(r"\w+", (root / file).read_text())) for file in self._imported
        }
        self._frequencies = Counter(word for words in self._words.values() for word in words)

    def nearest(self, path: str) -> list[str]:
        """Return the test files that run on a module, the nearest first."""
        mirror, distances = _mirror(path), self._distances(_module_name(Path(path)))
        ranks = {}
        for file, imported in self._imported.items():
            near = [distances[name] for name in imported & distances.keys()]
            name = PurePosixPath(file)
            packages = {f"test_{part}.py" for part in mirror.parts[1:-1]}
            mirrors = name.name == mirror.name, name.name in packages
            if near or (mirrors[1] and name.parent == mirror.parent.parent):
                beside = name.parts[:2] == mirror.parts[:2]
                shared = len(_words(name) & _words(mirror)) if beside else 0
                apart = name.parent != mirror.parent
                distance = min(near, default=len(distances))
                weight = self._weight(file, _module_name(Path(path)))
                ranks[file] = (
                    *(not each for each in mirrors), -shared, distance, apart, -weight, file
                )  # fmt: skip
        nearest = sorted(ranks, key=ranks.__getitem__)
        package, options = OPTIONS
        if package_of(path) == package and options in self._words:
            nearest = [*nearest[:1], options, *nearest[1:]]
        first = nearest[:MIN_NEAREST_FILES]
        mentioning = self._mentioning(_module_name(Path(path)), without=first)
        return list(dict.fromkeys([*first, *mentioning, *nearest]))[:MAX_TEST_FILES]

    def _mentioning(self, module: str, without: list[str]) -> list[str]:
        """Return the other files that mention most of a module's terms (none if it is gone)."""
        if module not in self._terms:
            return []
        scores = {file: self._weight(file, module) for file in self._words.keys() - set(without)}
        best = sorted(scores, key=lambda file: (-scores[file], file))
        return [file for file in best[: MAX_TEST_FILES - len(without)] if scores[file] > 0.0]

    def _weight(self, file: str, module: str) -> float:
        """Return the rarities of a module's terms in a test file, summed, by the file's size.

        It is larger in a file for the same package, and in one titled by the module's names.
        """
        words, path = self._words[file], PurePosixPath(file)
        beside = path.parts[1] == "".join(module.split(".")[1:2])
        names = self._names[module] | set(module.rsplit(".", 1)[-1].split("_"))
        titled = len(names & _words(path)) / max(1, len(_words(path)))
        rarities = (
            math.log(len(self._words) / self._frequencies[term])
            for term in self._terms[module] & words
        )
        return sum(rarities) * (1 + beside) * (1 + titled) / max(1, len(words)) ** 0.25

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


def _public_names(source: str) -> set[str]:
    """Return the public names that a module defines, and those in its classes."""
    names, bodies = set[str](), [ast.parse(source).body]
    for body in bodies:  # grows as it is read
        for node in body:
            if isinstance(node, ast.ClassDef):
                bodies.append(node.body)
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def _terms(source: str) -> set[str]:
    """Return the words of a module's texts: keys, options and messages that tests mention."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = (n.value for n in nodes if isinstance(n, ast.Constant) and id(n) not in docstrings)
    return {word for text in texts if isinstance(text, str) for word in re.findall(r"\w+", text)}


def _words(file: PurePosixPath) -> set[str]:
    return set(file.stem.split("_")) - {"test"}


def _origins(source: str, modules: Collection[str]) -> dict[str, str]:
    """Return the modules from which a module imports names, by name: it may pass them on."""
    return {
        alias.asname or alias.name: node.module
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom) and node.module in modules
        for alias in node.names
    }


def _imports(source: str, origins: Mapping[str, Mapping[str, str]]) -> set[str]:
    """Return the modules that a file imports, or names in a text such as a command's.

    A name that comes from a package's own import is traced to the module that defines it.
    ``origins`` has the imports of every module.
    """
    names = set(re.findall(rf"\b{PACKAGE}(?:\.\w+)+", source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            passed_on = origins.get(node.module, {})
            names |= {passed_on.get(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    prefixes = {name.rsplit(".", 1)[0] for name in names}
    return (names | {prefix for prefix in prefixes if prefix != PACKAGE}) & origins.keys()


def _imports_of_test(file: Path, tests: Path, origins: Mapping[str, Mapping[str, str]]) -> set[str]:
    """Return what a test file imports, itself or by the fixtures and helpers that it uses."""
    folders = [folder for folder in file.parents if tests in folder.parents]
    fixtures = (folder / "conftest.py" for folder in folders)  # not those of all tests
    imported, waiting = set[str](), [file, *(path for path in fixtures if path.is_file())]
    for part in waiting:  # grows as it is read
        source = part.read_text()
        imported |= _imports(source, origins)
        helpers = re.findall(r"^from (\w+) import|^import (\w+)", source, re.MULTILINE)
        for name in map("".join, helpers):
            for helper in (folder / f"{name}.py" for folder in [*folders, tests]):
                if helper.is_file() and helper not in waiting:
                    waiting.append(helper)
    return imported


def files_to_run(files: Iterable[str], root: Path) -> list[str]:
    """Return the test files to run after a change of ``files``, paths relative to ``root``."""
    selected, nearest = dict[str, None](), NearestTests(root)
    for file in files:
        parts = PurePosixPath(file).parts
        if parts[0] == PACKAGE and file.endswith(".py"):
            tests = nearest.nearest(file)
        elif parts[0] == "tests" and parts[-1].startswith("test_"):
            tests = [file]
        elif parts[0] == "tests" and len(parts) > 2:
            beside = sorted((root / file).parent.glob("test_*.py"))
            tests = [test.relative_to(root).as_posix() for test in beside]
        else:
            tests = list(OTHER_TESTS.get(parts[0], ()))
        selected |= dict.fromkeys(tests)
    return [test for test in selected if (root / test).is_file()]


if __name__ == "__main__":
    tests = files_to_run(sys.argv[1:], Path(__file__).resolve().parents[2])
    if not tests:
        sys.exit(f"no tests are near {' '.join(sys.argv[1:]) or 'an unchanged tree'}")
    print(*tests)
