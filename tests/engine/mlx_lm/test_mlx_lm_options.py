"""``engine=mlx_lm`` accepts its own options and refuses those of other engines."""

import pytest
from mlx_lm_bench import options

from labkit import config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention": config.Attention(resolver="seq_map")},
            "engine.attention.resolver=seq_map: engine=mlx_lm does not have this option; "
            "leave it binary_search",
        ),
        (
            {"budget": config.Budget(blocks=64)},
            "engine.budget.blocks=64: engine=mlx_lm does not have this option; leave it null",
        ),
        ({"kv": config.KV(block_size=8)}, "engine.kv.block_size=8"),
        (
            {"scheduler": config.Scheduler(max_num_batched_tokens=64)},
            "engine.scheduler.max_num_batched_tokens=64",
        ),
        (
            {
                "attention": config.Attention(backend="reference"),
            },
            "engine.attention.backend=reference: engine=mlx_lm does not have this option; "
            "leave it fused",
        ),
    ],
)
def test_options_of_other_engines_are_refused(changes, message):
    with pytest.raises(config.ConfigError) as caught:
        config.Engine(name="mlx_lm", **changes)
    assert str(caught.value).startswith(message)


def test_supported_options_are_accepted():
    scheduler = config.Scheduler(max_num_seqs=1024, chunk=2048)
    engine = config.Engine(
        name="mlx_lm",
        threads=1,
        blas=config.Blas.stock,
        memory_limit=1 << 30,
        mlx_cache_limit=1 << 20,
        dtype=config.DType.bfloat16,
        mlx=config.Mlx(tf32=False, bfs_max_width=8),
        scheduler=scheduler,
    )
    assert engine.scheduler.chunk == 2048


def test_a_kernel_workload_is_refused():
    with pytest.raises(config.ConfigError, match=r"engine\.name=mlx_lm: it serves requests"):
        config.Experiment(
            engine=options(),
            model=config.Model(shape=config.ModelShape()),
            workload=config.Workload(
                name="k",
                kind="kernel",
                cases=[config.Case("d", decode=1, context=1)],
            ),
            ablation=config.Ablation(arms={"base": {}}),
        )
