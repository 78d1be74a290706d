"""Which arms share a process, and why the others do not."""

from __future__ import annotations

import pytest

from labkit import workload
from labkit.config import ConfigError, Design, Experiment, Isolation, from_plain
from labkit.experiment import sharing

KERNELS = {
    "name": "kernels",
    "kind": "kernel",
    "cases": [{"name": "c", "decode": 1, "context": 16}],
}


def arms(*engines, workload=KERNELS):
    plain = {"model": {"shape": {}}, "ablation": {"arms": {"base": {}}}, "workload": workload}
    return [from_plain(Experiment, {**plain, "engine": engine}) for engine in engines]


def test_kernels_share_a_process():
    resolvers = [{"attention": {"resolver": name}} for name in ("binary_search", "seq_map")]
    assert sharing.settle(Design(), arms(*resolvers)) == (Isolation.in_process, None)


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        (({}, {"memory_limit": 1 << 30}), "engine.memory_limit"),
        (({"memory_limit": 1 << 30}, {"memory_limit": 1 << 30}), "engine.memory_limit"),
        (({}, {"blas": "stock"}), "engine.blas"),
        (({}, {"mlx_cache_limit": 0}), "engine.mlx_cache_limit"),
    ],
)
def test_what_a_process_has_one_of_keeps_arms_apart(engines, reason):
    isolation, why = sharing.settle(Design(), arms(*engines))
    assert isolation is Isolation.process and reason in why
    with pytest.raises(ConfigError, match=rf"design\.isolation=in_process: .*{reason}.*set design"):
        sharing.settle(Design(isolation=Isolation.in_process), arms(*engines))


def test_arms_are_apart_where_that_is_asked_for():
    isolation, why = sharing.settle(Design(isolation=Isolation.process), arms({}, {}))
    assert isolation is Isolation.process and "asks for it" in why


def test_kernels_and_requests_are_apart():
    mixed = [*arms({}), *arms({}, workload={"name": "ragged", "kind": "ragged"})]
    assert "different kinds" in workload.apart(mixed)
