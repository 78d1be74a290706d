"""Digests of the CPU kernels' results, to be compared between processes."""

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
    from labkit.engine.cpu.linear import PackedWeights

    numbers = Numbers()
    for depth, width in ((96, 161), (33, 5)):
        packed = PackedWeights([numbers(width, depth)], [numbers(width)])
        for rows in (1, 2, 9, 70):
            yield f"gemm {rows} x {depth} x {width}", digest(*packed.multiply(numbers(rows, depth)))


def attention():
    from labkit.engine import attention
    from labkit.engine.attention import elements

    numbers, heads, kv_heads, head_dim = Numbers(), 10, 2, 80
    for name, lengths in (("decode", [(1, 70), (1, 150)]), ("tiled", [(40, 70), (1, 9)])):
        pools = [numbers(24, 16, kv_heads, head_dim) for _ in range(2)]
        backend = attention.create()
        backend.adopt(*([elements.rounded(pool, "float16")] for pool in pools))
        backend.bind(0, scale=0.1, heads=heads, window=61, softcap=7.0, sinks=numbers(heads))
        counts, contexts = np.array(lengths, np.int32).T
        plan = backend.plan(
            block_tables=numbers.random.permutation(24)[:20].reshape(2, 10).astype(np.int32),
            seq_lens=np.ascontiguousarray(contexts),
            cu_seqlens_q=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        )
        new = [numbers(counts.sum(), n, head_dim) for n in (heads, kv_heads, kv_heads)]
        yield name, digest(backend.forward(0, *new, plan), *backend.keys, *backend.values)


if __name__ == "__main__":
    from labkit.engine.cpu.registers import HOST

    print(HOST.lanes)
    for kernels in sys.argv[1:]:
        for name, value in {"gemm": gemm, "attention": attention}[kernels]():
            print(name, value)
