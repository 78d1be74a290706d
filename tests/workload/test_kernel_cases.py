import base64
import hashlib
import shutil
import zlib
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from kernel_stubs import StubBackend, experiment, make_workload, reported

from labkit import workload as workloads
from labkit.config import Case, ConfigError, Precision
from labkit.config.engine.attention import ATTENTION_BACKENDS
from labkit.cpu.precision.kv_dtypes import from_float32, to_float32
from labkit.engine.attention.backends.mlx_backend_base import MlxBackend
from labkit.engine.attention.launch_evidence import LaunchReport
from labkit.metal.emulator import cpp_compilation
from labkit.workload import device_availability, kind_of
from labkit.workload.kernels import kernel_cases
from labkit.workload.kernels.interleaved_kernels import InterleavedKernels
from labkit.workload.kernels.kernel_arms import KernelArm
from labkit.workload.kernels.launch_timing import MlxLaunchQueue
from labkit.workload.output_digest import array_outputs
from labkit.workload.workload_protocols import InvalidOutput, StaleOutput, single_arm_context

DECODE = Case(name="decode", decode=5, context=40, factor=3)
PREFILL = Case(name="prefill", prefill=2, chunk=24)
MIXED = Case(name="mixed", decode=3, context=17, prefill=1, chunk=33)
RAGGED = Case("r", decode=2, context=17, uneven=[[33, 0], [1, 70], [5, 100]])
HUGE = Case(name="huge", decode=1024, context=2048)


make = partial(make_workload, warmup=2, max_pool_bytes=1 << 20)


class Backend(StubBackend):
    """Writes a value per token and head that depends on the batch; faults can be planted."""

    def __init__(self, fault=None):
        self.fault, self.plans, self.launches, self.poisoned = fault, [], 0, []

    def adopt(self, keys, values):
        self.block_size = keys[0].shape[1]

    def plan(self, *, block_tables, seq_lens, cu_seqlens_q, total_q=None):
        self.plans.append((block_tables, seq_lens, cu_seqlens_q, self.block_size))
        return SimpleNamespace(tables=block_tables, map_us=12.5)

    def forward(self, layer, q, k, v, plan, out):
        self.launches += 1
        self.poisoned.append(bool(np.isnan(out).all()))
        out[:] = q * np.float32(self.scale) + np.float32(plan.tables.sum())
        if self.fault == "unwritten":
            out[3, 1, :] = np.nan
        if self.fault == "flicker" and self.launches > 1:
            out[2, 0, 0] = np.nextafter(out[2, 0, 0], np.float32(np.inf))
        if self.fault == "elsewhere":
            out = out.copy()
        return out

    def report(self, plan):
        stamp = 6 if self.fault == "stale" and self.launches == 4 else 7
        return reported({"kernel.decode": 1, "attention.search_iterations": 10}, stamp=stamp)


def run(backend, *cases, **changes):
    make_backend = backend if callable(backend) else lambda: backend
    arm = KernelArm("paged", make_backend, make(*cases, **changes), block_size=16)
    kernels = InterleavedKernels([arm], single_arm_context(seed=3))
    kernels.warm_up()
    beats = []
    (result,) = kernels.measure(beats.append)
    kernels.close()
    return result, beats


def test_one_timing_is_one_dispatch_and_factors_multiply_the_repeats():
    backend = Backend()
    result, beats = run(backend, DECODE, PREFILL)
    decode, prefill = result.cases
    assert [m.name for m in decode.metrics] == ["dispatch_us"]
    assert decode.metrics[0].primary and decode.metrics[0].better == "lower"
    assert len(decode.metrics[0].repeats) == 6 and len(prefill.metrics[0].repeats) == 2
    assert all(t > 0 for t in decode.metrics[0].repeats)
    assert beats == [f"{n} of 8 rounds" for n in range(1, 9)]
    assert decode.notes["map_us"] == 12.5 and decode.notes["kernel"] == "decode"
    assert decode.notes["counters"]["attention.search_iterations"] == 10  # of one dispatch
    assert decode.notes["flops"] == 4 * 5 * 40 * 4 * 16


@pytest.mark.parametrize("window", [None, 1, 16, 30, 1000])
@pytest.mark.parametrize("case", [DECODE, PREFILL, MIXED, RAGGED])
def test_minimum_work_equals_a_loop_over_queries_and_keys(case, window):
    w = make(case, window=window)
    size = kernel_cases.geometry(case, w, 16)
    pairs = numbers = 0
    for q, kv in zip(size.query_lens, size.seq_lens, strict=True):
        seen = set()
        for i in range(q):
            last = kv - q + i
            keys = [k for k in range(last + 1) if window is None or last - k < window]
            pairs += len(keys)
            seen.update(keys)
        numbers += 2 * len(seen) * w.num_kv_heads * w.head_dim
        numbers += 2 * q * w.num_heads * w.head_dim
    counted = kernel_cases.work(size, w)
    assert counted == kernel_cases.MinimumWork(4 * pairs * w.num_heads * w.head_dim, 4 * numbers)


