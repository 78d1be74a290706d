"""Install Python packages once, in a folder of the cache: with uv if it is on PATH, else pip."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from labkit.machine import cache_entries

INSTALL_TIMEOUT_S = 1800.0
INDEX_TIMEOUT_S = 10.0


class InstallError(ValueError):
    """A program cannot be run, or packages cannot be installed. The message is one line."""


def folder_of(*described: object) -> Path:
    """Return the cache's folder for an environment, which is named by what describes it.

    The architecture is part of the name: hosts of two may share the cache.
    """
    digest = hashlib.sha256(json.dumps((platform.machine(), *described)).encode()).hexdigest()
    return cache_entries.root() / "environments" / digest[:16]


def build_venv(
    folder: Path, python: str, requirements: Sequence[str], without: Sequence[str], index: str
) -> None:
    """Build a virtual environment with packages and their dependencies, unless it exists.

    Scripts in its ``bin`` name another folder, in which it was built: run them with ``bin/python``.
    ``without``: dependencies that are removed again. ``index``: a package index that is asked, too,
    if the configured ones lack something; empty: none. Raises ``InstallError`` if the environment
    cannot be built. The message names the installer's log.
    """
    if folder.is_dir():
        return
    with cache_entries.building_directory(folder) as unfinished:
        uv = shutil.which("uv")
        venv = [uv, "venv", "--quiet", "--python", python] if uv else [python, "-m", "venv"]
        made = run([*venv, *(["--clear"] if uv else []), str(unfinished)], INSTALL_TIMEOUT_S)
        if made.returncode:
            raise InstallError(last_line(made.stderr))
        inside = str(unfinished / "bin" / "python")
        try:
            install(inside, requirements, folder.with_suffix(".log"))
        except InstallError:
            if not (index and _answers(index)):
                raise
            best = ["--index-strategy", "unsafe-best-match"] if uv else []
            options = ["--extra-index-url", index, *best]
            install(inside, requirements, folder.with_suffix(".log"), options)
        if without:
            run([*_installer(inside, "uninstall"), *([] if uv else ["-y"]), *without], 600.0)


def install(
    python: str, requirements: Sequence[str], log: Path, options: Sequence[str] = ()
) -> None:
    """Install packages for an interpreter. ``log``: a file that gets the installer's messages.

    Raises ``InstallError`` if they cannot be installed. The message ends with the path of the log.
    """
    print(f"labkit: installing {' '.join(requirements)} (once)", file=sys.stderr)
    command = [*_installer(python, "install"), *options, *requirements]
    result = run(command, INSTALL_TIMEOUT_S)
    if result.returncode:
        cache_entries.write_file(log, result.stdout + result.stderr)
        raise InstallError(f"{last_line(result.stderr)} ({log})")


def run(
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    text: bytes = b"",
) -> subprocess.CompletedProcess[bytes]:
    """Run a command that reads ``text`` to its end; raise ``InstallError`` if it does not start."""
    try:
        return subprocess.run(
            command,
            env=None if environment is None else dict(environment),
            input=text,
            capture_output=True,
            timeout=timeout_s,
        )
    except OSError as error:
        raise InstallError(f"{command[0]}: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise InstallError(f"{command[0]}: no answer within {timeout_s:.0f} s") from None


def last_line(stderr: bytes) -> str:
    """Return the last error in a program's messages, without the prefix of pip or git."""
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or line.startswith("fatal: ")]
    line = (errors or lines or ["it ended without a message"])[-1]
    return line.removeprefix("ERROR: ").removeprefix("fatal: ")


def _installer(python: str, verb: str) -> list[str]:
    if shutil.which("uv"):
        return ["uv", "pip", verb, "--python", python]
    return [python, "-m", "pip", verb, "--quiet"]


def _answers(index: str) -> bool:
    """Return whether an index can be reached: pip would ask one that cannot for every package."""
    try:
        urllib.request.urlopen(index, timeout=INDEX_TIMEOUT_S).close()
    except OSError:
        return False
    return True
