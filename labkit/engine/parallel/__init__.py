"""Tensor parallelism: ranks, a process each, that compute every step of one engine together.

What is divided. mlx_lm's own ``Model.shard``: the projections to heads and to the feed-forward
part by their outputs, those back by their inputs, whose partial results the ranks add up
(``mx.distributed.all_sum`` over MLX's ring, twice a layer). Embeddings, norms and the output
are whole in every rank, so each has all the logits and samples for itself.

What is not divided is done again. Every rank has the whole engine: scheduler, block pool,
sampler. The engine that others see (``RankedEngine``) computes nothing; it hands every call to
all ranks and returns what rank 0 answers.

What holds, each line a test in ``tests/engine/parallel``:

1. The tokens are those of one process (claimed as tokens, not bits: a sum of partial sums is
   another order of summation).
2. A rank's KV pools hold its own heads, and the budget counts all ranks' pools together.
3. Every step is agreed on before it is computed: the ranks' digests of what they scheduled, and
   of all that went before, are equal, or nothing is computed and the step fails.
4. A rank that ends is named at once, and the others end with it; no rank outlives the process
   that started it.

Importing this package imports neither MLX nor numba.
"""

from labkit.engine.parallel.model_sharding import check

__all__ = ["check"]
