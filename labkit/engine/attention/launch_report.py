"""The report of attention launches: the evidence for the gate *engaged* (the kernel ran)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

# Fields of a report that become counters unchanged, with the counters' names.
_COUNTERS = {
    "search_iterations": "attention.search_iterations",
    "dependent_loads": "attention.dependent_loads",
    "surplus_threadgroups": "attention.surplus_threadgroups",
    "kv_blocks_visited": "attention.kv_blocks_visited",
    "bytes": "attention.bytes",
    "skipped_blocks": "window.skipped_blocks",
    "masked_blocks": "window.masked_blocks",
}
_SDPA_COUNTERS = {
    "keys": "attention.keys",
    "padded_keys": "attention.keys_padded",
    "bytes": "attention.bytes",
}
_SUMMED = ("launches", "evaluations", *{**_COUNTERS, **_SDPA_COUNTERS})


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """One launch of an attention kernel, or the sum of several identical ones.

    Identical launches have the same fields except counts, stamp and layer.
    """

    # decode (one query token per unit), tiled (``BQ`` query rows per unit), reference, gather or
    # sdpa (MLX's attention over contiguous keys).
    kernel: str
    # Units launched along each axis: (heads or groups of heads, query tokens) for decode, (heads,
    # Q-blocks) for tiled, (query tokens,) for reference; a padded grid adds the sequences,
    # split-KV the partitions.
    grid: tuple[int, ...]
    reason: str  # why this kernel was chosen
    resolver: str  # the name of the resolver; a user's class has a name of its own
    # The stamp (uint32) that the kernel wrote, and the stamp that this launch must write. Both are
    # None for MLX's own attention, which writes no stamp. If several launches are summed, these are
    # the stamps of the first stale launch, or of the first launch if none is stale.
    stamp: int | None = None
    expected_stamp: int | None = None
    layer: int = 0  # index of the layer; of several launches, the one whose ``stamp`` is reported
    launches: int = 1  # number of launches summed in this report
    # Counted by the kernel: binary-search iterations, and units that exited without work.
    search_iterations: int = 0
    surplus_threadgroups: int = 0
    kv_blocks_visited: int = 0  # over all units, counted by the kernel
    bytes: int = 0  # keys and values in the visited blocks, queries, and output
    map_us: float = 0.0  # host time of the resolver's maps, once per step
    device: str | None = None  # cpu, metal or emulated; None: no fused kernel
    partitions: int = 1  # of each query's keys; above 1 the reduce kernel followed
    sharing_heads: int = 1  # query heads that shared one load of a key or value in decode
    block_size: int | None = None  # tokens in a KV block; None: not reported
    # Loads by which all units find their sequences. A unit waits for each before it continues.
    dependent_loads: int = 0
    # KV blocks outside the sliding window, summed over all units: those that were not read, and
    # those that were read and then masked.
    skipped_blocks: int = 0
    masked_blocks: int = 0
    kv_dtype: str | None = None  # of the KV pools; None: not reported
    # sdpa only: the number of keys read, and how many of them were padding.
    keys: int = 0
    padded_keys: int = 0
    # Evaluations of MLX's graph for only these launches: an emulated kernel evaluates eagerly, and
    # so does a layer of a model on NumPy arrays.
    evaluations: int = 0

    @property
    def stale(self) -> bool:
        """Whether the kernel wrote a stamp other than the one expected.

        A stamp is the number that identifies a launch. The kernel writes it with its output, so a
        wrong stamp means that the output may be that of another launch.
        """
        return self.stamp != self.expected_stamp

    def counters(self) -> dict[str, float]:
        """Return the counters of these launches. They may be summed over reports."""
        count = self.launches
        evaluations = {"mlx.evaluations": self.evaluations} if self.evaluations else {}
        if self.kernel == "sdpa":
            labels = self._labelled("kernel", "kv_dtype")
            return {**evaluations, **labels, **self._counted(_SDPA_COUNTERS)}
        counters = {
            **evaluations,
            **self._labelled("kernel", "resolver"),
            **self._counted(_COUNTERS),
            **self._labelled("device", "block_size", "kv_dtype"),
        }
        if self.partitions > 1:
            counters["kernel.reduce"] = count
            counters["split_kv.partitions"] = count * self.partitions
        if self.kernel == "decode":
            counters["gqa.shared" if self.sharing_heads > 1 else "gqa.unshared"] = count
        return counters

    def _labelled(self, *names: str) -> dict[str, float]:
        """Return counters ``<field>.<value>``, such as ``kernel.decode``, of the launches.

        ``names`` are the fields. A field whose value is None has no counter.
        """
        values = {name: getattr(self, name) for name in names}
        return {f"{name}.{v}": self.launches for name, v in values.items() if v is not None}

    def _counted(self, counters: dict[str, str]) -> dict[str, float]:
        return {counter: getattr(self, name) for name, counter in counters.items()}


Reports = tuple[LaunchReport, ...]
_VARYING = {*_SUMMED, "stamp", "expected_stamp", "layer"}
_IDENTITY = tuple(field.name for field in fields(LaunchReport) if field.name not in _VARYING)


def merge_reports(reports: Iterable[LaunchReport]) -> Reports:
    """Sum the reports of identical launches."""
    groups: dict[tuple[Any, ...], list[LaunchReport]] = {}
    for report in reports:
        key = tuple(getattr(report, name) for name in _IDENTITY)
        groups.setdefault(key, []).append(report)
    return tuple(_merge(group) for group in groups.values())


def _merge(group: Sequence[LaunchReport]) -> LaunchReport:
    shown = next((report for report in group if report.stale), group[0])
    sums: dict[str, Any] = {name: sum(getattr(r, name) for r in group) for name in _SUMMED}
    return replace(shown, **sums)
