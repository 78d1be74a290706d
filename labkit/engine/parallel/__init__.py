"""Tensor parallelism: ranks, one process each, that compute every step of one engine together.

mlx_lm's own ``Model.shard`` shards the model: the query, key, value, gate and up projections by
their outputs, the output and down projections by their inputs. The ranks sum the partial results of
the output and down projections (``mx.distributed.all_sum`` over MLX's ring, twice per layer).

Embeddings, norms and the output head are replicated, so every rank computes all logits and samples
by itself. Scheduler, block pool and sampler are replicated too: every rank runs a complete engine.
``TensorParallelEngine`` in the run's process computes nothing; it forwards every call to all ranks
and returns rank 0's result.

Guarantees, each tested in ``tests/engine/parallel``:

1. The ranks sample the same tokens as a single process. (Logits may differ in their last bits:
   partial sums are added in another order.)
2. A rank's KV pools hold only its own heads, and the budget counts all ranks' pools together.
3. Before every step the ranks compare digests of all steps that they have scheduled. If the digests
   differ, nothing is computed and the step fails.
4. If a rank dies, the error names that rank at once and the other ranks are killed. No rank
   outlives the process that started it.

Importing this package imports neither MLX nor numba.
"""

from labkit.engine.parallel.model_sharding import check

__all__ = ["check"]
