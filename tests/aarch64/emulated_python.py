"""A Python of Linux on ARM that runs here: Debian's packages and wheels, under QEMU's user mode.

    python tests/aarch64/emulated_python.py     # fills build/aarch64, about 700 MB

Nothing is installed. Needed are qemu-user-static, apt, dpkg-deb and Debian's keys
(debian-archive-keyring). Packages of Python alone are those of the environment that runs this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "aarch64"
SYSTEM, WHEELS = FOLDER / "system", FOLDER / "wheels"
PYTHON = SYSTEM / "usr/bin/python3.11"
QEMU = "qemu-aarch64-static"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
SOURCES = f"""\
deb [signed-by={KEYS}] http://deb.debian.org/debian bookworm main
deb [signed-by={KEYS}] http://deb.debian.org/debian-security bookworm-security main
"""
# APT's own folders, so that this machine's packages are neither read nor changed.
SETTINGS = """\
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
APT::Sandbox::User "";
Debug::NoLocking "true";
Dir::State "{folder}";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}";
Dir::Etc::sourcelist "{folder}/sources.list";
Dir::Etc::sourceparts "-";
"""
DEBIAN = ("python3.11", "libstdc++6", "libgomp1")
# With machine code; the version is that of the environment.
COMPILED = (
    *("numba", "llvmlite", "numpy", "scipy", "mlx", "mlx-cpu", "safetensors", "tokenizers"),
    *("msgspec", "psutil", "PyYAML", "MarkupSafe", "hypothesis"),
)
GLIBC = 36  # 2.36 is Debian 12's


def command(cpu: str) -> list[str]:
    """Return the words that start the emulated Python on a CPU that QEMU knows."""
    return [QEMU, "-L", str(SYSTEM), "-cpu", cpu, str(PYTHON)]


def environment() -> dict[str, str]:
    """Return the variables of an emulated process."""
    places = [ROOT, WHEELS, sysconfig.get_path("purelib")]
    inherited = {name: text for name, text in os.environ.items() if name != "LD_LIBRARY_PATH"}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "PYTHONPYCACHEPREFIX": str(FOLDER / "pycache"),
        "LABKIT_CACHE": str(FOLDER / "cache"),
        "NUMBA_CACHE_DIR": str(FOLDER / "numba"),
    }


def build() -> None:
    """Fetch what is missing."""
    if not SYSTEM.exists():
        _fetch_system(FOLDER / "apt")
    wanted = [f"{name}=={metadata.version(name)}" for name in COMPILED]
    kept = FOLDER / "wheels.txt"
    if not kept.exists() or kept.read_text().split() != wanted:
        shutil.rmtree(WHEELS, ignore_errors=True)
        tags = [f"manylinux_2_{minor}_aarch64" for minor in range(17, GLIBC + 1)]
        platforms = [f"--platform={tag}" for tag in ("manylinux2014_aarch64", *tags)]
        options = ("--quiet", "--python-version=3.11", "--only-binary=:all:", "--no-deps")
        install = (sys.executable, "-m", "pip", "install", f"--target={WHEELS}", *options)
        subprocess.run([*install, *platforms, *wanted], check=True)
        kept.write_text("\n".join(wanted))


def _fetch_system(apt: Path) -> None:
    (apt / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    (apt / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(SOURCES)
    (apt / "apt.conf").write_text(SETTINGS.format(folder=apt))
    variables = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    install = ("install", "--yes", "--download-only", "--no-install-recommends", *DEBIAN)
    for words in (("update",), install):
        subprocess.run(["apt-get", "--quiet", *words], env=variables, check=True)
    unpacked = apt / "unpacked"
    for package in sorted((apt / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, unpacked], check=True)
    unpacked.rename(SYSTEM)


if __name__ == "__main__":
    build()
