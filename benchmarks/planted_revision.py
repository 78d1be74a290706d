"""A revision whose engine is slower than that of its parent, as the environment of an arm.

The commit is made in a temporary clone, which shares the objects of labkit's checkout, so nothing
is left in the checkout. The exported files stay in labkit's cache, like those of every revision.
The same parent and share always give the same commit, so that a study can be continued.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from typing import Any
from unittest.mock import patch

from labkit.experiment.launch.python_environment import PythonEnvironment
from labkit.machine.facts import code_revision

MODULE = "labkit/engine/llm_engine.py"
SLOWER_STEP = dedent("""

    def _slower(step):
        def planted(self):
            start = time.perf_counter()
            events = step(self)
            end = time.perf_counter()
            while time.perf_counter() < end + SHARE * (end - start):
                pass
            return events

        return planted


    LLMEngine.step = _slower(LLMEngine.step)
""")
SIGNATURE = {
    f"GIT_{who}_{key}": value
    for who in ("AUTHOR", "COMMITTER")
    for key, value in {
        "NAME": "planted",
        "EMAIL": "planted@localhost",
        "DATE": "2000-01-01T00:00:00Z",
    }.items()
}


@cache
def slower_revision(parent: str, share: float) -> dict[str, Any]:
    """Return the environment of a commit whose engine steps take ``share`` longer.

    Parameters
    ----------
    parent
        The full hash of the commit's parent, a commit of labkit's checkout.
    share
        For example 0.03 for 3 %.
    """
    with TemporaryDirectory() as clone:
        git(clone, "clone", "--quiet", "--shared", "--no-checkout", code_revision.CHECKOUT, ".")
        environment = PythonEnvironment(revision=_commit(clone, parent, share))
        with patch.object(code_revision, "CHECKOUT", Path(clone)):
            environment.build()
    return environment.identity()


def _commit(clone: str, parent: str, share: float) -> str:
    """Commit the slower step in a clone without a work tree, and return the commit's hash."""
    source = git(clone, "show", f"{parent}:{MODULE}") + SLOWER_STEP.replace("SHARE", str(share))
    blob = git(clone, "hash-object", "-w", "--stdin", text=source).strip()
    git(clone, "read-tree", parent)
    git(clone, "update-index", "--cacheinfo", f"100644,{blob},{MODULE}")
    tree = git(clone, "write-tree").strip()
    message = f"Steps of the engine take {share:.1%} longer"
    return git(clone, "commit-tree", tree, "-p", parent, "-m", message).strip()


def git(folder: str, *arguments: str | Path, text: str | None = None) -> str:
    """Run git in a folder with ``text`` as its input, and return its output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=inherited | SIGNATURE,
        input=text or "",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
