"""Warm-up of kernel cases: the first launch of every arm, then rounds until times settle.

Every arm launches each case once for its output. Then rounds of wash-out launches follow until a
round improves on the fastest earlier round by at most 2 %. There are at least
``1 + workload.warmup`` rounds. There are at most 20 rounds, unless this minimum is larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from labkit.config import Case, State
from labkit.workload.kernels.kernel_arms import KernelArms
from labkit.workload.kernels.kernel_case_rounds import (
    ArmSamples,
    CaseRounds,
    ExpectedOutput,
    PreparedArm,
    equal_bits,
    refuse_nan,
    sha256_of,
)
from labkit.workload.kernels.kernel_cases import scaled_case, washout_share
from labkit.workload.output_digest import array_outputs

SETTLED_RATIO = 0.98  # times have settled if a round takes at least this share of the fastest
MAX_ROUNDS = 20


def compile_cases(arms: KernelArms, case_names: Sequence[str]) -> None:
    """Launch every arm once on each of the named cases, which compiles all kernels."""
    for name in case_names:
        for prepared in _prepare(arms, name):
            _same_kernel(arms, prepared)


def warm_up(arms: KernelArms) -> Iterator[CaseRounds]:
    """Warm up all cases in order, and yield each case once per state of the caches."""
    for name in arms.case_names():
        prepared = _prepare(arms, name)
        if not prepared:
            continue
        if not all([_same_kernel(arms, arm) for arm in prepared]):  # every arm launches once
            prepared = [replace(arm, washout=arm.batch) for arm in prepared]
        rounds = _settle(arms, prepared)
        workload = arms.arms[prepared[0].arm].workload
        case = prepared[0].batch.size.case
        for state in cache_states(workload.state, len(prepared)):
            label = f"{name} ({state.value})" if workload.state is State.both else name
            samples = [ArmSamples(arm, arm.report) for arm in prepared]
            yield CaseRounds(label, state, workload.num_repeats * case.factor, samples, rounds)


def _prepare(arms: KernelArms, name: str) -> list[PreparedArm]:
    """Prepare the arms that run a case, in random order."""
    expected: list[ExpectedOutput] = []
    order = list(enumerate(arms.arms))
    arms.context.order.shuffle(order)
    return [
        _prepare_arm(arms, index, case, expected)
        for index, arm in order
        if (case := arm.case(name)) is not None
    ]


def _prepare_arm(
    arms: KernelArms, index: int, case: Case, expected: list[ExpectedOutput]
) -> PreparedArm:
    """Plan an arm's batch and its wash-out, and launch the batch for its outputs.

    ``expected``: outputs of the arms prepared before. This arm's output is appended if it
    differs from all of them.
    """
    arm = arms.arms[index]
    with arms.context.turn(index):
        batch = arms.plan(arm, case)
        share = washout_share(batch.size, arm.workload)
        washout = batch if share == 1 else arms.plan(arm, scaled_case(case, share))
        plan_s, map_us = batch.planning_times(arms.clock)
        batch.poison(first=True)
        first = arms.launch(index, batch, "the first launch")
        (out,) = first.outputs
        refuse_nan(out, f"{case.name}: the first launch")
        match = next((e for e in expected if equal_bits(e.out, out)), None)
        if match is None:
            match = ExpectedOutput(out.copy(), array_outputs(out, batch.dtype.value))
            expected.append(match)
        prepared = PreparedArm(index, batch, washout, match, (), plan_s, map_us, first.report)
        return replace(prepared, chain_digests=_first_chain(arms, prepared))


def _first_chain(arms: KernelArms, prepared: PreparedArm) -> tuple[bytes, ...]:
    """Launch the first chain, if chains are timed, and return the digests of its outputs."""
    length, launch_name = prepared.batch.chain_length, "the first chain"
    if length == 1:
        return ()
    prepared.batch.poison(length, first=True)
    launch = arms.launch(prepared.arm, prepared.batch, launch_name, length)
    for out in launch.outputs:
        refuse_nan(out, f"{prepared.batch.size.case.name}: {launch_name}")
    return tuple(map(sha256_of, launch.outputs))


def _same_kernel(arms: KernelArms, prepared: PreparedArm) -> bool:
    """Return whether wash-out and batch launch the same kernel with the same partitions."""
    if prepared.washout is prepared.batch:
        return True
    with arms.context.turn(prepared.arm):
        washout = arms.launch(prepared.arm, prepared.washout, "a wash-out").report
    batch = prepared.report
    return (washout.kernel, washout.partitions) == (batch.kernel, batch.partitions)


def _settle(arms: KernelArms, prepared: Sequence[PreparedArm]) -> int:
    """Run rounds of wash-out launches until their times settle; return the number of rounds."""
    min_rounds = 1 + max(arms.arms[arm.arm].workload.warmup for arm in prepared)
    max_rounds = max(min_rounds, MAX_ROUNDS)
    fastest = math.inf
    for number in range(1, max_rounds + 1):
        total = 0.0
        for arm in prepared:
            with arms.context.turn(arm.arm):
                total += arms.launch(arm.arm, arm.washout, f"warm-up {number}").seconds
        if number >= min_rounds and total >= SETTLED_RATIO * fastest:
            return number
        fastest = min(fastest, total)
    return max_rounds


def cache_states(state: State, arms: int) -> tuple[State, ...]:
    """Return the states of the caches that ``workload.state`` asks for, with so many arms.

    A single arm's launches follow its own, so its caches are hot.
    """
    if state is State.both:
        return State.hot, State.cold
    return (State.hot if state is State.warm and arms == 1 else state,)
