"""Run experiments whole at ``scale=cpu`` and write each as one file of ``outputs/reference``.

    python benchmarks/experiment_studies.py              # names those that have no file yet
    python benchmarks/experiment_studies.py --missing    # runs them: hours
    python benchmarks/experiment_studies.py wall snapshot

The files hold neither pictures nor the HTML page, which would be most of them: ``python -m
labkit.report STUDY.zip`` writes both. Needs an idle machine. A study is run in
``build/experiments``; the same command continues an interrupted one. Exit code 1 if a gate or a run
of any study failed.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from labkit.archive import archive_study

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = ROOT / "conf" / "experiment"
REFERENCE = ROOT / "outputs" / "reference"
STUDIES = ROOT / "build" / "experiments"


def missing() -> list[str]:
    """Return the experiments without committed records."""
    names = sorted(path.stem for path in EXPERIMENTS.glob("*.yaml"))
    return [n for n in names if not any((REFERENCE / f).exists() for f in (n, f"{n}.zip"))]


def run(name: str) -> bool:
    """Run one experiment and archive its study; return whether every gate held."""
    out, start = STUDIES / name, time.monotonic()
    command = [sys.executable, "-m", "labkit", f"experiment={name}", f"out={out.relative_to(ROOT)}"]
    status = subprocess.run([*command, "-m"], cwd=ROOT).returncode
    print(f"{name}: exit code {status} after {time.monotonic() - start:.0f} s", flush=True)
    if status not in (0, 1):
        sys.exit(f"{name}: not archived; the same command continues it")
    archive = REFERENCE / f"{name}.zip"
    shutil.rmtree(out / "plots", ignore_errors=True)
    (out / "report.html").unlink(missing_ok=True)
    print(archive_study(out, archive), flush=True)
    shutil.rmtree(out)
    return status == 0


def main() -> int:
    """Run the named experiments, or all without records."""
    names = sys.argv[1:]
    if not names:
        print("without records:", " ".join(missing()) or "none")
    elif names == ["--missing"]:
        names = missing()
    unknown = [name for name in names if not (EXPERIMENTS / f"{name}.yaml").is_file()]
    if unknown:
        sys.exit(f"{unknown[0]}: no such file in conf/experiment")
    return 0 if all([run(name) for name in names]) else 1


if __name__ == "__main__":
    sys.exit(main())
