"""Print digests of the CPU kernels' results, which tests compare between processes.

python kernel_digests.py gemm attention ...
"""

import hashlib
import sys

import numpy as np


def digest(*arrays):
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


class Numbers:
    def __init__(self):
        self.random = np.random.default_rng(0)

    def __call__(self, *shape):
        return self.random.standard_normal(shape).astype(np.float32)


def gemm():
    from labkit.cpu.matmul.packed_linear import PackedLinear

    numbers = Numbers()
    for depth, width in ((96, 161), (33, 5)):
        packed = PackedLinear([numbers(width, depth)], [numbers(width)])
        for rows in (1, 2, 9, 70):
            yield f"gemm {rows} x {depth} x {width}", digest(*packed.multiply(numbers(rows, depth)))


def attention():
    from labkit.cpu.precision import kv_dtypes
    from labkit.engine import attention

    numbers, heads, kv_heads, head_dim = Numbers(), 10, 2, 80
    for name, lengths in (("decode", [(1, 70), (1, 150)]), ("tiled", [(40, 70), (1, 9)])):
        pools = [numbers(24, 16, kv_heads, head_dim) for _ in range(2)]
        backend = attention.create()
        backend.adopt(*([kv_dtypes.from_float32(pool, "float16")] for pool in pools))
        backend.bind(0, scale=0.1, heads=heads, window=61, softcap=7.0, sinks=numbers(heads))
        counts, contexts = np.array(lengths, np.int32).T
        plan = backend.plan(
            block_tables=numbers.random.permutation(24)[:20].reshape(2, 10).astype(np.int32),
            seq_lens=np.ascontiguousarray(contexts),
            cu_seqlens_q=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        )
        new = [numbers(counts.sum(), n, head_dim) for n in (heads, kv_heads, kv_heads)]
        yield name, digest(backend.forward(0, *new, plan), *backend.keys, *backend.values)


def norms():
    from labkit.cpu.layers import norms

    numbers = Numbers()
    for width in (16, 64, 100, 576, 1000):
        x, weight, bias = numbers(5, width), numbers(width), numbers(width)
        yield f"rms {width}", digest(norms.rms_norm(x, weight, 1e-5))
        yield f"layer {width}", digest(norms.layer_norm(x, weight, bias, 1e-5))


def elementwise():
    from labkit.cpu.layers import activations
    from labkit.cpu.layers.rope import RotaryTable

    numbers = Numbers()
    x, gated = 4 * numbers(3, 1001), numbers(3, 1001)
    yield "swiglu", digest(activations.swiglu(x, gated))
    for name in ("silu", "sigmoid", "gelu_approx", "gelu"):
        yield name, digest(getattr(activations, name)(x))
    heads, positions = numbers(7, 3, 1, 80), np.arange(7, dtype=np.int32) * 11
    for traditional in (False, True):
        table = RotaryTable(np.geomspace(1, 1e-4, 40).astype(np.float32), 1.0)
        yield (
            f"rope {traditional}",
            digest(table.rotate(heads, positions, traditional=traditional, input_scale=1.1)),
        )


def low_precision():
    from labkit.cpu.matmul.packed_linear import PackedLinear
    from labkit.cpu.matmul.quantized_weights import QuantizedMatrix

    numbers = Numbers()
    words = numbers.random.integers(0, 1 << 32, (45, 12), np.uint32)
    scales, biases = (numbers(45, 3).astype(np.float16) for _ in range(2))
    packed = PackedLinear([QuantizedMatrix(words, scales, biases, 4)], [numbers(45)])
    for rows in (1, 2, 9, 30):
        yield f"low precision {rows}", digest(*packed.multiply(numbers(rows, 96)))
    yield "taken", digest(packed.take(np.arange(45)))
    from labkit.cpu.matmul.quantized_weights import BlockMatrix
    from labkit.cpu.precision.gguf_block_arrays import BlockArrays
    from labkit.cpu.precision.gguf_block_formats import BLOCK_FORMATS

    for name in ("iq4_xs", "q3_k"):  # a table, and two groups in a run
        layout = BLOCK_FORMATS[name]
        words = numbers.random.integers(0, 1 << 32, (45, 8 * layout.bits), np.uint32)
        scales = numbers.random.integers(-32, 32, (45, 256 // layout.group_size)).astype(np.int8)
        supers = numbers(45, 1).astype(np.float16)
        arrays = BlockArrays(name, words, {"scales": scales, "super_scales": supers})
        packed = PackedLinear([BlockMatrix(arrays)], [None])
        x = numbers(30, 256)
        yield name, digest(*(packed.multiply(x[:rows])[0] for rows in (1, 2, 9, 30)))


def int8():
    from labkit.cpu.matmul.packed_linear import PackedLinear
    from labkit.cpu.matmul.quantized_weights import QuantizedMatrix

    numbers = Numbers()
    for bits in (4, 8):
        words = numbers.random.integers(0, 1 << 32, (45, 3 * bits), np.uint32)
        scales, biases = (numbers(45, 3).astype(np.float16) for _ in range(2))
        matrix = QuantizedMatrix(words, scales, biases, bits)
        packed = PackedLinear([matrix], [numbers(45)], activations="int8")
        for rows in (1, 4, 9, 30):
            yield f"int8 {bits} {rows}", digest(*packed.multiply(numbers(rows, 96)))


def quantised_kv():
    from labkit.cpu.precision import kv_quantization_reference
    from labkit.engine import attention

    numbers = Numbers()
    for kind in ("int8", "int4"):
        for lengths in ([(1, 70), (1, 9)], [(40, 70), (1, 9)]):
            backend = attention.create()
            pools = (
                kv_quantization_reference.quantize(numbers(12, 16, 2, 64), kind) for _ in range(2)
            )
            backend.adopt(*([pool] for pool in pools))
            backend.bind(0, scale=0.1, heads=6)
            counts, contexts = np.array(lengths, np.int32).T
            plan = backend.plan(
                block_tables=np.arange(10, dtype=np.int32).reshape(2, 5),
                seq_lens=np.ascontiguousarray(contexts),
                cu_seqlens_q=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            )
            new = [numbers(counts.sum(), heads, 64) for heads in (6, 2, 2)]
            out = backend.forward(0, *new, plan)
            yield f"{kind} {lengths}", digest(out, *backend.keys, *backend.values)


KERNELS = {
    "gemm": gemm,
    "attention": attention,
    "norms": norms,
    "elementwise": elementwise,
    "low_precision": low_precision,
    "int8": int8,
    "quantised_kv": quantised_kv,
}

if __name__ == "__main__":
    from labkit.cpu.simd.register_tile_sizes import HOST_REGISTERS

    print(HOST_REGISTERS.lanes)
    for kernels in sys.argv[1:]:
        for name, value in KERNELS[kernels]():
            print(name, value)
