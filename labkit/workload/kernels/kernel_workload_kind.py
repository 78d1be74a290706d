"""Kernel workloads (``workload.kind=kernel``): attention alone, on batches of given shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from labkit.config import Device, Experiment, State, require
from labkit.config.engine.attention import MLX_BACKENDS
from labkit.workload import device_availability, in_process_rules
from labkit.workload.kernels import kernel_cases
from labkit.workload.workload_protocols import START_SECONDS, Estimate, InterleavedArms, TurnContext

# Measured on a two-core x86-64 with AVX-512; for estimates only.
FILL_BYTES_PER_SECOND = 1e9
READ_BYTES_PER_SECOND = 15e9
FLOPS = 120e9
EMULATED_FLOPS = 20e6
EMULATED_SECONDS = 0.1  # minimum time of a launch, which starts a process
FLUSH_SECONDS = 10e-3
# Wash-outs per turn of an arm. With warm caches, two arms and a control share one.
WASHOUTS = {State.hot: 1.0, State.warm: 1 / 3, State.cold: 0.0, State.both: 0.5}
PROCESS_BYTES = 150 << 20


class KernelKind:
    """Times single attention launches of the workload's cases; see ``WorkloadKind``."""

    def check(self, experiment: Experiment) -> None:
        w = experiment.workload
        smallest = min(size.pool_bytes for size in _sizes(experiment))
        require(
            smallest <= w.max_pool_bytes,
            f"workload.max_pool_bytes={w.max_pool_bytes}: every case of workload={w.name} needs "
            f"more; set {smallest} or more",
        )
        prefill = next((case.name for case in w.cases if case.prefills), None)
        require(
            prefill is None or experiment.engine.attention.resolver != "identity",
            f"engine.attention.resolver=identity: it handles decode only, and workload={w.name} "
            f"has prefill (case {prefill!r}); set another resolver",
        )

    def prepare(self, experiment: Experiment) -> None:
        self.check(experiment)

    def apart(self, experiments: Sequence[Experiment]) -> str | None:
        reason = in_process_rules.first_reason(in_process_rules.OF_A_PROCESS, experiments)
        reason = reason or _unaligned(experiments)
        if reason is None and len({e.workload.dtype for e in experiments}) > 1:
            return (
                "the arms differ in workload.dtype, so they cannot share queries, keys and values"
            )
        warm = [e.engine.attention for e in experiments if e.workload.state is State.warm]
        if reason is None and len({attention.backend for attention in warm}) > 1:
            return (
                "the arms differ in engine.attention.backend, so they leave other memory in the "
                "caches; workload.state=hot would allow one process"
            )
        return reason

    def not_live(self, experiments: Sequence[Experiment]) -> str | None:
        reason = in_process_rules.first_reason(in_process_rules.OF_A_MACHINE, experiments)
        return reason or _unaligned(experiments)

    def load(self, experiments: Sequence[Experiment], context: TurnContext) -> InterleavedArms:
        from labkit.engine import attention
        from labkit.workload.kernels.interleaved_kernels import InterleavedKernels
        from labkit.workload.kernels.kernel_arms import KernelArm

        arms = [
            KernelArm(
                engine=e.engine.name,
                make_backend=partial(attention.create_from_config, e.engine.attention),
                workload=e.workload,
                block_size=e.engine.kv.block_size,
                queued=device_availability.queued(e.engine.attention),
            )
            for e in experiments
        ]
        return InterleavedKernels(arms, context)

    def estimate(self, experiment: Experiment) -> Estimate:
        w = experiment.workload
        run = [size for size in _sizes(experiment) if kernel_cases.skip_reason(size, w) is None]
        pool = max((size.pool_bytes for size in run), default=0)
        output = [kernel_cases.element_bytes(w) * kernel_cases.query_elements(s, w) for s in run]
        seconds = START_SECONDS + pool / FILL_BYTES_PER_SECOND
        for size, written in zip(run, output, strict=True):
            rounds = w.num_repeats * size.case.factor * (2 if w.state is State.both else 1)
            launch = _launch_seconds(size, experiment, written)
            part = kernel_cases.scaled_case(size.case, kernel_cases.washout_share(size, w))
            washed = kernel_cases.geometry(part, w, size.block_size)
            washout = _launch_seconds(washed, experiment, 0)
            flush = FLUSH_SECONDS if w.state in (State.cold, State.both) else 0.0
            timed = launch * _timed_launches(size, experiment)
            between = flush + WASHOUTS[w.state] * washout
            seconds += launch + (w.warmup + 2) * washout + rounds * (timed + between)
        return Estimate(seconds, PROCESS_BYTES + pool + sum(output) + 2 * max(output, default=0))


def _unaligned(experiments: Sequence[Experiment]) -> str | None:
    """Return the reason that the arms would have different rounds, or None."""
    first, *others = (e.workload for e in experiments)
    for name in ("repeats", "warmup", "state"):
        if any(getattr(w, name) != getattr(first, name) for w in others):
            return f"the arms differ in workload.{name}, so their rounds would not be aligned"
    factors = {case.name: case.factor for w in (first, *others) for case in w.cases}
    if any(factors[case.name] != case.factor for w in (first, *others) for case in w.cases):
        return "the arms differ in the factor of a case, so their rounds would not be aligned"
    return None


def _sizes(experiment: Experiment) -> list[kernel_cases.CaseGeometry]:
    w, block_size = experiment.workload, experiment.engine.kv.block_size
    return [kernel_cases.geometry(case, w, block_size) for case in w.cases]


def _timed_launches(size: kernel_cases.CaseGeometry, experiment: Experiment) -> int:
    w, attention = experiment.workload, experiment.engine.attention
    if w.state is State.cold:
        return 1
    if device_availability.queued(attention):
        return 1 + kernel_cases.chain_length(size, w)
    lazy = attention.device is not Device.cpu or attention.backend in MLX_BACKENDS
    return 1 if lazy else kernel_cases.timed_launches(size, w)


def _launch_seconds(size: kernel_cases.CaseGeometry, experiment: Experiment, written: int) -> float:
    """Estimate the seconds of one launch, with poisoning and checking ``written`` output bytes."""
    flops = kernel_cases.work(size, experiment.workload).flops
    if experiment.engine.attention.device is Device.emulated:
        return EMULATED_SECONDS + flops / EMULATED_FLOPS
    return max(flops / FLOPS, (size.pool_bytes + 4 * written) / READ_BYTES_PER_SECOND)


KIND = KernelKind()
