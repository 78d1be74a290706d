"""Watcher of a study's Slurm jobs, which reads their states from the queue (``squeue``).

Submitit reads them from Slurm's accounting (``sacct``), which many small clusters do not have.
Without accounting, submitit would wait forever for a job that was cancelled, ran out of time or
lost its node. Hydra gives up at the first lost job, while other jobs still run;
:meth:`SlurmJobs.wait` waits for all jobs.
"""

from __future__ import annotations

import time

from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from labkit.experiment.hydra.job_launchers import LaunchedJobs

POLL_S = 15
# A job in any state other than these has not ended: it waits, runs, is being requeued, ...
FAILED_STATES = (
    "BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT",
)  # fmt: skip
COMPLETED = "COMPLETED"
FORGOTTEN = "GONE"  # the queue forgets a job some minutes after its end


class QueueWatcher(SlurmInfoWatcher):  # type: ignore[misc]
    """Asks the queue for the states of all jobs in one call, at most every ``POLL_S`` seconds."""

    def __init__(self) -> None:
        super().__init__(delay_s=POLL_S)

    def _make_command(self) -> list[str]:
        return ["squeue", "--me", "--array", "--states=all", "--noheader", "--format=%i|%T"]

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Return the states of jobs by id: ``GONE`` if the queue no longer lists the job.

        A job that was seen to have ended keeps its state.
        """
        text = string if isinstance(string, str) else string.decode()
        states = dict(line.split("|", 1) for line in text.splitlines() if "|" in line)
        listed = {job: {"State": state.strip()} for job, state in states.items()}
        live = (job for job in self.jobs if not self.is_done(job, "cache"))
        return {job: {"State": FORGOTTEN} for job in live} | listed

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return a job's state; ``RUNNING`` stands for every state of a job that has not ended."""
        state: str = self.get_info(job_id, mode=mode).get("State", "UNKNOWN")
        ended = (*FAILED_STATES, COMPLETED, FORGOTTEN, "UNKNOWN")
        return state if state in ended else "RUNNING"

    @property
    def jobs(self) -> list[str]:
        """The ids of this process's jobs, in the order of the cells."""
        return sorted(self._registered, key=lambda job: [int(part) for part in job.split("_")])


class SlurmJobs(LaunchedJobs):
    """The jobs that this process submits from now on."""

    def __init__(self) -> None:
        self._watcher = SlurmJob.watcher = QueueWatcher()

    def running(self) -> list[str]:
        return [job for job in self._watcher.jobs if not self._watcher.is_done(job, "force")]

    def wait(self) -> None:
        while not all(map(self._watcher.is_done, self._watcher.jobs)):
            time.sleep(1)

    def failures(self) -> list[str]:
        states = {job: self._watcher.get_state(job, "cache") for job in self._watcher.jobs}
        return [
            f"Slurm job {job}: {state}" for job, state in states.items() if state in FAILED_STATES
        ]
