"""Python environments: the interpreter and the packages that an arm's worker imports.

``ablation.arms.NAME.environment`` (:class:`labkit.config.Environment`) names another interpreter,
versions of packages, or a revision of a Git checkout. The packages and the revision are installed
in folders of the cache, which come first on the Python path
(:mod:`labkit.experiment.launch.exported_revision`). Everything else is imported as in the other
arms. The arm's identity holds the full hash of the commit, so a study is not continued after
the revision (a branch, for example) has moved.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

from labkit.config import ConfigError, Environment, Experiment, from_plain, require, to_plain
from labkit.experiment.launch.exported_revision import ExportedRevision, RevisionError, commit_of
from labkit.machine import cache_entries, package_installer, worker_environment

IMPORT_TIMEOUT_S = 120.0
# Revisions with one of these files name their kernels by their sources.
KERNEL_CACHES = ("labkit/cpu/runtime/kernel_cache.py", "labkit/cpu/kernel_cache.py")
# Imports what a worker imports, and prints what the parent must know about it.
IMPORT_SCRIPT = dedent("""
    import importlib, importlib.util, json, os, sys
    import numba, numpy
    for package in "mlx", "safetensors", "tokenizers":  # of the extra mlx
        if importlib.util.find_spec(package):
            importlib.import_module("mlx.core" if package == "mlx" else package)
    import labkit.experiment.worker
    from labkit.config import Experiment, from_plain, to_plain
    VERSION = None
    for package in "labkit.experiment.worker", "labkit.experiment":
        try:
            VERSION = importlib.import_module(package + ".turn_protocol").VERSION
            break
        except ImportError:  # an earlier revision has the other module, or none
            pass

    def file_of(name):
        if name.endswith(".py"):
            return os.path.abspath(name)
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
            return None  # its package does not exist
        if spec is None or spec.has_location:
            return spec and spec.origin
        return next(iter(spec.submodule_search_locations or ()), "")

    smallest, named, imported = map(json.loads, sys.argv[1:])
    files = {name: file_of(name) for name in named}
    for name in imported:
        if files[name] is not None:
            importlib.import_module(name)
    modules = [vars(m) for m in list(sys.modules.values()) if isinstance(m, type(sys))]
    print(json.dumps({
        "protocol": VERSION,
        "defaults": to_plain(from_plain(Experiment, smallest)),
        "files": files,
        "loaded": [m["__file__"] for m in modules if m.get("__file__")],
    }), flush=True)
    os._exit(0)  # a thread of the user's would keep the process alive
""")
# Builds an arm's config as a worker does, and prints what is wrong with it.
CONFIG_SCRIPT = dedent("""
    import json, sys
    from labkit.config import Experiment, from_plain
    refusal = None
    try:
        from_plain(Experiment, json.load(sys.stdin))
    except ValueError as error:
        refusal = str(error)
    print(json.dumps(refusal))
