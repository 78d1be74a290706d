"""Cells spread over processes or machines by one of Hydra's launchers.

What a launcher needs is checked before anything is written. What became of its jobs is asked
of whoever runs them (:class:`LaunchedJobs`); what became of the cells, their files say.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from typing import Any

from labkit.config import ConfigError, require

# Hydra's plugins, and which of our extras installs them.
EXTRAS = {
    "hydra_submitit_launcher": "slurm",
    "hydra_joblib_launcher": "joblib",
    "hydra_ray_launcher": "ray",
}
SLURM = "SlurmLauncher"
LOST = ("submitit", "joblib", "ray")  # whose exceptions tell of a job that was lost


class LaunchedJobs:
    """The jobs of a launcher that waits for all of them itself, and knows no more than that."""

    def running(self) -> list[str]:
        """Name the jobs that go on without the process that launched them."""
        return []

    def wait(self) -> None:
        """Wait until every job has ended."""

    def endings(self) -> list[str]:
        """Say of every job that did not end well how it ended."""
        return []


@dataclass(frozen=True)
class JobLauncher:
    """A launcher: its word in ``hydra/launcher=`` and the class behind it."""

    name: str
    target: str

    @staticmethod
    def of(hydra: Any) -> JobLauncher:
        """Return the launcher of a composed config's ``hydra`` node."""
        return JobLauncher(hydra.runtime.choices["hydra/launcher"], hydra.launcher["_target_"])

    @property
    def is_local(self) -> bool:
        """Whether cells run one after the other in this process: nothing is spread."""
        return self.target.endswith(".BasicLauncher")

    def check(self, multirun: bool) -> None:
        """Refuse a launcher that cannot work.

        Raises
        ------
        ConfigError
            Its extra is missing, ``-m`` is, or there is no Slurm here.
        """
        if self.is_local:
            return
        package = self.target.split(".")[1]
        if not _installed(f"hydra_plugins.{package}"):
            raise ConfigError(missing(self.name, EXTRAS.get(package, self.name)))
        require(multirun, f"hydra/launcher={self.name}: it launches cells; add -m at the end")
        require(
            not self.target.endswith(SLURM) or shutil.which("srun") is not None,
            f"hydra/launcher={self.name}: there is no srun here; run it where jobs are submitted",
        )

    def jobs(self) -> LaunchedJobs:
        """Return what tells of this launcher's jobs; to be asked for before they are launched."""
        if self.target.endswith(SLURM):
            from labkit.experiment.slurm_watcher import SlurmJobs

            return SlurmJobs()
        return LaunchedJobs()


def missing(name: str, extra: str) -> str:
    """Say which extra a launcher lacks."""
    return f"hydra/launcher={name}: it is not installed; pip install 'labkit[{extra}]'"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def is_lost_job(error: Exception) -> bool:
    """Tell whether an exception says that a job was lost, not what went wrong in it."""
    return type(error).__module__.split(".")[0] in LOST
