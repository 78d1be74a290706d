"""Synthetic cells: records written by the record's own writer, noise from fixed seeds."""

from __future__ import annotations

import base64
import hashlib
import random
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit.analysis.document.table_model import Table
from labkit.analysis.number_format import UNKNOWN
from labkit.analysis.statistics import difference_in_differences, permutation_test
from labkit.analysis.studies.increasing_load import METRICS
from labkit.records import Arm, CaseRecord, Metric, Record, publish_arm, publish_records, write_json

PUBLISHED = {
    "source": "One Launch for Any Batch (12 June 2026)",
    "machine": "M1 Pro, 14 GPU cores, Metal, float16",
    "metric": "dispatch_us",
    "unit": "us",
    "rows": [
        {
            "case": "decode, 64 reqs, ctx 128",
            "arms": {"binary_search": 322.6, "seq_map": 296.5},
            "delta_pct": {"seq_map": -8.1},
        }
    ],
}


LIMITS = {"read_gb_s": 50.0, "sgemm_gflop_s": 400.0, "threads": 2, "read_bytes": 128 << 20}
TIMELINE = {
    "period_s": 0.02,
    "cost_s": 0.0001,
    "t_s": [0.01, 0.03, 0.05, 0.07, 0.09],
    "kv_used_bytes": [2**20, 2**21, 2**22, 2**23, 0],
    "kv_reserved_bytes": [2**23, 2**23, 2**23, 2**23, 2**20],
    "mlx_active_bytes": [2**24] * 5,
    "mlx_cache_bytes": [0] * 5,
    "rss_bytes": [2**25, 2**25 + 1, 2**26, 2**26, 2**26],
    "swap_bytes": [0] * 5,
}


def crc(values: list[int]) -> str:
    return base64.b64encode(np.array(values, "<u4").tobytes()).decode()


def array_outputs(rows: list[int], heads: list[int]) -> dict[str, Any]:
    digest = hashlib.sha256(repr((rows, heads)).encode()).hexdigest()
    return {
        "kind": "array",
        "digest": digest,
        "shape": [len(rows), len(heads), 8],
        "dtype": "float32",
        "rows": crc(rows),
        "heads": crc(heads),
    }


def token_outputs(requests: dict[str, list[int]], margin: float = 0.5) -> dict[str, Any]:
    return {
        "kind": "tokens",
        "digest": hashlib.sha256(repr(sorted(requests.items())).encode()).hexdigest(),
        "requests": [
            {"id": name, "tokens": tokens, "margins": [margin] * len(tokens), "finish": "length"}
            for name, tokens in requests.items()
        ],
    }


