"""The machines of a study: whose cells may stand beside each other, and whose runs.

A machine here is a host: two of one kind differ too, by a few percent (firmware, cooling, where
memory lies). Within a cell every block is of one host, so relabelling within blocks compares no
two hosts, however far apart they are: with ``design.across_hosts=true`` the host is a blocking
factor, coarser than the block, and the permutation test is as exact as on one host. Its effect
is then that of these hosts together. Between cells nothing is interleaved: cells of several
machines are shown apart, and no curve or confirmation joins them, unless they say so too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.number_format import percent_text
from labkit.analysis.observations import MetricRow, complete_blocks, log_values
from labkit.analysis.statistics.effect_size import hodges_lehmann, to_percent

ANY = "any host (design.across_hosts=true)"


@dataclass(frozen=True)
class HostGroup:
    """One machine in words, and the places of its cells in the study."""

    name: str
    cells: tuple[int, ...]


def machine_name(analysis: CellAnalysis) -> str | None:
    """Name the machine of a cell's runs; None: none has left a record."""
    found = analysis.environment
    if analysis.data.design.get("across_hosts", False):
        return ANY
    if not found:
        return None
    memory = found.get("memory_bytes")
    parts = (
        f"host {found.get('host')}",
        found.get("cpu_model"),
        f"{found['cores']} cores" if found.get("cores") else None,
        f"{memory / 2**30:.0f} GiB" if memory else None,
        found.get("os"),
        found.get("accelerator"),
    )
    return ", ".join(str(part) for part in parts if part)


def host_groups(analyses: Sequence[CellAnalysis]) -> list[HostGroup]:
    """Group the cells of a study by machine; those without runs stand with the first."""
    groups: dict[str, list[int]] = {}
    names = [machine_name(analysis) for analysis in analyses]
    first = next((name for name in names if name is not None), "no runs")
    for index, name in enumerate(names):
        groups.setdefault(name or first, []).append(index)
    return [HostGroup(name, tuple(cells)) for name, cells in groups.items()]


def on_same_machine(one: CellAnalysis, other: CellAnalysis) -> bool:
    """Tell whether two cells may be compared with each other."""
    return len(host_groups([one, other])) == 1


@dataclass(frozen=True)
class HostEffects:
    """One arm in one row: its effect by host, in percent."""

    row: MetricRow
    arm: str
    by_host: dict[str, float]

    @property
    def spread(self) -> float:
        """Percentage points between the hosts that are furthest apart."""
        return max(self.by_host.values()) - min(self.by_host.values())


def host_effects(analysis: CellAnalysis) -> Iterator[HostEffects]:
    """Estimate every arm's effect in every primary row on each host by itself."""
    data = analysis.data
    hosts = {block: host for host, blocks in data.hosts.items() for block in blocks}
    for row in analysis.rows:
        if not row.primary or row.skipped is not None or not row.positive:
            continue
        for arm in data.treatment_arms:
            found = {}
            blocks = complete_blocks(row, (data.baseline, arm), data.criteria.runs)
            for host in data.hosts:
                mine = [block for block in blocks if hosts.get(block) == host]
                if mine:
                    pair = (log_values(row, name, mine) for name in (data.baseline, arm))
                    found[host] = to_percent(hodges_lehmann(*pair))
            if len(found) > 1:
                yield HostEffects(row, arm, found)


def hosts_sentence(analysis: CellAnalysis) -> str | None:
    """Say that a cell's blocks are of several hosts, and how far these are apart at most."""
    hosts = analysis.data.hosts
    if len(hosts) < 2:
        return None
    blocks = ", ".join(f"{len(found)} of {host}" for host, found in hosts.items())
    text = f"blocks are of {len(hosts)} hosts ({blocks}), each compared within itself"
    worst = max(host_effects(analysis), key=lambda one: one.spread, default=None)
    if worst is None:
        return text
    each = ", ".join(f"{percent_text(e)} on {host}" for host, e in worst.by_host.items())
    return f"{text}; most apart in {worst.row.case!r}: {worst.arm} {each} (estimates)"
