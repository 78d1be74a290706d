"""The CPU kernels' switches change work and counters, and no bit of the output."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.kernel_constants import BQ

SINKS = np.linspace(-3, 6, 8).astype(np.float32)
OPTIONS = [{}, {"window": 20}, {"window": 100, "softcap": 5.0, "sinks": SINKS}]
named = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")


def search_steps(batch, tiled):
    """Return the steps of the searches for the whole grid of one head, by the article's loop."""
    rows, num_seqs = (BQ, len(batch.seq_lens)) if tiled else (1, len(batch.seq_lens))
    starts = [c // rows + (i if tiled else 0) for i, c in enumerate(batch.cu_seqlens_q)]
    steps = 0
    for place in range(len(batch.q) // rows + (num_seqs if tiled else 0)):
        low, high = 0, num_seqs
        while low < high:
            middle, steps = (low + high + 1) // 2, steps + 1
            low, high = (middle, high) if starts[middle] <= place else (low, middle - 1)
    return steps


@pytest.mark.parametrize("options", OPTIONS[::2], ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("tile_threshold", [2, 1000])
@pytest.mark.parametrize("heads", [(8, 2), (5, 1), (4, 4)])
def test_every_unit_searches_once_and_gives_the_same_bits(
    make_batch, lengths, heads, options, tile_threshold
):
    """A unit that served two heads would search half as often as ``unit=head`` must."""
    batch = make_batch(lengths, heads=heads[0], kv_heads=heads[1])
    options = {**options, "tile_threshold": tile_threshold}
    if "sinks" in options:
        options["sinks"] = SINKS[: heads[0]]
    default, _ = batch.attend(**options)
    served = {"head": 1, "kv_head": heads[0] // heads[1], "token": heads[0]}
    for unit, number in served.items():
        out, report = batch.attend(unit=unit, **options)
        assert np.array_equal(out, default)
        columns, shared = heads[0] // number, min(number, heads[0] // heads[1])
        tiled = report.kernel == "tiled"
        assert report.grid == (columns, len(batch.q) // BQ + len(lengths) if tiled else len(out))
        assert report.search_iterations == columns * search_steps(batch, tiled)
        assert report.sharing_heads == shared and not report.stale
        loads = batch.attend(unit="head", **options)[1].kv_blocks_visited
        assert report.kv_blocks_visited * shared == loads
        assert set(report.unit) == {name for name, n in served.items() if n == number}
        assert report.counters()[f"unit.{unit}"] == 1


@pytest.mark.parametrize("window", [1, 20, 100])
@pytest.mark.parametrize("tile_threshold", [2, 1000])
@pytest.mark.parametrize("unit", ["auto", "head", "token"])
def test_masking_gives_the_same_bits_and_visits_all_blocks(
    make_batch, lengths, window, tile_threshold, unit
):
    batch = make_batch(lengths)
    switches = {"window": window, "tile_threshold": tile_threshold, "unit": unit}
    skipping, report = batch.attend(**switches)
    masking, other = batch.attend(window_skip=False, **switches)
    _, whole = batch.attend(**{**switches, "window": None})
    assert np.array_equal(skipping, masking)
    assert other.kv_blocks_visited == whole.kv_blocks_visited
    assert other.masked_blocks == report.skipped_blocks
    assert report.masked_blocks == other.skipped_blocks == 0
    assert report.skipped_blocks == whole.kv_blocks_visited - report.kv_blocks_visited
    assert whole.skipped_blocks == whole.masked_blocks == 0


@pytest.mark.parametrize("tile_threshold", [2, 1000])
def test_masked_nan_does_not_leak_without_skipping(make_batch, tile_threshold):
    batch = make_batch([(1, 320), (40, 320)], heads=2, kv_heads=1)
    for sequence in range(2):
        blocks = batch.block_tables[sequence, :15]
        batch.k_pool[blocks], batch.v_pool[blocks] = np.nan, np.inf
    switches = {"window": 30, "tile_threshold": tile_threshold}
    masking, _ = batch.attend(window_skip=False, **switches)
    assert np.isfinite(masking).all()
    assert np.array_equal(masking, batch.attend(**switches)[0])


@named
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_split_kv_equals_the_oracle(make_batch, lengths, parts, options, assert_close):
    batch = make_batch(lengths)
    switches = {"split_kv": parts, "tile_threshold": 1000, **options}
    out, report = batch.attend(**switches)
    expected, _ = batch.attend("reference", **options)
    assert_close(out, expected)
    assert not report.stale and report.partitions == parts == report.grid[-1]
    alone, _ = batch.attend(unit="head", **switches)
    assert np.array_equal(out, alone)
    masked, _ = batch.attend(window_skip=False, unit="head", split_kv=parts, **options)
    assert_close(masked, expected)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), min_size=1, max_size=4),
    parts=st.integers(2, 9),
    window=st.sampled_from([None, 1, 70]),
    skip=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_split(make_batch, assert_close, lengths, parts, window, skip):
    batch = make_batch([(q, q + past) for q, past in lengths], heads=4, head_dim=16)
    switches = {"split_kv": parts, "window_skip": skip, "tile_threshold": 1000, "window": window}
    out, report = batch.attend(**switches)
    assert_close(out, batch.attend("reference", window=window)[0])
    assert (
        report.kv_blocks_visited
        == batch.attend(**{**switches, "split_kv": "off"})[1].kv_blocks_visited
    )


def test_very_negative_logits_in_partitions(make_batch, assert_close):
    batch = make_batch([(1, 300), (1, 3)], shift=-300.0)
    out, _ = batch.attend(scale=1.0, split_kv=4, sinks=SINKS - 3000)
    expected, _ = batch.attend("reference", scale=1.0, sinks=SINKS - 3000)
    assert_close(out, expected, largest_logit=330)


def test_auto_splits_small_decode_batches_of_long_contexts_only(make_batch):
    long_context = make_batch([(1, 1100)], heads=2, kv_heads=1, head_dim=16)
    _, report = long_context.attend(split_kv="auto")
    assert report.partitions == 3 and report.reason.endswith("leave cores idle")
    assert report.counters()["split_kv.partitions"] == 3
    for lengths in ([(1, 500)], [(1, 1100)] * 64, [(2, 1100)]):
        _, report = make_batch(lengths, heads=2, kv_heads=1, head_dim=16).attend(split_kv="auto")
        assert report.partitions == 1 and "split_kv.partitions" not in report.counters()


def test_tile_threshold_changes_the_kernel_and_no_bit(make_batch, lengths):
    batch = make_batch(lengths)
    default, report = batch.attend()
    other, decode = batch.attend(tile_threshold=1000)
    assert decode.kernel == "decode"
    assert np.array_equal(default, other)
    longest = int(np.diff(batch.cu_seqlens_q).max())
    if report.kernel == "tiled":
        assert batch.attend(tile_threshold=longest)[1].kernel == "tiled"
        assert batch.attend(tile_threshold=longest + 1)[1].kernel == "decode"


def test_a_reduce_kernel_that_did_not_run_is_stale(make_batch, monkeypatch):
    from labkit.cpu.attention import kernel_entry_points

    monkeypatch.setattr(kernel_entry_points, "reduce", lambda *_: None)
    _, report = make_batch([(1, 300)]).attend(split_kv=2)
    assert report.stale
