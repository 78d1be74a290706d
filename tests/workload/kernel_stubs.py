"""What the tests of kernel workloads share: workloads, experiments, and backends that are stubs."""

from types import SimpleNamespace

from labkit.config import Experiment, Workload, from_plain, to_plain


def make_workload(*cases, **changes):
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    options = {"warmup": 1, "repeats": 2, **shape, "max_pool_bytes": 1 << 30}
    return Workload("test", "kernel", cases=list(cases), **{**options, **changes})


def experiment(workload, **engine):
    plain = {
        "engine": engine,
        "model": {"shape": {}},
        "workload": to_plain(workload),
        "ablation": {"arms": {"base": {}}},
    }
    return from_plain(Experiment, plain)


class StubBackend:
    """A backend whose subclass plans, and launches something that it reports with ``reported``."""

    name, arrays = "stub", "numpy"

    def adopt(self, keys, values):
        self.pools = [*keys, *values]

    def bind(self, layer, *, scale, heads, window=None):
        self.scale = scale


def reported(counters, *, stamp=7, **changes):
    """Return the reports of a launch whose stamp must be 7."""
    facts = {"kernel": "decode", "partitions": 1, "launches": 1, "reason": "", "grid": (2, 5)}
    stamps = {"stamp": stamp, "expected_stamp": 7, "stale": stamp != 7}
    return (SimpleNamespace(**{**facts, **stamps, **changes}, counters=lambda: counters),)