@dataclass
class CellMaker:
    """Description of a cell to write; ``values[arm]`` is the factor on the metric.

    A run's cases have ``noise`` (log scale) in common, and half as much of their own.
    """

    dir: Path
    blocks: int = 4
    runs: int = 2
    effects: dict[str, float] = field(default_factory=lambda: {"seq_map": 0.95})
    noise: float = 0.005
    cases: tuple[str, ...] = ("decode, 64 reqs, ctx 128", "prefill, 8 × 512")
    skipped: dict[str, str] = field(default_factory=dict)
    control: bool = True
    identity: str = "bitwise"
    claims: bool = True
    requests: bool = False
    repeats: int = 3
    seed: int = 1
    margin_pct: float = 2.0
    alpha: float = 0.05
    unit_scale: float = 1.0
    published: Any = None
    looks: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[str] | None = None
    isolation: str = "process"
    clients: int | None = None
    limits: dict[str, float | None] = field(default_factory=dict)
    design: dict[str, Any] = field(default_factory=dict)  # further keys of the manifest's design
    workload: dict[str, Any] = field(default_factory=dict)
    change: Any = None  # (Record) -> Record | None, called before writing

    @property
    def arms(self) -> list[Arm]:
        names = ["binary_search", *self.effects]
        arms = [
            Arm(
                name=name,
                role="baseline" if name == "binary_search" else "arm",
                overrides={"engine.attention.resolver": name},
                config={
                    "engine": {"name": "paged", "attention": {"device": "cpu"}},
                    "model": {},
                    "workload": {
                        "name": "kernel_seq_map",
                        "concurrency": self.clients,
                        "limits": self.limits,
                        **self.workload,
                    },
                    "seed": 0,
                },
                identity=self.identity,
                engaged=(f"resolver.{name}",) if self.claims else (),
            )
            for name in names
        ]
        if self.control:
            arms.append(replace(arms[0], name="control", role="control"))
        return arms

    def write(self) -> Path:
        arms = self.arms
        (self.dir / "runs").mkdir(parents=True, exist_ok=True)
        (self.dir / "arms").mkdir(exist_ok=True)
        for arm in arms:
            publish_arm(self.dir, arm)
        write_json(self.dir / "cell.json", self.facts(arms))
        noise = np.random.default_rng(self.seed)
        shuffler = random.Random(self.seed)
        for block in range(self.blocks):
            order = [arm for arm in arms for _ in range(self.runs)]
            shuffler.shuffle(order)
            for position, arm in enumerate(order):
                record = self.record(arm, block, position, noise)
                if self.change is not None:
                    record = self.change(record)
                if record is not None:
                    publish_records(self.dir, record)
        return self.dir

    def facts(self, arms: list[Arm]) -> dict[str, Any]:
        gate = {"status": "unclaimed", "reasons": []}
        return {
            "schema_version": 1,
            "cell": self.dir.name,
            "question": "Does a host-built map beat the binary search?",
            "arms": [
                {"name": a.name, "role": a.role, "overrides": dict(a.overrides), "counters": {}}
                for a in arms
            ],
            "design": {
                "seed": 0,
                "blocks": self.blocks,
                "runs_per_block": self.runs,
                "control": self.control,
                "order": "permuted_blocks",
                "isolation": self.isolation,
                "looks": self.looks,
                "alpha": self.alpha,
                "margin_pct": self.margin_pct,
                **({} if self.metrics is None else {"metrics": self.metrics}),
                **self.design,
            },
            "gates": dict.fromkeys(("healthy", "engaged", "identical"), gate),
            "rows": [],
            "failures": [],
            "environment": {},
            "published": self.published,
        }

    def record(self, arm: Arm, block: int, position: int, noise: Any) -> Record:
        factor = self.effects.get(arm.name, 1.0) * float(np.exp(noise.normal(0, self.noise)))
        maker = self.request_case if self.requests else self.kernel_case
        names = ("all",) if self.requests else self.cases
        resolver = "binary_search" if arm.name == "control" else arm.name
        self.own = np.random.default_rng([self.seed, block, position])
        return Record(
            arm=arm.name,
            role=arm.role,
            block=block,
            position=position,
            seed=0,
            outcome="ok",
            started="2026-11-20T20:00:00Z",
            environment={"host": "abc", "os": "Linux", "cpu_model": "test", "cores": 2},
            environment_end={"host": "abc"},
            probe={"before": {"matmul_us": 100.0 * float(np.exp(noise.normal(0, 0.002)))}},
            counters={"engine.paged": 5.0, f"resolver.{resolver}": 5.0},
            cases=tuple(maker(name, i, factor, noise, resolver) for i, name in enumerate(names)),
            notes={"timeline": TIMELINE} if self.requests else {"limits": LIMITS},
        )

    def own_noise(self) -> float:
        return float(np.exp(self.own.normal(0, self.noise / 2)))

    def kernel_case(
        self, name: str, index: int, factor: float, noise: Any, resolver: str = ""
    ) -> CaseRecord:
        if name in self.skipped:
            return CaseRecord(name, self.skipped[name])
        middle = 322.6 * (index * 22 + 1) * factor * self.unit_scale * self.own_noise()
        repeats = tuple(middle * (1 + 0.001 * i) for i in range(self.repeats))
        return CaseRecord(
            name,
            metrics=(Metric("dispatch_us", "us", "lower", True, repeats),),
            outputs=array_outputs(list(range(64)), list(range(16))),
            notes={
                "kernel": "tiled" if "prefill" in name else "decode",
                "map_us": 12.5,
                "flops": 10**7 * (index * 99 + 1),
                "least_bytes": 10**7,
                "counters": {
                    "kernel.decode": 1,
                    "attention.search_iterations": 64 if resolver == "binary_search" else 0,
                    "attention.kv_blocks_visited": 512,
                    "window.skipped_blocks": 0,
                },
            },
        )

    def request_case(
        self, name: str, index: int, factor: float, noise: Any, resolver: str = ""
    ) -> CaseRecord:
        rate = 500.0 * factor * self.unit_scale * self.own_noise()
        metrics = (
            Metric("total_tok_s", "tok/s", "higher", True, (rate,)),
            Metric("output_tok_s", "tok/s", "higher", False, (rate / 3 * self.own_noise(),)),
            Metric("ttft_p50_ms", "ms", "lower", False, (40.0 / factor * self.own_noise(),)),
            Metric("peak_kv_bytes", "bytes", "lower", False, (2.0**24,)),
        )
        requests = {f"r{i:03d}": [i, i + 1, i + 2, 7] for i in range(8)}
        timings = [
            {
                "id": request,
                "prompt_tokens": 12,
                "output_tokens": 4,
                "submitted_ms": 1.0 * i,
                "admitted_ms": 1.5 * i,
                "ttft_ms": 40.0 / factor + i,
                "e2e_ms": 100.0 / factor + i,
                "itl_ms": [20.0, 20.0, 20.0],
            }
            for i, request in enumerate(requests)
        ]
        return CaseRecord(
            name, metrics=metrics, outputs=token_outputs(requests), notes={"requests": timings}
        )


