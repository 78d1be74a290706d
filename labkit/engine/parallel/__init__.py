"""Tensor parallelism: ranks, one process each, that compute every step of one engine together.

Sharded, by mlx_lm's own ``Model.shard``: the query, key, value, gate and up projections by their
outputs, the output and down projections by their inputs. The ranks sum the partial results of the
latter (``mx.distributed.all_sum`` over MLX's ring, twice per layer).

Replicated: embeddings, norms and the output head, so every rank has all logits and samples for
itself. So are scheduler, block pool and sampler: every rank runs a whole engine.
``TensorParallelEngine`` in the run's process computes nothing; it forwards every call to all ranks
and returns rank 0's result.

Guarantees, each tested in ``tests/engine/parallel``:

1. The tokens are those of one process. (Bits may differ: partial sums are added in another order.)
2. A rank's KV pools hold its own heads, and the budget counts all ranks' pools together.
3. Before every step the ranks compare digests of what they have scheduled so far. Where they
   differ, nothing is computed and the step fails.
4. A rank that dies is named at once and the others are killed; no rank outlives the process that
   started it.

Importing this package imports neither MLX nor numba.
"""

from labkit.engine.parallel.model_sharding import check

__all__ = ["check"]
