"""Job launchers: Hydra's launchers, which run cells in local processes or on other machines.

A launcher's requirements are checked before anything is written. The state of its jobs comes
from :class:`LaunchedJobs`, and that of the cells from their files.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from typing import Any

from labkit.config import ConfigError, require
from labkit.config.package_extras import install_hint

# The extra of labkit that installs each of Hydra's plugins.
EXTRAS = {
    "hydra_submitit_launcher": "slurm",
    "hydra_joblib_launcher": "joblib",
    "hydra_ray_launcher": "ray",
}
SLURM_LAUNCHER = "SlurmLauncher"
# Packages whose exceptions mean that a job was lost, not that its code raised an error.
JOB_PACKAGES = ("submitit", "joblib", "ray")


class LaunchedJobs:
    """The jobs of a launcher, watched by the process that launched them.

    This class is for a launcher that returns only when all of them have ended, and does not report
    their states.
    """

    def running(self) -> list[str]:
        """Return the names of the jobs that continue without this process."""
        return []

    def wait(self) -> None:
        """Wait until every job has ended."""

    def failures(self) -> list[str]:
        """Return a line for every job that failed: ``Slurm job 7_1: TIMEOUT``."""
        return []


@dataclass(frozen=True)
class JobLauncher:
    """A launcher of Hydra's, and the sweeper that makes its cells."""

    name: str  # in ``hydra/launcher=NAME``
    target: str  # the path of its class
    sweeper: str = "basic"
    is_search: bool = False  # whether the sweeper chooses each cell by the results of earlier ones
    trials: int | None = None  # the number of these cells, if the sweeper has an option for it

    @staticmethod
    def of(hydra: Any) -> JobLauncher:
        choices = hydra.runtime.choices
        return JobLauncher(
            choices["hydra/launcher"],
            hydra.launcher["_target_"],
            choices["hydra/sweeper"],
            is_search(hydra),
            hydra.sweeper.get("n_trials"),
        )

    @property
    def is_local(self) -> bool:
        """Whether cells run one after the other in this process."""
        return self.target.endswith(".BasicLauncher")

    def check(self, multirun: bool) -> None:
        """Raise ``ConfigError`` if its plugin or Slurm is not installed, or ``-m`` is missing."""
        require(
            multirun or not self.is_search,
            f"hydra/sweeper={self.sweeper} runs many trials; add -m at the end of the command",
        )
        require(
            self.is_local or not self.is_search,
            f"hydra/launcher={self.name}: hydra/sweeper={self.sweeper} chooses a trial by the "
            "results of earlier trials, so its trials run one after the other; leave "
            "hydra/launcher at its default",
        )
        if self.is_local:
            return
        package = self.target.split(".")[1]
        if not _is_installed(f"hydra_plugins.{package}"):
            raise ConfigError(not_installed(self.name, EXTRAS.get(package, self.name)))
        require(
            multirun,
            f"hydra/launcher={self.name} launches many cells; add -m at the end of the command",
        )
        require(
            not self.target.endswith(SLURM_LAUNCHER) or shutil.which("srun") is not None,
            f"hydra/launcher={self.name}: srun is not installed here; run the command on a host "
            "that submits Slurm jobs",
        )

    def watch_jobs(self) -> LaunchedJobs:
        """Return a watcher of this launcher's jobs; call it before they are launched."""
        if self.target.endswith(SLURM_LAUNCHER):
            from labkit.experiment.hydra.slurm_watcher import SlurmJobs

            return SlurmJobs()
        return LaunchedJobs()


def is_search(hydra: Any) -> bool:
    """Return whether a config's sweeper searches: it chooses trials one by one, as Optuna does."""
    return not str(hydra.sweeper["_target_"]).endswith(".BasicSweeper")


def not_installed(name: str, extra: str, group: str = "hydra/launcher") -> str:
    """Return the message that a plugin is not installed, with the extra that installs it."""
    return f"{group}={name} is not installed; {install_hint(extra)}"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False


def is_lost_job(error: Exception) -> bool:
    """Return whether an exception means that a job was lost, not that its code raised an error."""
    return type(error).__module__.split(".")[0] in JOB_PACKAGES
