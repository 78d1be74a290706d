"""An exported revision: the files of a Git commit in the cache, in place of those of the checkout.

What an arm imports of a repository must be the commit's. Elsewhere on the Python path it would be
the same in every arm, and no comparison would show a difference. So a folder of the checkout on the
path (the working folder, one of PYTHONPATH, that of an editable install) is replaced by the
commit's folder of this name, and a module that still comes from somewhere else is refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from labkit.config import ConfigError, require
from labkit.machine import cache_entries, package_installer
from labkit.machine.facts import code_revision

GIT_TIMEOUT_S = 60.0
EXPORT_TIMEOUT_S = 1800.0
# Neither the user's post-checkout runs, nor do the submodules of the checkout move to the export.
SETTINGS = ("-c", "core.hooksPath=/dev/null", "-c", "submodule.recurse=false")
LABKIT_FOLDERS = ("labkit", "conf")  # of a revision of labkit; the other folders are large
INSTALLED = frozenset(("site-packages", "dist-packages"))  # a checkout may hold an environment


class RevisionError(ConfigError):
    """An environment exists, but an arm cannot run in it. The message is one line."""


@dataclass(frozen=True)
class ExportedRevision:
    """A commit of a checkout. Its folder in the cache exists after :meth:`export`."""

    commit: str  # the full hash
    # The absolute path of the checkout; None: labkit's own, of which LABKIT_FOLDERS are exported.
    repository: str | None

    @property
    def tree(self) -> Path:
        """The folder of the commit's files. Its name says which of them it has."""
        name = self.commit if self.repository is None else f"{self.commit}-all"
        return cache_entries.root() / "environments" / name

    def export(self) -> None:
        """Write the commit's files into the cache, unless it has them.

        Raises ``RevisionError`` if Git cannot read them, and ``CacheError`` if the disk is full.
        """
        if self.tree.is_dir():
            return
        paths = LABKIT_FOLDERS if self.repository is None else (".",)
        with cache_entries.building_directory(self.tree) as folder:
            (folder / ".git").mkdir()
            index = folder / ".git" / "index"  # not the checkout's own
            where = (f"--git-dir={self._checkout / '.git'}", "--work-tree=.", *SETTINGS)
            self._git("-C", str(folder), *where, "checkout", self.commit, "--", *paths, index=index)
            index.unlink()
            # Workers read their commit from this file (labkit.machine.facts.code_revision).
            (folder / ".git" / "HEAD").write_text(f"{self.commit}\n")

    def folders(self, inherited: Sequence[str]) -> list[Path]:
        """Return the commit's folders on an arm's Python path.

        Of a repository these are ``src`` if it has one, its root, and what replaces the folders of
        the checkout in ``inherited`` and on this process's own path.
        """
        if self.repository is None:
            return [self.tree]
        source = self.tree / "src"
        replaced = (Path(name).resolve() for name in (*inherited, *sys.path))
        own = (path.relative_to(self._checkout) for path in replaced if self._is_own(path))
        found = [*([source] if source.is_dir() else []), self.tree, *(self.tree / p for p in own)]
        return list(dict.fromkeys(found))

    def others(self, inherited: Iterable[str]) -> list[str]:
        """Return the folders of a Python path without those that :meth:`folders` replaces."""
        return [name for name in inherited if not self._is_own(Path(name).resolve())]

    def check_imports(self, named: Mapping[str, str | None], loaded: Iterable[str]) -> None:
        """Check that an arm imports the repository's modules from this commit.

        ``named``: the modules and scripts that the arm's options name, each with its file; None:
        there is no such module. ``loaded``: the files of all modules that importing the named ones
        has loaded. Raises ``RevisionError`` if a named module does not exist, or a module of the
        repository comes from another file.
        """
        for module, found in named.items():
            if found is None and (self.repository is not None or module.startswith("labkit.")):
                raise self._error(f"no module {module!r} at this revision")
        if self.repository is None:
            return
        names = {file: name for name, file in named.items() if file}
        tree = self.tree.resolve()
        for file in (*names, *loaded):
            name, path = names.get(file), Path(file).resolve()
            if path.is_relative_to(tree):
                continue
            linked = Path(file).is_relative_to(self.tree)
            if linked or self._is_own(path) or (name is not None and self._has_file_of(name)):
                remedy = "if the revision has it, put its folder in the checkout on PYTHONPATH"
                if name is not None and name.endswith(".py"):
                    remedy = "start it as a module, {python} -m NAME"
                raise self._error(
                    f"{name or 'a module'} would come from {file}, not from the revision; {remedy}"
                )

    @cached_property
    def _checkout(self) -> Path:
        return _checkout(self.repository).resolve()

    def _is_own(self, path: Path) -> bool:
        """Return whether a resolved path is a file or folder of the repository in its checkout."""
        if self.repository is None or not path.is_relative_to(self._checkout):
            return False
        inside = (cache_entries.root().resolve(), code_revision.CHECKOUT)  # may lie inside it
        if any(self._checkout in p.parents and path.is_relative_to(p) for p in inside):
            return False
        return INSTALLED.isdisjoint(path.relative_to(self._checkout).parts)

    def _has_file_of(self, module: str) -> bool:
        path = module.replace(".", "/")
        ends = (".py", "/__init__.py", "/__main__.py")
        patterns = (f":(glob)**/{path}{end}" for end in ends)
        options = ("--cached", "--others", "--exclude-standard", "--")
        return bool(self._git("-C", str(self._checkout), "ls-files", *options, *patterns))

    def _git(self, *arguments: str, index: Path | None = None) -> bytes:
        try:
            result = _run_git(arguments, EXPORT_TIMEOUT_S, index)
        except ConfigError as error:
            raise self._error(str(error)) from None
        if result.returncode:
            raise self._error(package_installer.last_line(result.stderr))
        return result.stdout

    def _error(self, reason: str) -> RevisionError:
        return RevisionError(f"environment.revision={self.commit[:12]}: {reason}")


def commit_of(revision: str, repository: str | None) -> str:
    """Return the full hash of a revision of a checkout; None: labkit's own.

    Raises ``ConfigError`` if there is no such checkout or revision, or Git refuses to read it.
    """
    checkout = _checkout(repository)
    where = "environment.repository" if repository is not None else "environment.revision"
    require((checkout / ".git").exists(), f"{where}: {checkout} is not a Git checkout")
    name = f"{revision}^{{commit}}"
    command = ("-C", str(checkout), "rev-parse", "--verify", "--quiet", name)
    result = _run_git(command, GIT_TIMEOUT_S)
    reason = package_installer.last_line(result.stderr) if result.stderr else "no such revision"
    require(result.returncode == 0, f"environment.revision={revision}: {reason}")
    return result.stdout.decode().strip()


def _checkout(repository: str | None) -> Path:
    return Path(repository) if repository is not None else code_revision.CHECKOUT


def _run_git(
    arguments: Sequence[str], timeout_s: float, index: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    # Inherited variables such as GIT_DIR would make git use another repository.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    if index is not None:
        variables["GIT_INDEX_FILE"] = str(index)
    try:
        return package_installer.run(["git", *arguments], timeout_s, variables)
    except package_installer.InstallError as error:
        raise ConfigError(f"environment: {error}") from None
