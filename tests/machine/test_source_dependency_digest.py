import ast
import inspect
import shutil
from pathlib import Path

import pytest

from labkit.engine.attention import sequence_resolvers
from labkit.machine import source_dependency_digest

PACKAGE = Path(source_dependency_digest.__file__).resolve().parents[1]
KERNELS = (
    "cpu/layers/norms.py",
    "cpu/matmul/gemm.py",
    "cpu/attention/kernel_entry_points.py",
    "cpu/replay/graph_replay.py",
)


@pytest.fixture
def package(tmp_path):
    """A copy of the package's sources."""
    for name in ("cpu", "config", "engine", "machine", "records"):
        shutil.copytree(
            PACKAGE / name, tmp_path / "labkit" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(PACKAGE / "kernel_constants.py", tmp_path / "labkit")
    return tmp_path / "labkit"


def digests(package):
    source_dependency_digest._load.cache_clear()
    return {name: source_dependency_digest.digest(package / name, package) for name in KERNELS}


def test_a_digest_is_that_of_equal_sources_elsewhere(package):
    assert digests(package) == digests(PACKAGE)


@pytest.mark.parametrize(
    ("edited", "recompiled"),
    [
        ("cpu/layers/norms.py", {"cpu/layers/norms.py", "cpu/replay/graph_replay.py"}),
        ("cpu/matmul/microkernels.py", {"cpu/matmul/gemm.py", "cpu/replay/graph_replay.py"}),
        ("cpu/runtime/jit.py", set(KERNELS)),
        (
            "engine/attention/sequence_resolvers/seq_map.py",
            {"cpu/attention/kernel_entry_points.py", "cpu/replay/graph_replay.py"},
        ),
        (
            "kernel_constants.py",
            {"cpu/attention/kernel_entry_points.py", "cpu/replay/graph_replay.py"},
        ),
        ("engine/scheduler/scheduler.py", set()),
        ("config/engine/__init__.py", set()),
        ("machine/cache_entries.py", set()),
    ],
)
def test_a_changed_file_recompiles_the_kernels_that_contain_it(package, edited, recompiled):
    before = digests(package)
    with open(package / edited, "a") as file:
        file.write("# another\n")
    after = digests(package)
    assert {name for name in KERNELS if after[name] != before[name]} == recompiled


def test_a_script_depends_on_itself_and_what_it_imports(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import numpy\nfrom labkit.cpu.runtime.jit import kernel\n")
    sources = source_dependency_digest.read_sources(script, PACKAGE)
    assert {
        "script.py",
        "labkit/cpu/runtime/jit.py",
        "labkit/cpu/runtime/thread_pool.py",
    } <= sources.keys()
    assert sources["script.py"] == script.read_bytes()


@pytest.mark.parametrize(
    "resolver", sequence_resolvers.BY_LOOKUP_TYPE.values(), ids=lambda one: one.variant
)
def test_compiled_in_resolvers_are_among_the_sources(resolver):
    path = Path(inspect.getfile(resolver)).resolve().relative_to(PACKAGE.parent).as_posix()
    assert path in source_dependency_digest.read_sources(
        PACKAGE / "cpu/attention/kernel_entry_points.py", PACKAGE
    )


def test_regex_imports_equal_the_parsers():
    for path in sorted((PACKAGE / "cpu").rglob("*.py")) + sorted(
        (PACKAGE / "engine").rglob("*.py")
    ):
        parsed = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                parsed |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: only absolute imports are followed"
                parsed |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        files = {m.replace(".", "/") + end for m in parsed for end in (".py", "/__init__.py")}
        expected = {name for name in files if name.startswith("labkit/")}
        expected = {name for name in expected if (PACKAGE.parent / name).is_file()}
        assert source_dependency_digest.imported_files(path.read_bytes(), PACKAGE) == expected, path
