"""``llamacpp``: as many tokens as the user names, committed at start."""

from __future__ import annotations

from labkit.engine.budget.amounts import size
from labkit.engine.budget.base import Asked, Decision, Refusal, decision, nothing_fits


class LlamaCpp:
    """``kv = layers * 2 * kv_heads * head_dim * n_ctx * bytes``, all of it at start.

    ``n_ctx`` is ``engine.budget.blocks`` (the null block aside) times the block size; by
    default the context that the model was trained for. Weights, KV and the compute
    buffer must fit in ``memory_hint - allocated`` (nothing is allocated before). No RAM
    cap, no utilization, and what others hold is not looked at.

    Source: "Rethinking vllm-metal's Memory Budget for Apple Silicon" (14 February 2026),
    Related Work, llama.cpp.
    """

    name = "llamacpp"
    profiles = True

    def decide(self, asked: Asked) -> Decision | Refusal:
        """Size the pool, or say why not."""
        blocks = asked.budget.blocks
        option = f"engine.budget.blocks={blocks}"
        if blocks is None:
            context = asked.model.max_context
            option = f"engine.budget.policy=llamacpp (n_ctx={context}, the model's own)"
            blocks = 0 if context is None else -(-context // asked.block_size) + 1
        hint = asked.machine.hint
        fits = (hint - asked.weights.bytes - asked.step.bytes) // asked.block_bytes
        if 2 <= blocks <= fits:
            return decision(asked, policy=self.name, ceiling=hint, blocks=blocks, step=True)
        of = "Metal's working set" if asked.machine.metal else "RAM"
        need = asked.weights.bytes + asked.step.bytes + max(blocks, 2) * asked.block_bytes
        return Refusal(
            option=option,
            asked=f"policy llamacpp asks for {size(need)} of {size(hint)} {of}"
            if blocks
            else "config.json does not say which context the model was trained for",
            free=f"free are {size(asked.machine.available)} on {asked.machine.name}",
            parts=(asked.weights, asked.step, asked.pool(blocks)),
            settings=(("engine.budget.blocks", fits),) if fits >= 2 else (),
            direction="or less",
            otherwise="" if fits >= 2 else nothing_fits(need - hint, asked.machine),
        )