""")
SMALLEST_EXPERIMENT = {"model": {"shape": {}}, "ablation": {"arms": {"base": {}}}}


@dataclass
class _Arm:
    """An environment under the key ``environment``, so that error messages name this key."""

    environment: Environment


@dataclass(frozen=True)
class Imports:
    """The results of importing labkit in an environment."""

    protocol: int | None  # the version of its turn protocol; None if it has none
    defaults: Mapping[str, Any]  # of each option of the imported labkit
    missing: tuple[str, ...]  # modules of the user's own that do not exist in the environment


@dataclass(frozen=True)
class PythonEnvironment:
    """An arm's environment."""

    python: str | None = None  # the absolute path of the interpreter; None: the study's own
    requirements: tuple[str, ...] = ()  # packages as pip spells them
    revision: str | None = None  # the full hash of a commit; None: labkit's own files
    repository: str | None = None  # the absolute path of the revision's checkout; None: labkit's

    @classmethod
    def resolve(cls, plain: Any) -> PythonEnvironment:
        """Return the environment that an arm's override ``environment`` describes.

        Raises ``ConfigError`` if the description is invalid, or the interpreter or the revision
        does not exist.
        """
        requested = from_plain(_Arm, {"environment": plain}).environment
        python = requested.python and shutil.which(os.path.expanduser(requested.python))
        require(
            python is not None or requested.python is None,
            f"environment.python={requested.python}: no such program",
        )
        repository = requested.repository and str(
            Path(requested.repository).expanduser().absolute()
        )
        revision = requested.revision and commit_of(requested.revision, repository)
        absolute = python and os.path.abspath(python)
        return cls(absolute, tuple(requested.requirements), revision, repository)

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> PythonEnvironment:
        """Return the environment that an arm's file describes; ``{}`` is the study's own."""
        return cls(**{**identity, "requirements": tuple(identity.get("requirements", ()))})

    def identity(self) -> dict[str, Any]:
        """Return the environment as an arm's file holds it, in JSON types."""
        values = {name: value for name, value in vars(self).items() if value}
        if self.requirements:
            values["requirements"] = list(self.requirements)
        return values

    @property
    def replaces_labkit(self) -> bool:
        """Whether labkit itself is imported from a revision."""
        return self.revision is not None and self.repository is None

    def build(self) -> None:
        """Fetch and install the requirements and export the revision, unless the cache has them.

        Raises ``ConfigError`` if a requirement cannot be installed or the revision exported.
        """
        if self.requirements and not self._packages.is_dir():
            with cache_entries.building_directory(self._packages) as folder:
                python, log = self.python or sys.executable, self._packages.with_suffix(".log")
                where = ["--no-deps", "--target", str(folder)]
                try:
                    package_installer.install(python, self.requirements, log, where)
                except package_installer.InstallError as error:
                    raise ConfigError(f"environment.requirements: {error}") from None
        if self._exported is not None:
            self._exported.export()

    def command(self, command: Sequence[str]) -> list[str]:
        """Return ``command`` with this environment's interpreter in place of its first word."""
        return [self.python or command[0], *command[1:]]

    def variables(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a worker; ``base``: those in the study's own environment."""
        if not any(vars(self).values()):
            return _own_variables(base)
        exported = self._exported
        inherited = [*filter(None, base.get("PYTHONPATH", "").split(os.pathsep)), os.getcwd()]
        trees = [] if exported is None else exported.folders(inherited)
        packages = [self._packages] if self.requirements else []
        others = inherited if exported is None else exported.others(inherited)
        parts = [*map(str, [*trees, *packages]), *others]
        return {
            **_with_path(base, parts),
            "NUMBA_CACHE_DIR": str(self._numba_cache()),
        }

    def imports(self, modules: Sequence[str], program: str | None = None) -> Imports:
        """Import labkit and its dependencies in this environment, and return the results.

        ``modules``: those of the user's own that the arm's options name. They are imported only if
        the environment has a repository, of whose checkout they must import nothing. ``program``: a
        module or a script that the arm's server runs. It is not imported, and matters only with a
        repository. Raises ``RevisionError`` if an import fails, the interpreter is not Python, or a
        module of the repository is not the revision's.
        """
        imported = [] if self.repository is None else list(modules)
        named = [*modules, *([program] if program and self.repository is not None else [])]
        arguments = map(json.dumps, (SMALLEST_EXPERIMENT, named, imported))
        facts = self._printed(IMPORT_SCRIPT, *arguments)
        if self._exported is not None:
            self._exported.check_imports(facts["files"], facts["loaded"])
        missing = tuple(name for name in modules if facts["files"][name] is None)
        return Imports(facts["protocol"], facts["defaults"], missing)

    def refusal(self, config: str) -> str | None:
        """Return why labkit in this environment refuses an arm's config (JSON), or None."""
        built = {**json.loads(config), "ablation": SMALLEST_EXPERIMENT["ablation"]}
        refusal: str | None = self._printed(CONFIG_SCRIPT, text=json.dumps(built))
        return refusal

    def _printed(self, script: str, *arguments: str, text: str = "") -> Any:
        """Return the JSON that a script prints here; ``text`` is its standard input."""
        command = self.command([sys.executable, "-c", script, *arguments])
        base, _ = worker_environment.worker_environment(os.environ, threads=1, cores=1)
        variables = self.variables(base)
        try:
            result = package_installer.run(command, IMPORT_TIMEOUT_S, variables, text.encode())
        except package_installer.InstallError as error:
            raise RevisionError(f"environment: {error}") from None
        lines = result.stdout.decode(errors="replace").splitlines()
        try:
            return json.loads(lines[-1] if result.returncode == 0 and lines else "")
        except ValueError:
            raise RevisionError(self._import_error(result.stderr)) from None

    def _import_error(self, stderr: bytes) -> str:
        reason = package_installer.last_line(stderr)
        if self.revision is not None:
            return f"environment.revision={self.revision[:12]}: its worker does not start: {reason}"
        if self.requirements:
            return f"environment.requirements: {reason}; name packages that go together"
        if "Error: " not in reason:
            return f"environment.python={self.python}: not a Python interpreter"
        return f"environment.python={self.python}: {reason}; install labkit's dependencies there"

    @property
    def _exported(self) -> ExportedRevision | None:
        return None if self.revision is None else ExportedRevision(self.revision, self.repository)

    @property
    def _packages(self) -> Path:
        python = self.python or sys.executable
        return package_installer.folder_of(python, sys.version, self.requirements)

    def _numba_cache(self) -> Path:
        """Return the folder of numba's compiled code, which depends on the versions of packages."""
        identity = self.identity()
        exported = self._exported if self.replaces_labkit else None
        if exported and any((exported.tree / name).exists() for name in KERNEL_CACHES):
            del identity["revision"]  # its kernels are shared with other revisions
        if not identity:
            return cache_entries.numba_cache_dir()
        name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        return cache_entries.numba_cache_dir() / name


def _own_variables(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker that imports what this process would.

    ``python -m`` searches the working folder first. The path is spelled out if this process
    searches another folder before it (the sources of ``labkit.replicate --trust``), or if
    PYTHONSAFEPATH is set.
    """
    order = [os.path.abspath(entry) for entry in sys.path]

    def rank(folder: str) -> int:
        return order.index(folder) if folder in order else len(order)

    here, inherited = os.getcwd(), filter(None, base.get("PYTHONPATH", "").split(os.pathsep))
    parts = sorted((*map(os.path.abspath, inherited), here), key=rank)
    if parts[0] == here and not base.get("PYTHONSAFEPATH"):
        return dict(base)
    return _with_path(base, parts)


def _with_path(base: Mapping[str, str], parts: Iterable[str]) -> dict[str, str]:
    """Return environment variables with which Python searches ``parts`` first, in this order."""
    # Without PYTHONSAFEPATH the working folder would precede PYTHONPATH.
    path = os.pathsep.join(dict.fromkeys(parts))
    return {**base, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}


@cache
def imports_of(
    environment: PythonEnvironment, modules: tuple[str, ...], program: str | None
) -> Imports:
    """Build an environment and import labkit in it. The result is cached for this process."""
    environment.build()
    return environment.imports(modules, program)


refusal_of = cache(PythonEnvironment.refusal)


def default_options() -> dict[str, Any]:
    """Return the default value of every option of this labkit, in JSON types."""
    plain: dict[str, Any] = to_plain(from_plain(Experiment, SMALLEST_EXPERIMENT))
    return plain


def known_options(
    config: Mapping[str, Any], theirs: Mapping[str, Any], ours: Mapping[str, Any], where: str = ""
) -> dict[str, Any]:
    """Return a config with the options that another revision of labkit has.

    A default null is left out where the other revision has another default, which then applies: it
    may not read null. ``theirs``, ``ours``: the defaults of the other revision's options, and of
    this one's. ``where``: the prefix of the keys of a part, such as ``engine.``. Raises
    ``RevisionError`` if the config changes an option that the other revision does not have.
    """
    known: dict[str, Any] = {}
    for key, value in config.items():
        if key not in theirs:
            if key not in ours or value != ours[key]:
                raise RevisionError(
                    f"{where}{key}={value}: the arm's revision of labkit has no such option"
                )
        elif all(isinstance(part.get(key), Mapping) for part in (config, theirs, ours)):
            known[key] = known_options(value, theirs[key], ours[key], f"{where}{key}.")
        elif value is not None or theirs[key] is None or ours.get(key) is not None:
            known[key] = value
    return known


def with_defaults(options: Any, defaults: Any) -> Any:
    """Return a part of a config with the defaults of the options that it lacks.

    >>> with_defaults({"kv": {"a": 1}}, {"kv": {"a": 0, "b": 2}, "threads": None})
    {'kv': {'a': 1, 'b': 2}, 'threads': None}
    """
    if not (isinstance(options, Mapping) and isinstance(defaults, Mapping)):
        return options
    known = {key: with_defaults(value, defaults.get(key)) for key, value in options.items()}
    return {**known, **{key: value for key, value in defaults.items() if key not in known}}
