"""Every tensor type gives the numbers that llama.cpp's own package computes (gguf_blocks.json)."""

import base64
import importlib.util
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from labkit.cpu.precision.gguf_block_arrays import BlockArrays
from labkit.cpu.precision.gguf_block_formats import BLOCK_FORMATS, is_gguf_only
from labkit.engine.model import gguf_block_layers
from labkit.models.gguf import GGUFError, gguf_repacking
from labkit.models.gguf.gguf_header import TENSOR_TYPES, WIDENED_TYPES

KNOWN = json.loads((Path(__file__).parent / "gguf_blocks.json").read_text("utf-8"))["types"]
BLOCK_BYTES = {kind.name: kind.block_bytes for kind in TENSOR_TYPES.values()}


def known(name):
    """Return a type's blocks, one row of a matrix, and their weights."""
    blocks = np.frombuffer(bytes.fromhex(KNOWN[name]["blocks"]), np.uint8)
    weights = np.frombuffer(base64.b64decode(KNOWN[name]["weights"]), "<f4")
    return blocks.reshape(1, -1, BLOCK_BYTES[name]), weights


def in_mlx(arrays):
    return {
        name: mx.array(array).view(mx.bfloat16) if array.dtype == np.uint16 else mx.array(array)
        for name, array in arrays.items()
    }


def widened(name, arrays):
    """Return the float32 weights of converted arrays, as MLX computes them."""
    layout, arrays = gguf_repacking.layout_of(name), in_mlx(arrays)
    if layout is None:
        return arrays["weight"].astype(mx.float32)
    if is_gguf_only(layout.mode):
        return gguf_block_layers.dequantized(arrays, layout.mode)
    if layout.mode == "affine":
        arrays |= {part: arrays[part].astype(mx.float32) for part in ("scales", "biases")}
    entry = layout.entry()
    return mx.dequantize(arrays.pop("weight"), **arrays, **entry, dtype=mx.float32)


def test_all_types_are_known():
    assert {*KNOWN} == {kind.name for kind in TENSOR_TYPES.values()} - {"F32", "F16"}
    refused = {name for name in KNOWN if name in WIDENED_TYPES}
    assert refused == {*WIDENED_TYPES} and len(KNOWN) - len(refused) == 15


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in WIDENED_TYPES])
def test_blocks_have_the_weights_of_llama_cpp(name):
    blocks, weights = known(name)
    (row,) = np.array(widened(name, gguf_repacking.convert_blocks(name, blocks)))
    np.testing.assert_array_equal(row, weights)


@pytest.mark.parametrize("name", [name for name in KNOWN if is_gguf_only(name.lower())])
def test_numpy_has_the_same_weights(name):
    blocks, weights = known(name)
    arrays = gguf_repacking.convert_blocks(name, np.repeat(blocks, 2, axis=0))
    words = arrays.pop("weight")
    wide = BlockArrays(name.lower(), words, arrays).dequantize()
    np.testing.assert_array_equal(wide, [weights, weights])


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_mlx_layers_have_the_same_numbers(name):
    blocks, weights = known(name)
    mode = gguf_repacking.layout_of(name).mode
    parts = in_mlx(gguf_repacking.convert_blocks(name, blocks))
    model = {f"m.{part}": array for part, array in parts.items()}
    arrays = {
        part.removeprefix("m."): array
        for part, array in gguf_block_layers.with_mlx_weights(model, "m", mode).items()
    }
    entry = gguf_block_layers.mlx_quantization(mode)
    assert (entry is None) == (name == "Q6_K")
    if entry is not None:
        arrays = {"weight": mx.dequantize(arrays.pop("weight"), **arrays, **entry)}
    np.testing.assert_array_equal(np.array(arrays["weight"])[0], weights)


def test_large_tensors_are_converted_in_slabs(monkeypatch):
    blocks, _ = known("Q4_K")
    rows = np.repeat(blocks, 7, axis=0)
    rows[:, 0, 20] = np.arange(7)
    whole = gguf_repacking.convert_blocks("Q4_K", rows)
    monkeypatch.setattr(gguf_repacking, "SLAB_BYTES", 2 * rows[:1].nbytes)
    for name, array in gguf_repacking.convert_blocks("Q4_K", rows).items():
        assert len(array) == 7
        np.testing.assert_array_equal(array, whole[name])


@pytest.mark.parametrize("name", WIDENED_TYPES)
def test_types_with_code_books_are_widened_by_the_package_gguf(name):
    blocks, weights = known(name)
    if importlib.util.find_spec("gguf") is None:
        with pytest.raises(GGUFError, match=f"type {name} is read by the package gguf, which"):
            gguf_repacking.convert_blocks(name, blocks)
    else:
        arrays = gguf_repacking.convert_blocks(name, blocks)
        np.testing.assert_array_equal(arrays["weight"][0], weights)


@pytest.mark.parametrize("name", [name for name in KNOWN if gguf_repacking.layout_of(name)])
def test_a_layout_has_the_bits_and_groups_of_its_arrays(name):
    blocks, weights = known(name)
    layout = gguf_repacking.layout_of(name)
    arrays = gguf_repacking.convert_blocks(name, blocks)
    assert arrays["weight"].nbytes * 8 == weights.size * layout.bits
    if is_gguf_only(layout.mode):
        block = BLOCK_FORMATS[layout.mode]
        assert (block.bits, block.group_size) == (layout.bits, layout.group_size)
    else:
        assert arrays["scales"].size * layout.group_size == weights.size
