"""Host groups: which cells of a study ran on the same machine and may be compared.

Every host counts as a separate machine, because even two hosts of the same model differ by a few
percent (firmware, cooling, memory placement). Within a cell every block runs on one host, so
relabelling within blocks never compares two hosts. With ``design.across_hosts=true`` the host is a
blocking factor, coarser than the block. The permutation test stays exact, and the effect is
estimated over all these hosts. Cells are not interleaved with each other. So cells of several
machines are shown separately: unless they declare ``across_hosts``, no curve joins them and no cell
confirms another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.comparison.observations import MetricRow, complete_blocks, log_values
from labkit.analysis.model.result_row import row_name
from labkit.analysis.number_format import percent_text
from labkit.analysis.statistics.hodges_lehmann import hodges_lehmann, to_percent
from labkit.analysis.text_format import machine_words

ANY_HOST = "any host (design.across_hosts=true)"


def machine_name(analysis: CellAnalysis) -> str | None:
    """Return a description of the machine that ran a cell, or None if no run recorded one."""
    environment = analysis.environment
    if analysis.data.design.across_hosts:
        return ANY_HOST
    words = f"host {environment.get('host')}", *machine_words(environment)
    return ", ".join(words) if environment else None


def host_groups(names: Sequence[str | None]) -> dict[str, list[int]]:
    """Return cells' indices by their machines' names; cells without a machine join the first."""
    groups: dict[str, list[int]] = {}
    first = next((name for name in names if name is not None), "no runs")
    for index, name in enumerate(names):
        groups.setdefault(name or first, []).append(index)
    return groups


def on_same_machine(one: CellAnalysis, other: CellAnalysis) -> bool:
    """Return whether two cells ran on the same machine, so that they may be compared."""
    return len(host_groups([machine_name(one), machine_name(other)])) == 1


@dataclass(frozen=True)
class HostEffects:
    """The effect of one arm in one row on each host, in percent."""

    row: MetricRow
    arm: str
    by_host: dict[str, float]

    @property
    def range_pct(self) -> float:
        """Difference between the largest and the smallest effect, in percentage points."""
        return max(self.by_host.values()) - min(self.by_host.values())


def host_effects(analysis: CellAnalysis) -> Iterator[HostEffects]:
    """Yield arms' effects in primary rows, estimated on each of two or more hosts separately."""
    data = analysis.data
    hosts = {block: host for host, blocks in data.hosts.items() for block in blocks}
    for row in analysis.rows:
        if not row.primary or row.skipped is not None or not row.positive:
            continue
        for arm in data.treatment_arms:
            by_host, pair = {}, (data.baseline, arm)
            blocks = complete_blocks(row, pair, data.criteria.runs)
            for host in data.hosts:
                if own := [block for block in blocks if hosts.get(block) == host]:
                    shift = hodges_lehmann(*(log_values(row, name, own) for name in pair))
                    by_host[host] = to_percent(shift)
            if len(by_host) > 1:
                yield HostEffects(row, arm, by_host)


def hosts_sentence(analysis: CellAnalysis) -> str | None:
    """Return how many blocks each host ran, and where effects differ most; None for one host."""
    hosts = analysis.data.hosts
    if len(hosts) < 2:
        return None
    counts = ", ".join(f"{len(blocks)} on {host}" for host, blocks in hosts.items())
    text = f"blocks ran on {len(hosts)} hosts ({counts}); arms were compared within each host"
    worst = max(host_effects(analysis), key=lambda one: one.range_pct, default=None)
    if worst is None:
        return text
    each = ", ".join(f"{percent_text(e)} on {host}" for host, e in worst.by_host.items())
    name = row_name(worst.row, {row.metric for row in analysis.rows if row.primary})
    return f"{text}; hosts differ most in {name!r}: {worst.arm} {each} (estimates)"
