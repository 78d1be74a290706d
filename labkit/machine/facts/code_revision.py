"""The revision of the code that ran: the checkout's commit, and a hash of uncommitted changes.

Workers read the commit from files, so that they start no process. The parent process runs git to
find the uncommitted changes, before and after each run.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
CODE_FOLDERS = ("labkit", "conf")
CLEAN = "clean"
GIT_TIMEOUT_S = 10


@cache
def commit(checkout: Path = CHECKOUT) -> str | None:
    """Return the commit of the checkout that labkit runs from, or that pip installed it from.

    None for a release, and wherever no commit is known.
    """
    folder = checkout / ".git"
    if folder.is_file():  # a worktree: "gitdir: PATH"
        folder = checkout / folder.read_text().split(":", 1)[1].strip()
    if not folder.is_dir():
        for origin in checkout.glob("mlx_labkit-*.dist-info/direct_url.json"):  # pip's, of git+URL
            found = json.loads(origin.read_text("utf-8")).get("vcs_info", {}).get("commit_id")
            return None if found is None else str(found)
        return None
    head = (folder / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    reference = head.removeprefix("ref: ")
    common = folder / "commondir"
    if common.is_file():
        folder = (folder / common.read_text().strip()).resolve()
    if (folder / reference).is_file():
        return (folder / reference).read_text().strip()
    for line in (folder / "packed-refs").read_text().splitlines():
        if line.endswith(f" {reference}"):
            return line.split()[0]
    return None


def uncommitted_changes(checkout: Path = CHECKOUT) -> str | None:
    """Return a hash of the uncommitted changes in ``labkit/`` and ``conf/``, including new files.

    It has 16 hex digits; ``clean`` if nothing changed, None outside a checkout or without git.
    """
    if not (checkout / ".git").exists():
        return None
    try:
        diff = _git(checkout, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
        new_files = _git(checkout, "ls-files", "-z", "--others", "--exclude-standard")
    except (OSError, subprocess.SubprocessError):
        return None
    digest = hashlib.sha256(diff)
    for name in sorted(filter(None, new_files.split(b"\0"))):
        digest.update(name + b"\0" + (checkout / os.fsdecode(name)).read_bytes())
    return digest.hexdigest()[:16] if diff or new_files else CLEAN


def _git(checkout: Path, *arguments: str) -> bytes:
    # Inherited variables such as GIT_DIR would make git use another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # A checkout may be another user's, as in containers: its code runs here, so it is trusted.
    return subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", str(checkout), *arguments, "--", *CODE_FOLDERS],
        env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=GIT_TIMEOUT_S,
        check=True,
    ).stdout
