"""Invalid input raises one clear line before any launch, the same in every backend."""

import numpy as np
import pytest

from labkit.engine import attention
from labkit.engine.attention.attention_protocol import ArrayAdapter
from labkit.engine.attention.kv_and_state_shapes import KVShape

BACKENDS = {"cpu": {}, "emulated": {"device": "emulated"}, "reference": {"backend": "reference"}}


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    if request.param == "emulated":
        request.getfixturevalue("compiler")
    return BACKENDS[request.param]


def plan_of(make_batch, backend, **changes):
    batch = make_batch([(3, 20), (1, 40)])
    arguments = {
        "block_tables": batch.block_tables,
        "seq_lens": batch.seq_lens,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "total_q": 4,
    }
    for name, change in changes.items():
        arguments[name] = change(arguments[name].copy()) if callable(change) else change
    owner = attention.create(**backend)
    owner.adopt([batch.k_pool], [batch.v_pool])
    return owner.plan(**arguments)


def with_item(index, value):
    def change(array):
        array[index] = value
        return array

    return change


BATCHES = [
    ({"seq_lens": lambda a: a.astype(np.int64)}, "seq_lens must be an array of int32, not int64"),
    ({"block_tables": lambda a: a.astype(np.float32)}, "block_tables must be an array of int32"),
    ({"cu_seqlens_q": [0, 3, 4]}, "cu_seqlens_q must be an array of int32, not list"),
    ({"block_tables": lambda a: a[0]}, "block_tables must have ndim=2, not 1"),
    ({"block_tables": lambda a: a[:1]}, "block_tables has length 1; it must be 2"),
    ({"block_tables": with_item((1, 2), -1)}, r"block_tables\[1, 2\] is -1; a block id must be"),
    ({"block_tables": lambda a: a[:, :2]}, r"seq_lens\[1\] is 40 and needs 3 blocks of 16"),
    ({"cu_seqlens_q": with_item(0, 1)}, r"cu_seqlens_q\[0\] is 1; it must be 0"),
    ({"cu_seqlens_q": with_item(1, 5)}, "cu_seqlens_q falls from 5 to 4 at index 2"),
    ({"cu_seqlens_q": with_item(2, 5)}, "cu_seqlens_q ends at 5, not at total_q=4"),
    ({"cu_seqlens_q": lambda a: a[:2]}, "cu_seqlens_q has length 2; it must be 3"),
    ({"seq_lens": with_item(0, 2)}, r"seq_lens\[0\] is 2, less than .* which is 3"),
    (
        {"block_tables": with_item((1, 2), 6)},
        "block id 6; ids must be below 6",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BATCHES)
def test_bad_batches_are_refused(make_batch, backend, changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        plan_of(make_batch, backend, **changes)
    assert "\n" not in str(raised.value)


def test_unused_blocks_may_hold_anything(make_batch, backend):
    """Padding, and the table of a sequence without queries, are never read."""
    batch = make_batch([(3, 20), (0, 40), (1, 8)])
    right, _ = batch.attend(**backend)
    batch.block_tables[0, 2] = -7
    batch.block_tables[1] = 9999
    poisoned, _ = batch.attend(**backend)
    assert np.array_equal(right, poisoned)


OPERANDS = [
    ({"q": lambda a: a[:3]}, r"q must have shape \[total_q=4"),
    ({"k_pool": lambda a: a[:, :8]}, "k_pool and v_pool must have the shape"),
    (
        {"k_pool": lambda a: a.astype(np.float16)},
        "must have the same dtype, not float16 and float32",
    ),
    ({"q": lambda a: a.astype(np.float64)}, "q has dtype float64, but the layer needs float32"),
    (
        {"k_pool": lambda a: a[:4], "v_pool": lambda a: a[:4]},
        "block id 5; ids must be below 4",
    ),
    ({"q": lambda a: a[:, :, :32]}, "q has head size 32, but the pools have 64"),
    ({"heads": 7}, "query heads, 7, is not a multiple of the 2 KV heads"),
    ({"heads": 0}, "query heads, 0, is not a multiple of the 2 KV heads"),
    ({"q": lambda a: a[:, :6]}, "q has 6 heads, but the layer was bound to 8"),
    ({"out": np.zeros((4, 8, 64))}, "out must be float32"),
    ({"scale": np.nan}, "scale=nan: must be a finite number"),
    ({"window": 0}, "window=0: must be 1 or more"),
    ({"softcap": 0.0}, "softcap=0.0: must be above 0"),
    ({"sinks": np.zeros(3, np.float32)}, r"sinks must have shape \[8\], not \[3\]"),
]


@pytest.mark.parametrize(("changes", "message"), OPERANDS)
def test_bad_operands_are_refused(make_batch, backend, changes, message, monkeypatch):
    for launch in (
        "cpu_backend.kernel_entry_points.decode",
        "cpu_backend.kernel_entry_points.tiled",
        "metal_backend.KernelCall.with_inputs",
    ):
        monkeypatch.setattr(f"labkit.engine.attention.backends.{launch}", pytest.fail)
    batch, options = make_batch([(3, 20), (1, 40)]), {"scale": 0.1, "heads": 8}
    backend, k, v, out = attention.create(**backend), None, None, None
    for name, change in changes.items():
        if name in ("q", "k_pool", "v_pool"):
            setattr(batch, name, change(getattr(batch, name)))
        elif name == "out":
            out = change
        else:
            options[name] = change
    if backend.arrays == "mlx" and (out is not None or batch.q.dtype == np.float64):
        pytest.skip("MLX has neither out nor float64, and converts")
    with pytest.raises(ValueError, match=message) as raised:
        backend.adopt([batch.k_pool], [batch.v_pool])
        plan = backend.plan(
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
        )
        backend.bind(0, **options)
        taken = backend if backend.arrays == "numpy" else ArrayAdapter(backend)
        taken.forward(0, batch.q, k, v, plan, out)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("head_dim", [0, 8, 40, 272])
def test_bad_head_sizes_are_refused(make_batch, backend, head_dim):
    if backend == BACKENDS["reference"]:
        pytest.skip("the oracle computes any head size")
    with pytest.raises(ValueError, match=f"head size {head_dim}: must be a multiple of 16"):
        make_batch([(1, 4)], head_dim=head_dim).attend(**backend, scale=1.0)


def test_unequal_widths_are_refused_by_fused_kernels(backend):
    owner = attention.create(**backend)
    owner.allocate([KVShape(2, 64, 32), KVShape(1, 48, 32, latent=True)], 4, 16)
    assert owner.keys[1] is owner.values[1]
    owner.bind(1, scale=1.0, heads=4)
    if backend == BACKENDS["reference"]:
        owner.bind(0, scale=1.0, heads=4)
        return
    with pytest.raises(ValueError, match=r"keys have 64 and values 32 .*backend=gather$"):
        owner.bind(0, scale=1.0, heads=4)


def test_queries_of_half_precision_are_refused_on_the_cpu(make_batch):
    batch = make_batch([(1, 4)])
    batch.q = batch.q.astype(np.float16)
    with pytest.raises(ValueError, match="q has dtype float16, but the layer needs float32"):
        batch.attend()


def test_bad_writes_are_refused(make_batch, backend):
    batch = make_batch([(3, 20), (1, 40)])
    owner = attention.create(**backend)
    plan = batch.plan(owner)
    right = np.zeros((4, 2, 64), np.float32)
    for k, v, message in (
        (right[:3], right, r"k and v must have shape \[4, 2, 64\]"),
        (right, right[:, :1], r"k and v must have shape \[4, 2, 64\]"),
        (right, right.astype(np.float16), "k and v have dtypes float32 and float16, but"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.forward(owner, plan, k, v)


def test_an_unbound_layer_is_refused(make_batch, backend):
    batch = make_batch([(3, 20), (1, 40)])
    owner = attention.create(**backend)
    plan = batch.plan(owner)
    owner.adopt([batch.k_pool], [batch.v_pool])
    with pytest.raises(ValueError, match="layer 0 was not bound"):
        batch.forward(owner, plan)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mlx_pools_have_the_requested_dtype(dtype):
    gather = attention.create(backend="gather")
    gather.allocate([KVShape(2, 64, 64)], 4, 16, dtype)
    assert str(gather.keys[0].dtype) == f"mlx.core.{dtype}"
    assert gather.values[0].shape == (4, 16, 2, 64)
    with pytest.raises(ValueError, match="supports float32, float16 or bfloat16, not float64"):
        gather.allocate([KVShape(2, 64, 64)], 4, 16, "float64")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "flash"}, "backend=flash: must be fused, "),
        ({"device": "tpu"}, "device=tpu: must be one of: cpu, emulated, metal"),
        ({"split_kv": "some"}, "split_kv=some: must be off, auto or 1 to 1024"),
        ({"split_kv": 0}, "split_kv=0: must be off, auto or 1 to 1024"),
        ({"tile_threshold": 1}, "tile_threshold=1: must be 2 or more"),
        (
            {"backend": "reference", "split_kv": 2},
            "split_kv=2: backend=reference does not split",
        ),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attention.create(**options)