def test_counters_are_of_the_measured_dispatches_only():
    result, _ = run(Backend(), DECODE)
    assert result.counters == {
        "attention.search_iterations": 180,
        "engine.paged": 18,
        "kernel.decode": 18,
    }


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("unwritten", InvalidOutput, "the output has NaN, first at token 3, head 1"),
        ("stale", StaleOutput, "decode: warm-up 3: the kernel's stamp is 6, not 7"),
        (
            "flicker",
            InvalidOutput,
            "round 0: the output differs from the first launch's in 1 row.*token 2",
        ),
        ("elsewhere", InvalidOutput, "not written to the given array"),
    ],
)
def test_an_output_that_cannot_be_trusted_stops_the_run(fault, error, message):
    with pytest.raises(error, match=message):
        run(Backend(fault), DECODE)


def test_a_case_beyond_the_pool_limit_is_skipped_with_its_reason():
    result, beats = run(Backend(), HUGE, DECODE)
    assert result.cases[0].skipped == (
        "its KV pool needs 512.0 MiB; raise workload.max_pool_bytes (now 1.0 MiB)"
    )
    assert result.cases[0].metrics == () and result.cases[0].outputs is None
    assert result.cases[1].skipped is None and len(beats) == 6


def test_a_prefill_may_follow_cached_tokens():
    size = kernel_cases.geometry(Case("c", prefill=2, chunk=5, past=30), make(DECODE), 16)
    assert size.query_lens.tolist() == [5, 5] and size.seq_lens.tolist() == [35, 35]


def test_uneven_requests_have_lengths_of_their_own():
    size = kernel_cases.geometry(RAGGED, make(RAGGED), 16)
    assert size.query_lens.tolist() == [1, 1, 33, 1, 5]
    assert size.seq_lens.tolist() == [17, 17, 33, 71, 105]
    assert size.query_lens.dtype == size.seq_lens.dtype == np.int32
    assert kernel_cases.scaled_case(RAGGED, 0.4).uneven == [[33, 0], [1, 70]]


def test_a_resolver_for_pure_decode_refuses_uneven_queries():
    decodes = Case("d", uneven=[[1, 4], [1, 9]])
    assert RAGGED.prefills and not decodes.prefills
    assert Case("v", uneven=[[1, 4], [2, 9]]).prefills  # two queries, as when a draft is verified


def test_decodes_come_first_and_lengths_are_those_of_the_case():
    backend = Backend()
    run(backend, MIXED)
    tables, seq_lens, starts, block_size = backend.plans[0]
    assert starts.tolist() == [0, 1, 2, 3, 36]
    assert seq_lens.tolist() == [17, 17, 17, 33]
    assert block_size == 16 and starts.dtype == seq_lens.dtype == tables.dtype == np.int32


