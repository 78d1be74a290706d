"""How near kernels come to the machine's limits: bytes, FLOPs, intensity, share.

S. Williams, A. Waterman, D. Patterson, "Roofline" (2009): work of intensity I (FLOPs per
byte) takes at least ``max(bytes / bandwidth, flops / peak)``. Bytes are the least that
must move, so a share is never flattered by what a kernel reads twice. The limits are the
best that any of the study's runs measured in itself; without them there are no shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.analysis.sentences import real_arms
from labkit.records import Record

Json = Mapping[str, Any]
METRIC = "dispatch_us"


@dataclass(frozen=True)
class Limits:
    """GB/s (1e9 bytes) and GFLOP/s, and how they were measured."""

    read_gb_s: float
    sgemm_gflop_s: float
    threads: int
    read_bytes: int

    def text(self) -> str:
        """Say what the limits are and where they come from."""
        return (
            f"Limits: {self.read_gb_s:,.1f} GB/s reading {self.read_bytes >> 20} MiB, "
            f"{self.sgemm_gflop_s:,.1f} GFLOP/s in a float32 matrix product of NumPy's BLAS, "
            f"{self.threads} threads; the best that any run measured after its kernels."
        )


@dataclass(frozen=True)
class Point:
    """One case and arm: the work, the median time, and what follows from them."""

    case: str
    arm: str
    bytes: int
    flops: int
    seconds: float
    limits: Limits | None

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def gb_s(self) -> float:
        """Achieved GB/s, counting only the bytes that must move."""
        return self.bytes / self.seconds / 1e9

    @property
    def gflop_s(self) -> float:
        """Achieved GFLOP/s."""
        return self.flops / self.seconds / 1e9

    @property
    def bound(self) -> str | None:
        """Name the limit that binds: ``memory`` or ``compute``; None without limits."""
        if self.limits is None:
            return None
        memory, compute = self._least_s(self.limits)
        return "memory" if memory >= compute else "compute"

    @property
    def share(self) -> float | None:
        """Least possible time over the time taken; above 1 only where a cache helped."""
        return None if self.limits is None else max(self._least_s(self.limits)) / self.seconds

    def _least_s(self, limits: Limits) -> tuple[float, float]:
        return (
            self.bytes / (limits.read_gb_s * 1e9),
            self.flops / (limits.sgemm_gflop_s * 1e9),
        )


def find_limits(records: Iterable[Record]) -> Limits | None:
    """Give the best limits that any run noted; None where no run did."""
    noted = [r.notes["limits"] for r in records if r.ok and r.notes.get("limits")]
    if not noted:
        return None
    return Limits(
        read_gb_s=max(float(n["read_gb_s"]) for n in noted),
        sgemm_gflop_s=max(float(n["sgemm_gflop_s"]) for n in noted),
        threads=max(int(n["threads"]) for n in noted),
        read_bytes=max(int(n["read_bytes"]) for n in noted),
    )


def points(cell: Json, records: Sequence[Record]) -> list[Point]:
    """Give every case and arm (but the control) whose work the records know."""
    limits = find_limits(records)
    work: dict[str, tuple[int, int]] = {}
    for record in records:
        for case in record.cases:
            if case.notes.get("flops") and case.notes.get("least_bytes"):
                work[case.case] = (int(case.notes["least_bytes"]), int(case.notes["flops"]))
    return [
        Point(row["case"], arm, *work[row["case"]], row["arms"][arm]["median"] / 1e6, limits)
        for row in cell["rows"]
        if row["metric"] == METRIC and row["case"] in work
        for arm in real_arms(cell)
        if row["arms"][arm]["median"]
    ]