def check_alignment(table):
    """Check that a table's columns of numbers, and only they, are aligned to the right.

    Tables of numbers with their intervals, and names that are numbers, are left out.
    """
    lines = [table.cells(line) for line in table.lines]
    if any(re.search(r"\d \(.* to ", cell) for line in lines for cell in line):
        return
    for column, *cells in zip(table.columns, *lines, strict=True):
        told = [cell for cell in cells if cell not in ("", UNKNOWN)]
        numbers = [bool(re.match(r"[−+×<≤≥~]? ?\d+(?!\d*-\d)", cell)) for cell in told]
        if told and (all(numbers) or not any(numbers)) and column.heading != "cell":
            assert column.numeric is all(numbers), (column.heading, told)


@pytest.fixture(autouse=True)
def aligned_tables(monkeypatch):
    """Check every table that a test has made: its numbers, and only they, are to the right."""
    make, made = Table.__init__, []

    def make_and_note(table, *arguments, **options):
        make(table, *arguments, **options)
        made.append(table)

    monkeypatch.setattr(Table, "__init__", make_and_note)
    yield
    for table in made:
        check_alignment(table)


@pytest.fixture
def make_cell(tmp_path):
    """Return a function that writes a cell and returns its folder."""

    def make(name: str = "study/ablation=seq_map", **options: Any) -> Path:
        return CellMaker(dir=tmp_path / name, **options).write()

    return make


@pytest.fixture
def under_load(make_cell):
    """Return a function that writes a cell whose runs served ``good`` of 50 requests in time."""

    def make(name: str, rate: float, good: int) -> Path:
        def with_traffic(record: Record) -> Record:
            (case,) = record.cases
            known = {metric.name for metric in case.metrics}
            others = [Metric(m, "ms", "lower", False, (9.0,)) for m in METRICS if m not in known]
            traffic = {"requests": 50, "good": good, "due_per_s": rate, "sent_per_s": rate}
            notes = {**case.notes, "traffic": traffic}
            case = replace(case, metrics=(*case.metrics, *others), notes=notes)
            return replace(record, cases=(case,))

        workload = {"capacity": 95.0, "arrivals": {"kind": "poisson", "rate": rate}}
        limits = {"ttft_ms": 500.0, "tpot_ms": None, "e2e_ms": None}
        return make_cell(name, requests=True, blocks=8, effects={}, control=False, limits=limits,
                         workload=workload, change=with_traffic)  # fmt: skip

    return make


@pytest.fixture
def make_array():
    """Return the function that makes an array's outputs: row and head checksums."""
    return array_outputs


@pytest.fixture
def make_tokens():
    """Return the function that makes the outputs of requests."""
    return token_outputs


@pytest.fixture
def published():
    """Return an article's published numbers of one case."""
    return PUBLISHED


@pytest.fixture
def fewer_pairs(monkeypatch):
    """Draw 4,000 joint relabellings of two studies, which keeps the p-values valid."""
    monkeypatch.setattr(difference_in_differences, "N_RESAMPLES", 4_000)
    difference_in_differences._pairs.cache_clear()
    yield
    difference_in_differences._pairs.cache_clear()


@pytest.fixture(scope="module")
def fewer_relabellings():
    """Draw 4,000 relabellings if they are not enumerated, which keeps the p-values valid."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation_test, "N_RESAMPLES", 4_000)
        patch.setattr(permutation_test, "MAX_ENUMERATED", 5_000)
        permutation_test.relabellings.cache_clear()
        yield
    permutation_test.relabellings.cache_clear()
