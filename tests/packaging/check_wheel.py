"""labkit as somebody without the checkout has it: the wheel, alone and with each of its extras.

    python tests/packaging/check_wheel.py dist/*.whl [--only NAME,...]

The wheel, and the wheel with each extra, is installed into an environment of its own, and asked in
an empty folder for what the extra is for; without one, for the main job, which then finds nothing
but the requirements of the wheel. Then labkit is removed, and must leave no file behind. The exit
status is 1 if anything failed; a line per environment says its size.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

STUDY = "-m labkit ablation=none design=quick design.control=false design.time=15s"
CELLS = "-m labkit ablation=seq_map,grid"
MAIN_JOB = "-m labkit engine=paged ablation=seq_map design.time=20s out=study -m"
SERVER = """
import json, re, subprocess, sys, urllib.request
command = [sys.executable, "-m", "labkit.serve", "engine=paged", "model=tiny", "server.port=0"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
try:
    lines = (re.search(r"http://[\\d.]+:\\d+", line) for line in server.stdout)
    url = next(found[0] for found in lines if found)
    body = json.dumps({"model": "tiny", "prompt": "Once", "max_tokens": 4}).encode()
    header = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, header)
    assert json.load(urllib.request.urlopen(request))["usage"]["completion_tokens"] == 4
finally:
    server.terminate()
    server.wait()
"""
FRAMES = "import pathlib; from labkit.analysis import load; assert len(load(pathlib.Path('study')))"
OPENAI = "engine=openai engine.server.preset"
# What an extra is for: commands, each the arguments of the environment's Python.
USES: dict[str, list[list[str]]] = {
    "": [MAIN_JOB.split(), ["-m", "labkit.report", "study"], ["-m", "labkit", "--help"]],
    "mlx": [f"{STUDY} workload=uniform_4".split()],
    "pandas": [MAIN_JOB.split(), ["-c", FRAMES]],
    "server": [["-c", SERVER]],
    "http": [f"{STUDY} {OPENAI}=labkit plan=true".split()],
    "llamacpp": [f"{STUDY} workload=uniform_4 {OPENAI}=xllamacpp".split()],
    "video": [f"{STUDY} workload=video".split()],
    "slurm": [["-c", "import hydra_plugins.hydra_submitit_launcher.submitit_launcher"]],
    "joblib": [
        ["-m", "labkit", "ablation=seq_map,grid", "hydra/launcher=joblib", "plan=true", "-m"]
    ],
    "ray": [["-m", "labkit", "ablation=seq_map,grid", "hydra/launcher=ray", "plan=true", "-m"]],
    "optuna": [["-c", "import hydra_plugins.hydra_optuna_sweeper.optuna_sweeper"]],
    "docs": [["-c", "import material, mkdocs, mkdocstrings_handlers.python"]],
}


def checked(words: list[str], folder: Path) -> None:
    """Run a command in a folder, without the checkout; raise if it fails."""
    own = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)[:200]}: {done.returncode}\n{done.stderr[-2000:]}")


def environment_without_checkout(folder: Path, requirement: str) -> Path:
    """Create an environment with the wheel, by uv if there is one, and return its Python."""
    python = folder / "bin" / "python"
    checked([sys.executable, "-m", "venv", str(folder)], folder.parent)
    uv = shutil.which("uv") or shutil.which("uv", path=os.path.dirname(sys.executable))
    pip = [uv, "pip", "--quiet"] if uv else [str(python), "-m", "pip", "--quiet"]
    where = ["--python", str(python)] if uv else []
    checked([*pip, "install", *where, requirement], folder.parent)
    return python


def check(wheel: Path, extra: str, folder: Path) -> str:
    """Check the wheel with an extra, and return a line on its environment."""
    requirement = f"{wheel.resolve()}[{extra}]" if extra else str(wheel.resolve())
    python, here = environment_without_checkout(folder / "env", requirement), folder / "empty"
    here.mkdir()
    for arguments in USES[extra]:
        checked([str(python), *arguments], here)
    size = sum(file.stat().st_size for file in (folder / "env").rglob("*") if file.is_file())
    packages = len(list((folder / "env").glob("lib/python*/site-packages/*.dist-info")))
    checked([str(python), "-m", "pip", "uninstall", "--yes", "mlx-labkit"], here)
    left = [str(path) for path in (folder / "env").rglob("*labkit*")]
    if left:
        raise RuntimeError(f"after pip uninstall: {left}")
    return f"{packages} packages, {size / 1e6:.0f} MB"


def main() -> int:
    """Check the environments that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", default=",".join(USES), help="extras; '' is the wheel alone")
    options = parser.parse_args()
    failed = 0
    for extra in options.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            try:
                line = check(options.wheel, extra, Path(folder))
            except (RuntimeError, OSError) as error:
                line, failed = f"FAILED: {error}", failed + 1
            print(f"{extra or 'alone'}: {line}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
