"""``mistralrs``: the working set under a RAM cap, times a utilization."""

from __future__ import annotations

from labkit.engine.budget.amounts import size
from labkit.engine.budget.base import Asked, Decision, Refusal, nothing_fits
from labkit.engine.budget.share import Share

GIB = 1 << 30
SMALL_MACHINE = 36 * GIB
LEAST_HEADROOM = 512 << 20


class MistralRs:
    """``kv = min(memory_hint, ram_cap) * utilization - used``.

    ``ram_cap`` is 2/3 of RAM up to 36 GiB and 3/4 above. Weights come first, in what is
    left of ``memory_hint - allocated`` (nothing is allocated before) after a headroom of
    2 %, at least 512 MiB; mistral.rs would leave the layers that do not fit on the CPU,
    labkit refuses. ``used`` is the weights: activations are not profiled. What others
    hold is not looked at. Utilization is ``engine.budget.fraction``, 0.9 by default.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Related Work, mistral.rs.
    """

    name = "mistralrs"
    profiles = False

    def decide(self, asked: Asked) -> Decision | Refusal:
        """Size the pool, or say why not."""
        hint = asked.machine.hint
        headroom = max(hint // 50, LEAST_HEADROOM)
        if asked.weights.bytes > hint - headroom:
            return Refusal(
                option="engine.budget.policy=mistralrs",
                asked=f"the weights must fit in {size(hint)} less a headroom of {size(headroom)}",
                free=f"free are {size(asked.machine.available)} on {asked.machine.name}",
                parts=(asked.weights,),
                otherwise=nothing_fits(asked.weights.bytes - hint + headroom, asked.machine),
            )
        ceiling = min(hint, ram_cap(asked.machine.total))
        of = "of working set and RAM cap, the smaller"
        return Share(self.name, ceiling, of, free=None, step=False).decide(asked)


def ram_cap(total: int) -> int:
    """Return the most (bytes) that a machine with ``total`` bytes of RAM gives to a model."""
    return total * 2 // 3 if total <= SMALL_MACHINE else total * 3 // 4
