"""The action of ``action.yml`` and ``git bisect run``, tried on a repository of a toy engine.

    python benchmarks/regression_in_ci.py planted 5 FOLDER    # a head that is 10 % slower
    python benchmarks/regression_in_ci.py copy 20 FOLDER      # a head that only has another commit
    python benchmarks/regression_in_ci.py bisect 1 FOLDER     # eight commits; one is slower

The repository holds the files of docs/regression.md. The action's own shell commands are run, but
labkit is not installed and no comment is written. ``MINUTES`` and ``MARGIN`` of the environment are
the action's inputs, and ``LAYERS`` is the slower engine's work (22; the other's: 20). Each attempt
prints one line; the last line counts the right answers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```\w+\n# (mine/\S+)\n(.*?)^```$", re.S | re.M)
FAST, SLOWER = "LAYERS = 20", f"LAYERS = {os.environ.get('LAYERS', '22')}"  # of every step
WHO = ["-c", "user.name=toy", "-c", "user.email=toy@localhost"]
MARGIN = os.environ.get("MARGIN", "5")
COMMITS, FIRST_SLOW = 8, 6
ENGINE = "engine.name=mine.toy:Toy"


def action_step(name: str) -> dict[str, Any]:
    """Return a step of the action."""
    steps = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))["runs"]["steps"]
    return next(dict(step) for step in steps if step["name"] == name)


def toy_repository(folder: Path) -> None:
    """Create a repository with the page's files in one commit of the branch main."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    for name, text in BLOCK.findall((ROOT / "docs" / "regression.md").read_text("utf-8")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    commit(folder, 1)


def commit(folder: Path, number: int, slower: bool = False) -> str:
    """Commit another version of the engine and return the commit's hash."""
    engine = folder / "mine" / "toy.py"
    text = engine.read_text("utf-8")
    assert FAST in text or not slower
    text = text.replace(FAST, SLOWER) if slower else text
    engine.write_text(f"{text.partition('# version')[0]}# version {number}\n", "utf-8")
    git(folder, "add", "mine")
    git(folder, *WHO, "commit", "-q", "-m", f"{number}")
    return git(folder, "rev-parse", "HEAD").strip()


def git(folder: Path, *words: str) -> str:
    """Run git in a folder and return its output."""
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def environment(folder: Path) -> dict[str, str]:
    """Return variables with which a command finds this labkit and this interpreter."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "RUNNER_TEMP": str(folder)}


def compare(folder: Path, base: str) -> int:
    """Run the action's step that compares, and return the status that it reports."""
    output = folder.parent / "github_output"
    inputs = {
        "BASE": base,
        "HEAD": "HEAD",
        "WORKLOAD": "eight_at_a_time",
        "MARGIN": MARGIN,
        "MINUTES": os.environ.get("MINUTES", "4"),
        "REPOSITORY": ".",
        "CONFIG_DIR": "mine",
        "ARGUMENTS": f"{ENGINE}\n",
        "GITHUB_OUTPUT": str(output),
        "GITHUB_STEP_SUMMARY": str(folder.parent / "summary.md"),
        "GITHUB_ACTION_PATH": str(ROOT),
    }
    with open(folder.parent / "log.txt", "w", encoding="utf-8") as log:
        subprocess.run(
            ["bash", "-eo", "pipefail", "-c", action_step("compare")["run"]],
            cwd=folder,
            env=environment(folder.parent) | inputs,
            stdout=log,
            stderr=log,
            check=True,
        )
    return int(output.read_text().rpartition("status=")[2])


def attempt(kind: str, folder: Path) -> tuple[str, bool]:
    """Return what one attempt found, and whether it is right (for a copy: not called worse)."""
    toy_repository(folder / "toy")
    if kind != "bisect":
        base = git(folder / "toy", "rev-parse", "main").strip()
        commit(folder / "toy", 2, slower=kind == "planted")
        status = compare(folder / "toy", base)
        return f"status {status}", status == 1 if kind == "planted" else status in (0, 125)
    commits = [
        commit(folder / "toy", number, slower=number == FIRST_SLOW)
        for number in range(2, COMMITS + 1)
    ]
    good = git(folder / "toy", "rev-list", "--max-parents=0", "HEAD").strip()
    git(folder / "toy", "bisect", "start", "HEAD", good)
    words = f"--repository . --config-dir mine --on eight_at_a_time {ENGINE} --margin {MARGIN}"
    minutes = os.environ.get("MINUTES", "2")
    command = [sys.executable, "-m", "labkit.regression"]
    found = subprocess.run(
        ["git", "bisect", "run", *command, good, *words.split(), "--minutes", minutes],
        cwd=folder / "toy",
        env=environment(folder),
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    (folder / "log.txt").write_text(found, "utf-8")
    first = re.search(r"^(\w{40}) is the first bad commit$", found, re.M)
    is_right = first is not None and first[1] == commits[FIRST_SLOW - 2]
    return f"first bad commit {first and first[1]}", is_right


def main(kind: str, attempts: int, folder: Path) -> int:
    """Make the attempts and print what they found."""
    right = 0
    for number in range(attempts):
        start = time.perf_counter()
        text, is_right = attempt(kind, folder / f"{kind}-{number}")
        right += is_right
        print(f"{kind} {number + 1}: {text}, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{kind}: {right} of {attempts} right")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("planted", "copy", "bisect"):
        sys.exit(f"usage: python {sys.argv[0]} planted|copy|bisect ATTEMPTS FOLDER")
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).absolute()))
