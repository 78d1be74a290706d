"""Which code ran: the checkout's commit, and a hash of what was changed since.

The commit is read from files, so that a worker starts no process; the changes are asked
of git by the parent, beside each run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("labkit", "conf")
CLEAN = "clean"
GIT_TIMEOUT_S = 10


@cache
def commit(checkout: Path = CHECKOUT) -> str | None:
    """Return the commit of the checkout that labkit runs from, or None where there is none."""
    folder = checkout / ".git"
    if folder.is_file():  # a worktree: "gitdir: PATH"
        folder = checkout / folder.read_text().split(":", 1)[1].strip()
    if not folder.is_dir():
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
    """Hash what differs from the commit in ``labkit/`` and ``conf/``, new files included.

    Returns
    -------
    ``clean``, 16 hex digits, or None where this is no checkout or there is no git.
    """
    if not (checkout / ".git").exists():
        return None
    try:
        text = _git(checkout, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
        new = _git(checkout, "ls-files", "-z", "--others", "--exclude-standard")
    except (OSError, subprocess.SubprocessError):
        return None
    digest = hashlib.sha256(text)
    for name in sorted(filter(None, new.split(b"\0"))):
        digest.update(name + b"\0" + (checkout / os.fsdecode(name)).read_bytes())
    return digest.hexdigest()[:16] if text or new else CLEAN


def _git(checkout: Path, *words: str) -> bytes:
    # GIT_DIR and its like would ask about another repository than this one.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", "-C", str(checkout), *words, "--", *CODE_FOLDERS],
        env={**ours, "GIT_OPTIONAL_LOCKS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=GIT_TIMEOUT_S,
        check=True,
    ).stdout
