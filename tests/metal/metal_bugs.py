"""Kernel bugs written by hand: one text change each, and the probe that must fail."""

from dataclasses import dataclass

from labkit.metal.kernels import source


@dataclass(frozen=True)
class Bug:
    """Replace ``old``, which occurs once in the file, by ``new``; then ``probe`` must fail."""

    file: str
    old: str
    new: str
    probe: str

    def edits(self):
        text = source(self.file)
        assert text.count(self.old) == 1, f"{self.old!r} occurs {text.count(self.old)} times"
        return {self.file: text.replace(self.old, self.new)}


_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"

BUGS = {
    # --- synchronisation
    "no barrier after the query is staged": Bug(
        "decode", f"{_BARRIER}\n\n  // 3.", "\n  // 3.", "decode"
    ),
    "no barrier between weights and values": Bug(
        "decode", f"    {_SIMD_BARRIER}\n\n    // Values", "\n    // Values", "decode"
    ),
    "no barrier before the merge": Bug(
        "decode",
        f"    {_BARRIER}\n    if (index < HEAD_DIM)",
        "    if (index < HEAD_DIM)",
        "decode",
    ),
    "no barrier between heads' partial sums": Bug(
        "decode", f"{_BARRIER}  // before", "// before", "decode options"
    ),
    "a barrier that half of the threads reach": Bug(
        "decode",
        f"    {_BARRIER}\n    if (index < HEAD_DIM) {{",
        f"    if (index < HEAD_DIM) {{\n      {_BARRIER}",
        "decode",
    ),
    "a simdgroup maximum that some lanes leave out": Bug(
        "decode",
        "max(maximum[h], simd_max(logit[h]))",
        "slot < slot_end ? max(maximum[h], simd_max(logit[h])) : maximum[h]",
        "decode",
    ),
    # --- bounds and indexing
    "causal bound one too far": Bug("common", "+ row + 1", "+ row + 2", "decode"),
    "causal bound one too near": Bug("common", "+ row + 1", "+ row", "tiled"),
    "window one too wide": Bug("common", "end - window", "end - window - 1", "tiled options"),
    "search one past the prefix sums": Bug(
        "resolve",
        "int hi = num_seqs;\n  while (lo < hi) {\n    int mid = (lo + hi + 1) / 2;\n    if (cu",
        "int hi = num_seqs + 1;\n  while (lo < hi) {\n    int mid = (lo + hi + 1) / 2;\n    if (cu",
        "decode",
    ),
    "search that stops one short": Bug(
        "resolve", "cu_seqlens_q[mid] <= token", "cu_seqlens_q[mid] < token", "decode"
    ),
    "ragged Q-blocks not counted": Bug("resolve", "/ BQ + i", "/ BQ", "tiled"),
    "wrong sentinel": Bug("resolve", "seq < 0", "seq < -1", "tiled seq_map"),
    "surplus not left": Bug("resolve", " || row >= rows", "", "tiled"),
    "work plan read with the wrong stride": Bug(
        "resolve", "lookup[2 * unit]", "lookup[unit]", "decode work_plan"
    ),
    "query heads dealt to KV heads in turn": Bug(
        "decode", "first_head / (num_heads / num_kv_heads)", "first_head % num_kv_heads", "decode"
    ),
    "block table row of the neighbour": Bug(
        "decode",
        "size_t(work.seq) * block_tables_shape[1]",
        "size_t(work.seq + 1) * block_tables_shape[1]",
        "decode",
    ),
    "vector load off by one element": Bug("decode", "(key + d)", "(key + d + 1)", "decode"),
    "last dimensions not guarded": Bug(
        "decode",
        "      if (d < HEAD_DIM) {\n        partial",
        "      {\n        partial",
        "decode",
    ),
    "threadgroup memory overrun": Bug(
        "decode",
        "weights[SIMDGROUPS * HEADS * BLOCK_SIZE]",
        "weights[SIMDGROUPS * HEADS * BLOCK_SIZE - 1]",
        "decode",
    ),
    "too much threadgroup memory": Bug(
        "decode", "partial[SIMDGROUPS * HEAD_DIM]", "partial[SIMDGROUPS * 1024]", "decode"
    ),
    "keys not transposed": Bug("tiled", "ulong2(0), true)", "ulong2(0), false)", "tiled"),
    "rows past the sequence stored": Bug(
        "tiled", "if (my_row < rows) {", "if (my_row < rows + 1) {", "tiled"
    ),
    # --- memory that was not written
    "a simdgroup's maximum not published": Bug(
        "decode",
        "    if (lane == 0) {\n      maxima",
        "    if (lane == 0 && group < 7) {\n      maxima",
        "decode",
    ),
    "half of the output not written": Bug(
        "tiled",
        "for (int i = 0; i < 2; ++i) {\n        out",
        "for (int i = 0; i < 1; ++i) {\n        out",
        "tiled",
    ),
    "denominator not cleared": Bug("tiled", "float sum = 0;", "float sum;", "tiled"),
    "accumulator not cleared": Bug("decode", "acc[h * DIMS_PER_LANE + i] = 0;", "", "decode"),
    # --- arithmetic
    "simdgroups merged without their factor": Bug(
        "decode", "sums[g * HEADS + h] * factor", "sums[g * HEADS + h]", "decode"
    ),
    "old values not rescaled": Bug("decode", "acc[h * DIMS_PER_LANE + i] *= factor;", "", "decode"),
    "a fully masked block moves the maximum to 0": Bug(
        "decode",
        "const float factor = fast::exp2(maximum[h] - new_maximum)",
        "if (new_maximum == LOWEST) { maximum[h] = 0; continue; }\n"
        "    const float factor = fast::exp2(maximum[h] - new_maximum)",
        "decode negative",
    ),
    "masked NaN multiplied by 0": Bug(
        "decode", "s < slot_begin ? 0.0f : loaded", "loaded", "decode masking"
    ),
    "masked NaN in an 8x8 product": Bug(
        "tiled",
        "(key >= last.begin && key + 8 <= first.end)",
        "(key + 8 <= first.end)",
        "tiled skipping",
    ),
    "infinity in fast maths": Bug("common", "LOWEST = -FLT_MAX", "LOWEST = -INFINITY", "decode"),
    "row maximum over the wrong lanes": Bug(
        "tiled",
        "simd_shuffle_xor(tile_maximum, ushort(8))",
        "simd_shuffle_xor(tile_maximum, ushort(4))",
        "tiled",
    ),
    "natural exponents taken for base 2": Bug("common", "logit * LOG2E", "logit", "tiled"),
    "softcap without its division": Bug(
        "common", "tanh(logit / softcap)", "tanh(logit)", "decode options"
    ),
    "sink counted in every partition": Bug("decode", "SINKS && !SPLIT", "SINKS", "split"),
    "sink scaled": Bug(
        "tiled",
        "fast::exp2(sinks[head] * LOG2E - top)",
        "fast::exp2(sinks[head] * LOG2E * scale - top)",
        "tiled options",
    ),
    "empty partitions not ignored": Bug(
        "reduce",
        "numerator += partials[at + index] * factor",
        "numerator += partials[at + index]",
        "split",
    ),
    # --- evidence
    "stale stamp": Bug("common", "nonce * 0x9E3779B1u", "7u * 0x9E3779B1u", "decode"),
    "one report row for all": Bug(
        "common", "report[4 * index] = stamp + index", "report[4 * index] = stamp", "tiled"
    ),
    "report of another threadgroup's row": Bug(
        "tiled",
        "(position.z * extent.y + position.y) * extent.x",
        "position.y * extent.x",
        "tiled padded_grid",
    ),
    "blocks not counted": Bug("decode", "total += visited[g]", "total = visited[g]", "decode"),
}