@pytest.mark.parametrize("case", [DECODE, PREFILL, MIXED, RAGGED])
def test_block_tables_are_random_and_share_no_block(case):
    size = kernel_cases.geometry(case, make(case), 16)
    tables = kernel_cases.block_tables(size, seed=3)
    used = tables[tables > 0]
    assert sorted(used) == list(range(1, size.num_blocks))
    assert list(used) != sorted(used)
    counts = (tables > 0).sum(axis=1)
    assert counts.tolist() == [-(-int(n) // 16) for n in size.seq_lens]
    assert (tables == kernel_cases.block_tables(size, seed=3)).all()
    assert (tables != kernel_cases.block_tables(size, seed=4)).any()


def test_inputs_do_not_depend_on_which_other_cases_run():
    alone, _ = run(Backend(), MIXED)
    among, _ = run(Backend(), DECODE, MIXED, PREFILL)
    assert alone.cases[0].outputs == among.cases[1].outputs


def test_no_two_blocks_hold_the_same_values():
    workload = make(Case(name="d", decode=300, context=128), num_kv_heads=4, head_dim=32)
    size = kernel_cases.geometry(workload.cases[0], workload, 16)
    numbers = kernel_cases.query_elements(size, workload)
    arrays = kernel_cases.allocate(size.pool_bytes, numbers, seed=0).view(size, workload)
    assert arrays.q.shape == arrays.out.shape == (300, 4, 32)
    for pool in (arrays.k_pool, arrays.v_pool):
        assert pool.shape == (2401, 16, 4, 32) and np.isfinite(pool).all()
        blocks = {zlib.crc32(block.tobytes()) for block in pool}
        assert len(blocks) == len(pool)
    assert pool.size > 4 * kernel_cases.TEMPLATE_LENGTH  # so that the sequence is indeed repeated
    assert not np.array_equal(arrays.k_pool[1], arrays.v_pool[1])


def test_fingerprints_point_at_the_row_and_the_head():
    out = np.arange(3 * 2 * 4, dtype=np.float32).reshape(3, 2, 4)
    changed = out.copy()
    changed[1, 0, 2] += 1
    a, b = array_outputs(out), array_outputs(changed)
    assert a["digest"] == hashlib.sha256(out.tobytes()).hexdigest() != b["digest"]
    assert a["shape"] == [3, 2, 4] and a["dtype"] == "float32"

    def crcs(outputs, key):
        return np.frombuffer(base64.b64decode(outputs[key]), "<u4")

    assert crcs(a, "rows")[2] == zlib.crc32(out[2].tobytes())
    assert crcs(a, "heads")[1] == zlib.crc32(out[:, 1].tobytes())
    assert np.flatnonzero(crcs(a, "rows") != crcs(b, "rows")).tolist() == [1]
    assert np.flatnonzero(crcs(a, "heads") != crcs(b, "heads")).tolist() == [0]


def reference():
    from labkit.engine import attention

    return attention.create(backend="reference")


def test_the_session_runs_on_the_real_reference_backend():
    result, _ = run(reference, DECODE, PREFILL, MIXED)
    assert result.counters["kernel.reference"] == 3 * (6 + 2 + 2)
    assert len({case.outputs["digest"] for case in result.cases}) == 3


def test_prepare_refuses_what_cannot_run():
    workloads.prepare(experiment(make(DECODE, HUGE)))
    with pytest.raises(ConfigError, match="every case of workload=test needs more"):
        workloads.prepare(experiment(make(HUGE)))
    identity = {"attention": {"resolver": "identity"}}
    workloads.prepare(experiment(make(DECODE), **identity))
    with pytest.raises(ConfigError, match=r"resolver=identity: .* has prefill"):
        workloads.prepare(experiment(make(DECODE, PREFILL), **identity))


def test_a_window_reaches_the_kernel():
    batch, _ = run(reference, DECODE)
    narrow, _ = run(reference, DECODE, window=8)
    assert narrow.cases[0].outputs["digest"] != batch.cases[0].outputs["digest"]
    blocks = "attention.kv_blocks_visited"
    assert narrow.counters[blocks] < batch.counters[blocks]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("metal", "engine.attention.device=metal: there is no Metal on this machine; set"),
        ("cuda", r"engine.attention.device=cuda: there is no NVIDIA driver or no mlx\[cuda13\]"),
        (
            "emulated",
            r"engine.attention.device=emulated(: there is no g\+\+ on PATH; install| needs Linux)",
        ),
    ],
)
def test_an_unavailable_device_is_refused(monkeypatch, device, message):
    monkeypatch.setattr(device_availability, "mlx_gpu", lambda: None)
    monkeypatch.setenv("PATH", "")
    cpp_compilation.find_compiler.cache_clear()
    with pytest.raises(ConfigError, match=message) as raised:
        device_availability.check(experiment(make(DECODE), attention={"device": device}))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("backend", sorted({*ATTENTION_BACKENDS} - {"sdpa"}))  # over blocks
def test_attention_alone_needs_mlx_for_the_backends_that_call_it(monkeypatch, backend):
    needed = []
    monkeypatch.setattr(device_availability, "require_packages", lambda *what: needed.append(what))
    device_availability.check(experiment(make(DECODE), attention={"backend": backend}))
    assert bool(needed) == (backend not in ("fused", "reference"))


def test_the_estimate_grows_with_the_work_and_leaves_skipped_cases_out():
    small = workloads.estimate(experiment(make(DECODE)))
    large = workloads.estimate(experiment(make(DECODE, repeats=100_000)))
    with_huge = workloads.estimate(experiment(make(DECODE, HUGE)))
    allowed = workloads.estimate(experiment(make(DECODE, HUGE, max_pool_bytes=1 << 33)))
    assert large.seconds > small.seconds and large.bytes == small.bytes
    emulated = workloads.estimate(experiment(make(DECODE), attention={"device": "emulated"}))
    assert emulated.seconds > small.seconds + 0.5 and emulated.bytes == small.bytes
    assert with_huge == small
    assert allowed.bytes > small.bytes + 60e6


@pytest.mark.parametrize(
    ("gpu", "option", "message"),
    [
        (None, "tf32", "engine.mlx.tf32 has an effect on a GPU only"),
        (None, "sdpa_blocks", "engine.mlx.sdpa_blocks has an effect on Metal only"),
        ("cuda", "tf32", None),
        ("cuda", "sdpa_blocks", "engine.mlx.sdpa_blocks has an effect on Metal only"),
        ("metal", "sdpa_blocks", None),
    ],
)
def test_options_of_mlx_without_their_gpu_are_refused(monkeypatch, gpu, option, message):
    monkeypatch.setattr(device_availability, "mlx_gpu", lambda: gpu)
    arm = experiment(make(DECODE), mlx={option: True if option == "tf32" else 3})
    if message is None:
        device_availability.check(arm)
    else:
        with pytest.raises(ConfigError, match=message):
            device_availability.check(arm)


