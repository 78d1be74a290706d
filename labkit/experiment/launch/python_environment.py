"""Python environments: the interpreter and the packages that an arm's worker imports.

``ablation.arms.NAME.environment`` (:class:`labkit.config.Environment`) names another interpreter,
versions of packages, or a revision of a Git checkout. The packages and the revision are installed
in folders of the cache, which come first on the Python path. Everything else is imported as in the
other arms. The arm's identity holds the full hash of the commit, so a study is not continued after
the revision (a branch, for example) has moved.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

from labkit.config import ConfigError, Environment, Experiment, from_plain, require, to_plain
from labkit.machine import cache_dir, package_installer, worker_environment
from labkit.machine.facts import code_revision

GIT_TIMEOUT_S = 60.0
IMPORT_TIMEOUT_S = 120.0
LABKIT_FOLDERS = ("labkit", "conf")  # of a revision of labkit; the other folders are large
# Revisions with one of these files name their kernels by their sources.
KERNEL_CACHES = ("labkit/cpu/runtime/kernel_cache.py", "labkit/cpu/kernel_cache.py")
# Imports what a worker imports, and prints what the parent must know about it.
IMPORT_SCRIPT = dedent("""
    import importlib, importlib.util, json, sys
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
    smallest, *modules = sys.argv[1:]
    print(json.dumps({
        "protocol": VERSION,
        "defaults": to_plain(from_plain(Experiment, json.loads(smallest))),
        "missing": [m for m in modules if importlib.util.find_spec(m.partition(".")[0]) is None],
    }))
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


class RevisionError(ConfigError):
    """An environment exists, but an arm cannot run in it. The message is one line."""


@dataclass
class _Arm:
    """An environment under the key ``environment``, so that error messages name this key."""

    environment: Environment


