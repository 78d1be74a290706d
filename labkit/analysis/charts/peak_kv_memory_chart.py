"""Peak KV memory of each arm: the reserved memory and the part of it that held tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.analysis.document.chart import Chart
from labkit.analysis.document.report_parts import CellSource, ChartPart, Parts, PictureFile, section
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import value_text

X_LABEL = "KV memory (MiB)"
CAPTION = (
    "Peak KV memory: the part that held tokens (solid) and the rest of the reserved part (pale)"
)


@dataclass(frozen=True)
class _KVUtilization:
    """An arm's peak reserved KV memory and the peak memory that held tokens (MiB).

    Both are medians over the arm's runs.
    """

    arm: str
    reserved_mib: float
    used_mib: float

    @property
    def label(self) -> str:
        """Used and reserved memory and the waste: ``1.50 of 4.00 MiB, 62.5 % wasted``."""
        waste_pct = 100 * (1 - self.used_mib / self.reserved_mib)
        return (
            f"{value_text(self.used_mib)} of {value_text(self.reserved_mib)} MiB, "
            f"{waste_pct:.1f} % wasted"
        )


def _kv_utilizations(cell: Cell) -> list[_KVUtilization]:
    """Return the KV utilization of every arm that counted it; empty if all arms have the same."""
    counters = {arm.name: arm.counters for arm in cell.arms}
    utilizations = [
        _KVUtilization(arm, reserved / 2**20, min(used, reserved) / 2**20)
        for arm in cell.real_arms
        if (reserved := counters[arm].get("peak_kv_bytes"))
        and (used := counters[arm].get("kv_used_bytes"))
    ]
    distinct = {(each.reserved_mib, each.used_mib) for each in utilizations}
    return utilizations if len(distinct) > 1 else []


def _kv_utilization_chart(utilizations: Sequence[_KVUtilization]) -> Chart:
    """Return a chart with one bar per arm, for the HTML report."""
    largest, count = max(each.reserved_mib for each in utilizations), len(utilizations)
    chart = Chart(
        "KV memory reserved and used", (0.0, 1.9 * largest), (0.0, float(count)), X_LABEL,
        rows=tuple(each.arm for each in utilizations), row_height=26,
    )  # fmt: skip
    for index, each in enumerate(utilizations):
        extent = (count - index - 0.85, count - index - 0.15)
        chart.bar((0.0, each.reserved_mib), extent, "reserved", each.label, each.arm)
        chart.bar((0.0, each.used_mib), extent, "used", each.label, each.arm)
        chart.text(each.reserved_mib, count - index - 0.5, each.label, dx=8)
    return chart


@section("KV memory reserved and used")
def kv_utilization_section(report: CellSource) -> Parts:
    """Show how much of the reserved KV memory held tokens."""
    utilizations = _kv_utilizations(report.cell)
    if not utilizations:
        return []
    chart = ChartPart(_kv_utilization_chart(utilizations), CAPTION)
    return [chart, PictureFile(report.cell.stem("kv-held"), CAPTION, [chart])]
