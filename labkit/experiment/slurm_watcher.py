"""What became of a study's Slurm jobs, as the queue itself tells it (``squeue``).

Submitit asks the accounting (``sacct``), which many small clusters do not have: it would then
wait for ever for a job that was cancelled, ran out of time or lost its node. And Hydra gives up
at the first job that is lost, while the others still run: :meth:`SlurmJobs.wait` does not.
"""

from __future__ import annotations

import time

from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from labkit.experiment.job_launcher import LaunchedJobs

POLL_S = 15
# A job in any other state is not over: it waits, runs, is being requeued, ...
FAILED = ("BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
DONE, GONE = "COMPLETED", "GONE"  # the queue forgets a job some minutes after its end


class QueueWatcher(SlurmInfoWatcher):  # type: ignore[misc]
    """Asks the queue for all jobs at once, at most every ``POLL_S`` seconds."""

    def __init__(self) -> None:
        super().__init__(delay_s=POLL_S)

    def _make_command(self) -> list[str]:
        asked = ["--me", "--array", "--states=all", "--noheader", "--format=%i|%T"]
        return ["squeue", *asked]

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Return every job's state; one that the queue no longer knows has gone."""
        text = string if isinstance(string, str) else string.decode()
        found = dict(line.split("|", 1) for line in text.splitlines() if "|" in line)
        known = {job: {"State": state.strip()} for job, state in found.items()}
        return {job: {"State": GONE} for job in self.jobs} | known

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return the state in submitit's words: all that is not over is ``RUNNING``."""
        state: str = self.get_info(job_id, mode=mode).get("State", "UNKNOWN")
        return state if state in (*FAILED, DONE, GONE, "UNKNOWN") else "RUNNING"

    @property
    def jobs(self) -> list[str]:
        """The jobs of this process, in the order of the cells."""
        return sorted(self._registered, key=lambda job: [int(part) for part in job.split("_")])


class SlurmJobs(LaunchedJobs):
    """The jobs that this process submits from now on."""

    def __init__(self) -> None:
        self._watcher = SlurmJob.watcher = QueueWatcher()

    def running(self) -> list[str]:
        """Name the jobs that are not over: they go on without this process."""
        return [job for job in self._watcher.jobs if not self._watcher.is_done(job, "force")]

    def wait(self) -> None:
        """Wait until every job is over."""
        while not all(map(self._watcher.is_done, self._watcher.jobs)):
            time.sleep(1)

    def endings(self) -> list[str]:
        """Say of every job that did not end well how it ended."""
        states = {job: self._watcher.get_state(job, "cache") for job in self._watcher.jobs}
        return [f"Slurm job {job}: {state}" for job, state in states.items() if state in FAILED]