@dataclass(frozen=True)
class Imports:
    """The results of importing labkit in an environment.

    Parameters
    ----------
    protocol
        The version of the turn protocol in the imported labkit; None if it has no turn protocol.
    defaults
        The default value of each option of the imported labkit.
    missing
        Those modules of the user's own that do not exist in the environment.
    """

    protocol: int | None
    defaults: Mapping[str, Any]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class PythonEnvironment:
    """An arm's environment.

    Parameters
    ----------
    python
        The absolute path of the interpreter; None: the study's own.
    requirements
        Packages as pip spells them.
    revision
        The full hash of a commit; None: labkit's own files.
    repository
        The absolute path of the checkout of ``revision``; None: labkit's own.
    """

    python: str | None = None
    requirements: tuple[str, ...] = ()
    revision: str | None = None
    repository: str | None = None

    @classmethod
    def resolve(cls, plain: Any) -> PythonEnvironment:
        """Return the environment that an arm's override ``environment`` describes.

        Raises
        ------
        ConfigError
            The description is invalid, or the interpreter or the revision does not exist.
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
        revision = requested.revision and _commit(requested.revision, repository)
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

        Raises
        ------
        ConfigError
            A requirement cannot be installed, or the revision cannot be exported.
        """
        if self.requirements and not self._packages.is_dir():
            self._install()
        if self.revision is not None and not self._tree.is_dir():
            self._export(self.revision)

    def command(self, command: Sequence[str]) -> list[str]:
        """Return ``command`` with this environment's interpreter in place of its first word."""
        return [self.python or command[0], *command[1:]]

    def variables(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of a worker.

        Parameters
        ----------
        base
            The variables of a worker in the study's own environment.
        """
        if not any(vars(self).values()):
            return dict(base)
        # Without PYTHONSAFEPATH the working folder would precede PYTHONPATH.
        inherited = base.get("PYTHONPATH", "").split(os.pathsep)
        parts = [*map(str, self._path()), *filter(None, inherited), os.getcwd()]
        return {
            **base,
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(parts)),
            "NUMBA_CACHE_DIR": str(self._numba_cache()),
        }

    def imports(self, modules: Sequence[str]) -> Imports:
        """Import labkit and its dependencies in this environment, and return the results.

        Parameters
        ----------
        modules
            Modules of the user's own that the arm's options name. They are not imported; the result
            says which are missing.

        Raises
        ------
        RevisionError
            An import fails, or the program is not a Python interpreter.
        """
        facts = self._printed(IMPORT_SCRIPT, json.dumps(SMALLEST_EXPERIMENT), *modules)
        return Imports(facts["protocol"], facts["defaults"], tuple(facts["missing"]))

    def refusal(self, config: str) -> str | None:
        """Return why labkit in this environment refuses an arm's config (JSON); None: it does not.

        Raises ``RevisionError`` as :meth:`imports` does.
        """
        built = {**json.loads(config), "ablation": SMALLEST_EXPERIMENT["ablation"]}
        refusal: str | None = self._printed(CONFIG_SCRIPT, text=json.dumps(built))
        return refusal

    def _printed(self, script: str, *arguments: str, text: str = "") -> Any:
        """Return the JSON that a script prints here; ``text`` is its standard input."""
        command = self.command([sys.executable, "-c", script, *arguments])
        base, _ = worker_environment.worker_environment(os.environ, threads=1, cores=1)
        result = _run(command, IMPORT_TIMEOUT_S, self.variables(base), text.encode())
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
    def _tree(self) -> Path:
        return cache_dir.root() / "environments" / str(self.revision)

    @property
    def _packages(self) -> Path:
        python = self.python or sys.executable
        return package_installer.folder_of(python, sys.version, self.requirements)

    def _path(self) -> list[Path]:
        source = self._tree / "src"
        trees = [source if source.is_dir() else self._tree] if self.revision is not None else []
        return [*trees, *([self._packages] if self.requirements else [])]

    def _numba_cache(self) -> Path:
        """Return the folder of numba's compiled code, which depends on the versions of packages.

        A revision that names its kernels by their sources shares them with others; an earlier one
        has a folder of its own.
        """
        identity = self.identity()
        tree = self._path()[0] if self.replaces_labkit else None
        if tree is not None and any((tree / name).exists() for name in KERNEL_CACHES):
            del identity["revision"]
        if not identity:
            return cache_dir.numba_cache_dir()
        name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        return cache_dir.numba_cache_dir() / name

    def _install(self) -> None:
        with cache_dir.building_directory(self._packages) as folder:
            where = ["--no-deps", "--target", str(folder)]
            log = self._packages.with_suffix(".log")
            try:
                package_installer.install(
                    self.python or sys.executable, self.requirements, log, where
                )
            except package_installer.InstallError as error:
                raise ConfigError(f"environment.requirements: {error}") from None

    def _export(self, revision: str) -> None:
        own = () if self.repository is not None else LABKIT_FOLDERS
        with cache_dir.building_directory(self._tree) as folder:
            archive = _git(self.repository, "archive", "--format=tar", revision, *own)
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                # Links may lead out of the checkout. Python before 3.11.4 has no filters.
                tar.extraction_filter = getattr(tarfile, "tar_filter", None)
                tar.extractall(folder)
            # Workers read their commit from this file (labkit.machine.facts.code_revision).
            (folder / ".git").mkdir()
            (folder / ".git" / "HEAD").write_text(f"{revision}\n")


@cache
def imports_of(environment: PythonEnvironment, modules: tuple[str, ...]) -> Imports:
    """Build an environment and import labkit in it. The result is cached for this process."""
    environment.build()
    return environment.imports(modules)


@cache
def refusal_of(environment: PythonEnvironment, config: str) -> str | None:
    """Return :meth:`PythonEnvironment.refusal`. The result is cached for this process."""
    return environment.refusal(config)


def default_options() -> dict[str, Any]:
    """Return the default value of every option of this labkit, in JSON types."""
    plain: dict[str, Any] = to_plain(from_plain(Experiment, SMALLEST_EXPERIMENT))
    return plain


def known_options(
    config: Mapping[str, Any], theirs: Mapping[str, Any], ours: Mapping[str, Any], where: str = ""
) -> dict[str, Any]:
    """Return a config with the options that another revision of labkit has.

    A default null is left out where the other revision has another default, which then applies: it
    may not read null.

    Parameters
    ----------
    config
        An arm's config, or a part of it.
    theirs, ours
        The defaults of the other revision's options, and of this one's.
    where
        The prefix of the part's keys, such as ``engine.``.

    Raises
    ------
    RevisionError
        The config changes an option that the other revision does not have.
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


def _commit(revision: str, repository: str | None) -> str:
    name = f"{revision}^{{commit}}"
    return _git(repository, "rev-parse", "--verify", "--quiet", name, of=revision).decode().strip()


def _git(repository: str | None, *arguments: str, of: str | None = None) -> bytes:
    """Return the output of a Git command in a checkout (``repository``; None: labkit's own).

    ``of``: a revision that the command looks up. If the command fails, the error message is Git's
    own or, if Git is silent, that this revision does not exist.
    """
    checkout = Path(repository) if repository is not None else code_revision.CHECKOUT
    where = "environment.repository" if repository is not None else "environment.revision"
    require((checkout / ".git").exists(), f"{where}: {checkout} is not a Git checkout")
    result = _run(["git", "-C", str(checkout), *arguments], GIT_TIMEOUT_S, _without_git_variables())
    unknown = of is not None and not result.stderr
    reason = "no such revision" if unknown else package_installer.last_line(result.stderr)
    require(result.returncode == 0, f"environment.revision={of or arguments[-1]}: {reason}")
    return result.stdout


def _without_git_variables() -> dict[str, str]:
    # Inherited variables such as GIT_DIR would make git use another repository.
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def _run(
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    text: bytes = b"",
) -> subprocess.CompletedProcess[bytes]:
    try:
        return package_installer.run(command, timeout_s, environment, text)
    except package_installer.InstallError as error:
        raise ConfigError(f"environment: {error}") from None