# ------------------------------------------------------------------ in half precision

HALF = (Precision.float16, Precision.bfloat16)
CASE = Case(name="mixed", decode=2, context=21, prefill=1, chunk=5)


def make_typed(dtype):
    return make_workload(CASE, dtype=dtype, head_dim=64)


@pytest.mark.parametrize("dtype", list(Precision))
def test_numbers_are_rounded_as_mlx_rounds_them(dtype):
    rng = np.random.default_rng(0)
    bits = np.float32(1).view(np.uint32) + np.arange(1 << 17, dtype=np.uint32)  # ties both ways
    numbers = np.concatenate([rng.standard_normal(4096, dtype=np.float32), bits.view(np.float32)])
    for signed in (numbers, -numbers):
        expected = mx.array(signed).astype(getattr(mx, dtype.value))
        stored = from_float32(signed, dtype.value)
        queue = MlxLaunchQueue(dtype)
        assert mx.array_equal(queue.put(stored), expected)
        np.testing.assert_array_equal(queue.read(expected), stored)
        single = expected.astype(mx.float32)
        np.testing.assert_array_equal(to_float32(stored), np.asarray(single))


def test_every_type_holds_the_same_numbers_rounded():
    single = kernel_cases.allocate(1 << 16, 512, seed=3)
    for dtype in HALF:
        half = kernel_cases.allocate(1 << 15, 512, seed=3, dtype=dtype)
        for name in ("q", "k_pool", "v_pool"):
            expected = from_float32(getattr(single, name), dtype.value)
            np.testing.assert_array_equal(getattr(half, name), expected)


def test_bytes_are_those_of_the_type():
    sizes = [kernel_cases.geometry(CASE, make_typed(dtype), 16) for dtype in Precision]
    assert [size.pool_bytes for size in sizes] == [sizes[0].pool_bytes // n for n in (1, 2, 2)]
    least = [kernel_cases.work(sizes[0], make_typed(dtype)).bytes for dtype in Precision]
    assert least == [least[0] // n for n in (1, 2, 2)]


class Echo(MlxBackend):
    """A backend on a device: a launch returns its queries."""

    name = "echo"

    def attend(self, layer, q, plan, out):
        self.types = {array.dtype for array in (q, *self.keys, *self.values)}
        return q * 1, LaunchReport(
            kernel="decode",
            grid=(1,),
            reason="",
            resolver="none",
            layer=0,
            kv_blocks_visited=0,
            bytes=0,
            map_us=0.0,
        )


@pytest.mark.parametrize("dtype", HALF)
def test_a_launch_runs_in_the_case_s_dtype_and_its_output_is_fingerprinted_in_it(dtype):
    backend = Echo()
    kernels = InterleavedKernels(
        [KernelArm("paged", lambda: backend, make_typed(dtype), 16)],
        single_arm_context(1),
    )
    kernels.warm_up()
    (measured,) = kernels.measure(lambda text: None)
    (result,), (values,) = measured.cases, measured.values.values()
    assert backend.types == {getattr(mx, dtype.value)}
    assert result.outputs["dtype"] == dtype.value
    assert values.dtype == np.float32 and not np.isnan(values).any()
    # The template is repeated, and every memory begins with it.
    expected = kernel_cases.allocate(1 << 10, values.size, 1, dtype).q
    np.testing.assert_array_equal(from_float32(values.reshape(-1), dtype.value), expected)


def test_arms_of_different_types_stay_apart():
    device = {"attention": {"device": "emulated"}}
    two = [experiment(make_typed(dtype), **device) for dtype in HALF]
    assert "the arms differ in workload.dtype" in kind_of(two[0]).apart(two)
    assert kind_of(two[0]).apart(two[:1] * 2) is None


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs a C++ compiler")
@pytest.mark.parametrize("dtype", HALF)
def test_the_emulated_kernels_compute_the_cases_in_half_precision(dtype):
    outputs = {}
    for kind in (dtype, Precision.float32):
        one = experiment(make_typed(kind), attention={"device": "emulated"})
        kernels = kind_of(one).load([one], single_arm_context(1))
        kernels.warm_up()
        (measured,) = kernels.measure(lambda text: None)
        (outputs[kind],) = measured.values.values()
        assert measured.cases[0].outputs["dtype"] == kind.value
        kernels.close()
    error = np.abs(outputs[dtype] - outputs[Precision.float32]).max()
    assert 0 < error < (4e-3 if dtype is Precision.float16 else 3e-2)
