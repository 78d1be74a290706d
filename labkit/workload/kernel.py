"""Attention alone: dispatches of the engine's kernel on batches of given shapes."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from labkit.config import Device, Experiment, Workload, require
from labkit.workload import cases
from labkit.workload.base import START_SECONDS
from labkit.workload.cases import Arrays, Geometry
from labkit.workload.digest import array_outputs
from labkit.workload.measurement import (
    CaseResult,
    Estimate,
    InvalidOutput,
    Measurement,
    Metric,
    Session,
    StaleOutput,
)

if TYPE_CHECKING:
    from labkit.engine.attention.base import AttentionBackend
    from labkit.engine.attention.metadata import AttentionMetadata
    from labkit.engine.attention.report import LaunchReport

# Measured on a two-core x86-64 with AVX-512; for estimates only.
FILL_BYTES_PER_SECOND = 1e9
READ_BYTES_PER_SECOND = 15e9
FLOPS = 120e9
EMULATED_FLOPS = 20e6
EMULATED_SECONDS = 0.1  # a dispatch at least: a process of its own
PROCESS_BYTES = 150 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case that is ready: its plan, and what its first dispatch gave."""

    size: Geometry
    meta: AttentionMetadata
    expected: NDArray[np.float32]


class KernelSession:
    """Kernel cases on one attention backend.

    Parameters
    ----------
    backend
        The attention operation that is measured.
    engine
        The engine whose operation it is; counted, because every arm claims its engine.
    workload
        Cases, head counts, warm-up and repeats.
    block_size
        Tokens in a KV block.
    seed
        Of the values and the block tables.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        *,
        engine: str,
        workload: Workload,
        block_size: int,
        seed: int,
    ) -> None:
        self._backend = backend
        self._engine = engine
        self._workload = workload
        self._block_size = block_size
        self._seed = seed
        self._sizes = [cases.geometry(case, workload, block_size) for case in workload.cases]
        runnable = [s for s in self._sizes if cases.skip_reason(s, workload) is None]
        for size in runnable:  # refuses bad maps now, and compiles what builds them
            self._plan(size)
        self._arrays: Arrays | None = cases.allocate(runnable, workload, block_size, seed)
        self._prepared: dict[str, Prepared] = {}

    def warm_up(self) -> None:
        """Plan and dispatch every case, once for its output, then ``workload.warmup`` times."""
        for size in self._sizes:
            if cases.skip_reason(size, self._workload) is not None:
                continue
            meta = self._plan(size)
            out, _, _ = self._dispatch(size, meta, "the first dispatch")
            ready = Prepared(size, meta, out.copy())
            for index in range(self._workload.warmup):
                self._checked(ready, f"warm-up {index}")
            self._prepared[size.case.name] = ready

    def measure(self, beat: Callable[[str], None]) -> Measurement:
        """Time every case; see ``Session``."""
        counters: Counter[str] = Counter()
        results = []
        with _no_garbage_collection():
            for size in self._sizes:
                skipped = cases.skip_reason(size, self._workload)
                if skipped is not None:
                    results.append(CaseResult(case=size.case.name, skipped=skipped))
                    continue
                beat(size.case.name)
                results.append(self._measure_case(self._prepared[size.case.name], counters))
        return Measurement(
            cases=tuple(results),
            counters={name: float(value) for name, value in sorted(counters.items())},
        )

    def close(self) -> None:
        """Let go of the pool."""
        self._arrays = None
        self._prepared.clear()

    def _measure_case(self, ready: Prepared, counters: Counter[str]) -> CaseResult:
        size = ready.size
        work = cases.work(size, self._workload)
        times = []
        for index in range(self._workload.repeats * size.case.factor):
            seconds, report = self._checked(ready, f"repeat {index}")
            times.append(seconds * 1e6)
            counters.update(report.counters())
            counters[f"engine.{self._engine}"] += 1
        return CaseResult(
            case=size.case.name,
            metrics=(Metric("dispatch_us", "us", "lower", True, tuple(times)),),
            outputs=array_outputs(ready.expected),
            values=ready.expected,
            notes={
                "kernel": report.kernel,
                "reason": report.reason,
                "grid": list(report.grid),
                "map_us": ready.meta.map_us,
                "num_seqs": len(size.seq_lens),
                "total_q": size.total_q,
                "pool_bytes": size.pool_bytes,
                "flops": work.flops,
                "least_bytes": work.bytes,
                "counters": report.counters(),
            },
        )

    def _plan(self, size: Geometry) -> AttentionMetadata:
        starts = np.zeros(len(size.query_lens) + 1, np.int32)
        np.cumsum(size.query_lens, out=starts[1:])
        return self._backend.plan(
            block_tables=cases.block_tables(size, self._block_size, self._seed),
            seq_lens=size.seq_lens,
            cu_seqlens_q=starts,
            block_size=self._block_size,
        )

    def _checked(self, ready: Prepared, which: str) -> tuple[float, LaunchReport]:
        """Dispatch once more; the output must equal the first one bit for bit."""
        out, report, seconds = self._dispatch(ready.size, ready.meta, which)
        if not np.array_equal(out.view(np.uint32), ready.expected.view(np.uint32)):
            rows = np.flatnonzero((out != ready.expected).any(axis=(1, 2)))
            raise InvalidOutput(
                f"{ready.size.case.name}: {which} differs from the first dispatch in "
                f"{len(rows)} rows, the first of them token {rows[0]}"
            )
        return seconds, report

    def _dispatch(
        self, size: Geometry, meta: AttentionMetadata, which: str
    ) -> tuple[NDArray[np.float32], LaunchReport, float]:
        """Poison the output, launch once, check that all of it was written by this launch."""
        assert self._arrays is not None, "the session is closed"
        arrays = self._arrays
        q, out = arrays.q[: size.total_q], arrays.out[: size.total_q]
        scale = 1 / math.sqrt(self._workload.head_dim)
        out.fill(np.nan)
        start = time.perf_counter()
        result, report = self._backend.attend(
            q,
            arrays.k_pool,
            arrays.v_pool,
            meta,
            scale=scale,
            window=self._workload.window,
            out=out,
        )
        seconds = time.perf_counter() - start
        where = f"{size.case.name}: {which}"
        if report.stale:
            raise StaleOutput(
                f"{where}: the kernel's stamp is {report.stamp}, expected {report.expected_stamp}"
            )
        if not np.shares_memory(result, out):
            raise InvalidOutput(f"{where}: the output was not written where it was asked for")
        if np.isnan(out.min()):
            token, head, _ = np.argwhere(np.isnan(out))[0]
            raise InvalidOutput(
                f"{where}: NaN left in the output, first at token {token}, head {head}"
            )
        return out, report, seconds


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class KernelKind:
    """Kernel cases; see ``Kind``."""

    def prepare(self, experiment: Experiment) -> None:
        """Check that at least one case fits; there is nothing to cache."""
        w = experiment.workload
        sizes = [cases.geometry(case, w, experiment.engine.kv.block_size) for case in w.cases]
        smallest = min(size.pool_bytes for size in sizes)
        require(
            smallest <= w.max_pool_bytes,
            f"workload.max_pool_bytes={w.max_pool_bytes}: every case of workload={w.name} needs "
            f"more, the smallest {smallest}",
        )
        prefill = next((case.name for case in w.cases if case.prefill), None)
        require(
            prefill is None or experiment.engine.attention.resolver != "identity",
            f"engine.attention.resolver=identity: it serves pure decode only, and "
            f"workload={w.name} has prefill (case {prefill!r})",
        )

    def load(self, experiment: Experiment, *, seed: int) -> Session:
        """Create the engine's attention operation and fill the pool."""
        from labkit.engine import attention

        engine = experiment.engine
        return KernelSession(
            attention.configured(engine.attention),
            engine=engine.name,
            workload=experiment.workload,
            block_size=engine.kv.block_size,
            seed=seed,
        )

    def estimate(self, experiment: Experiment) -> Estimate:
        """Count bytes read and floating-point operations of every dispatch."""
        w = experiment.workload
        block_size = experiment.engine.kv.block_size
        sizes = [cases.geometry(case, w, block_size) for case in w.cases]
        run = [size for size in sizes if cases.skip_reason(size, w) is None]
        pool = max((size.pool_bytes for size in run), default=0)
        output = [cases.F32 * s.total_q * w.num_heads * w.head_dim for s in run]
        dispatches = [2 + w.warmup + w.repeats * s.case.factor for s in run]
        seconds = START_SECONDS + pool / FILL_BYTES_PER_SECOND
        for size, count, written in zip(run, dispatches, output, strict=True):
            flops = cases.work(size, w).flops
            read = size.pool_bytes + 4 * written  # the checks read the output again
            if experiment.engine.attention.device is Device.emulated:
                seconds += count * (EMULATED_SECONDS + flops / EMULATED_FLOPS)
            else:
                seconds += count * max(flops / FLOPS, read / READ_BYTES_PER_SECOND)
        return Estimate(seconds, PROCESS_BYTES + pool + sum(output) + 2 * max(output, default=0))


KIND = KernelKind()
