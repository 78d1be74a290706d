"""A rank worker that fails on purpose in rank 1; the variable FAULT names the failure."""

import os
import signal
import sys

from labkit.engine.parallel import rank_worker
from labkit.engine.runner.model_runner import ModelRunner
from labkit.engine.sampling import sampler
from labkit.engine.scheduler.scheduler import Scheduler

STEP = 4  # the call that fails


class Counted:
    """Replaces a method; the STEP-th call runs ``then`` instead."""

    def __init__(self, owner, name, then):
        self.calls, self.original, self.then = 0, getattr(owner, name), then
        setattr(owner, name, lambda *args, **options: self(*args, **options))

    def __call__(self, *args, **options):
        self.calls += 1
        if self.calls == STEP:
            return self.then(self.original, *args, **options)
        return self.original(*args, **options)


def fewer(original, scheduler):
    scheduler._options.max_num_batched_tokens = 1
    return original(scheduler)


def nothing(original, scheduler):
    from labkit.engine.scheduler.scheduler_output import SchedulerOutput

    return SchedulerOutput(())


def another(original, logits, states):
    first, *others = original(logits, states)
    return [first._replace(token=first.token ^ 1), *others]


def die(original, *args, **options):
    os.kill(os.getpid(), signal.SIGKILL)


def stop(original, *args, **options):
    os.kill(os.getpid(), signal.SIGSTOP)


def wrong(original, *args, **options):
    raise ZeroDivisionError("on purpose")


FAULTS = {
    "fewer": (Scheduler, "schedule", fewer),
    "nothing": (Scheduler, "schedule", nothing),
    "stop": (Scheduler, "schedule", stop),
    "stop_forward": (ModelRunner, "launch", stop),
    "die": (ModelRunner, "launch", die),
    "wrong": (ModelRunner, "launch", wrong),
    "another": (sampler, "sample_rows", another),
}

if __name__ == "__main__":
    if os.environ["MLX_RANK"] == "1":
        Counted(*FAULTS[os.environ["FAULT"]])
    status = rank_worker.main()
    sys.stderr.flush()
    os._exit(status)
