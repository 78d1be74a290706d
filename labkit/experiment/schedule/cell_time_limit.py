"""The time limit of a cell whose runs have a fixed size, and whose blocks follow from its time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from labkit.config import to_plain
from labkit.experiment.cell import ALLOCATION, ReadyCell
from labkit.experiment.compose.reachable_interim_looks import fewest_blocks
from labkit.experiment.schedule.cell_manifest import move_last_look
from labkit.records import Record, write_json

LIMIT, PLANNED = 1.15, 0.9  # of the seconds said, and of design.time: 1.2 with what is not seen


@dataclass
class TimeLimit:
    """Ends a cell whose runs have a fixed size when its blocks take much longer than planned.

    The last look then comes earlier, with all the alpha that is left, but never before a claim is
    possible. When it comes depends on the seconds of whole blocks, which stay what they are if
    labels of arms are exchanged; so the permutation test holds.
    """

    cell: ReadyCell
    deadline: float
    ended: list[float]  # when this session began, and when each of its blocks ended
    finished: int  # blocks up to the last one that an earlier session finished

    @classmethod
    def of(cls, cell: ReadyCell, blocks: int, records: Sequence[Record]) -> TimeLimit | None:
        """Return the limit of a cell with ``blocks`` blocks left; None if nothing limits it.

        ``records``: those of the finished blocks.
        """
        plan, time_s = cell.plan(0), cell.design.time
        if not cell.said_s or time_s is None or (plan is not None and plan.round_s):
            return None
        now = time.monotonic()
        limit_s = max(LIMIT * cell.said_s, PLANNED * time_s) * blocks / cell.design.blocks
        finished = 1 + max((record.block for record in records), default=-1)
        return cls(cell, now + limit_s, [now], finished)

    def block_ended(self, suspended_s: float) -> None:
        """Count a block, but not the seconds in which ctrl-Z suspended it."""
        self.deadline += suspended_s
        self.ended = [ended + suspended_s for ended in self.ended]
        self.ended.append(time.monotonic())

    def ends_before(self, block: int) -> bool:
        """Return whether a block would end too late, so that the cell ends before it.

        It does not end before a block that is repeated while later ones are finished.
        """
        design, done = self.cell.design, len(self.ended) - 1
        fewest = max(fewest_blocks(design, self.cell.tested_arms), self.finished)
        if block < fewest or not done:
            return False
        looks = {look.blocks for look in design.looks}
        # A look before the last one does not end the cell, because it keeps its alpha.
        more = 1 + (block + 1 in looks and block + 1 < design.blocks)
        mean_s, last_s = (self.ended[-1] - self.ended[0]) / done, self.ended[-1] - self.ended[-2]
        return block not in looks and self.ended[-1] + more * max(mean_s, last_s) > self.deadline


def ended_early(cell: ReadyCell, blocks: int) -> ReadyCell:
    """Return the cell whose last look is after ``blocks`` blocks, and write it to the folder."""
    early = [look for look in cell.design.looks if look.blocks < blocks]
    cell = replace(cell, design=replace(cell.design, blocks=blocks, looks=early))
    move_last_look(cell)
    path, looks = cell.dir / ALLOCATION, [to_plain(look) for look in cell.design.looks]
    data = json.loads(path.read_text("utf-8"))
    write_json(path, data | {"blocks": blocks, "looks": looks})
    return cell
