"""Equivalent mutants: they behave like the original; by reason."""

# ruff: noqa: E501 (lines of the kernels)
# {reason: {(file, old line): [new line]}}
SURVIVORS = {
    "Binary search is the default branch of the resolvers; its number is never compared.": {
        ("resolve", "BINARY_SEARCH = 1,"): ["BINARY_SEARCH = 2,", "BINARY_SEARCH = 0,"],
    },
    "Any negative sequence means surplus, and a surplus threadgroup's row is not read.": {
        ("resolve", "return {seq, 0, iterations};"): ["return {seq, 1, iterations};"],
        ("resolve", "seq = -1;"): ["seq = -2;"],
    },
    "More memory or iterations than needed; the comparison inside guards them.": {
        ("decode", "constexpr int DIMS_PER_LANE = (HEAD_DIM + LANES - 1) / LANES;"): [
            "constexpr int DIMS_PER_LANE = (HEAD_DIM + LANES - 2) / LANES;",
            "constexpr int DIMS_PER_LANE = (HEAD_DIM + LANES - 0) / LANES;",
            "constexpr int DIMS_PER_LANE = (HEAD_DIM + LANES + 1) / LANES;",
        ],
        ("decode", "threadgroup float4 query[HEADS * HEAD_DIM / 4];"): [
            "threadgroup float4 query[HEADS * HEAD_DIM / 3];",
        ],
        ("decode", "for (int i = 0; i < DIMS_PER_LANE; ++i) {"): [
            "for (int i = 0; i <= DIMS_PER_LANE; ++i) {",
        ],
        ("tiled", "simdgroup_matrix<float, 8, 8> scores[TILE / 8];"): [
            "simdgroup_matrix<float, 8, 8> scores[TILE / 7];",
        ],
        ("tiled", "size_t rows_of_pool[TILE / 8];"): ["size_t rows_of_pool[TILE / 7];"],
        ("tiled", "for (int j = 0; j < TILE / 8; ++j) {"): ["for (int j = 0; j < TILE / 7; ++j) {"],
    },
    "One thread writes a value that every thread of its group has; any thread will do.": {
        ("decode", "if (index == 0) {"): ["if (index == 1) {"],
        ("decode", "if (lane == 0) {"): ["if (lane == 1) {"],
        ("tiled", "const bool reporter = thread_index_in_threadgroup == 0;"): [
            "const bool reporter = thread_index_in_threadgroup == 1;",
        ],
        ("reduce", "if (index == 0) {"): ["if (index == 1) {"],
    },
    "Partitions of another size still cover all blocks.": {
        (
            "decode",
            "const int per_partition = (blocks_end - blocks_begin + partitions - 1) / partitions;",
        ): [
            "const int per_partition = (blocks_end - blocks_begin + partitions - 0) / partitions;",
            "const int per_partition = (blocks_end + blocks_begin + partitions - 1) / partitions;",
            "const int per_partition = (blocks_end - blocks_begin + partitions + 1) / partitions;",
        ],
    },
    "The initial state is multiplied by exp2(LOWEST - maximum), which is 0.": {
        ("decode", "sum[h] = 0;"): ["sum[h] = 1;"],
        ("decode", "acc[h * DIMS_PER_LANE + i] = 0;"): ["acc[h * DIMS_PER_LANE + i] = 1;"],
        ("tiled", "float sum = 0;"): ["float sum = 1;"],
    },
    "One more key of the same block is read, and then masked.": {
        ("decode", "if (slot < slot_end) {"): ["if (slot <= slot_end) {"],
    },
    "Rows and keys past the end are computed, masked and not stored, or a tile has no visible key.": {
        ("tiled", "if (first_row >= rows) {"): ["if (first_row > rows) {"],
        ("tiled", "const int last_row = min(first_row + 7, rows - 1);"): [
            "const int last_row = min(first_row + 8, rows - 1);",
            "const int last_row = min(first_row + 7, rows - 0);",
            "const int last_row = min(first_row + 7, rows + 1);",
        ],
        (
            "tiled",
            "const Span mine = visible_span<WINDOW>(min(my_row, rows - 1), rows, length, window);",
        ): [
            "const Span mine = visible_span<WINDOW>(min(my_row, rows - 0), rows, length, window);",
            "const Span mine = visible_span<WINDOW>(min(my_row, rows + 1), rows, length, window);",
        ],
        ("tiled", "const int my_begin = WINDOW_SKIP ? first.begin : 0;"): [
            "const int my_begin = WINDOW_SKIP ? first.begin : 1;",
        ],
        (
            "tiled",
            "for (int tile = walk_begin / TILE * TILE; tile < end_row.end; tile += TILE) {",
        ): [
            "for (int tile = walk_begin / TILE * TILE; tile <= end_row.end; tile += TILE) {",
        ],
        ("tiled", "if (key + 8 <= my_begin || key >= last.end) {"): [
            "if (key + 8 < my_begin || key >= last.end) {",
            "if (key + 8 <= my_begin || key > last.end) {",
            "if (key + 9 <= my_begin || key >= last.end) {",
        ],
    },
    "The other lane has the same value: bit 0 was merged before, and (t & 3) / 2 equals (t & 2) / 2.": {
        (
            "tiled",
            "tile_maximum = max(tile_maximum, simd_shuffle_xor(tile_maximum, ushort(8)));",
        ): [
            "tile_maximum = max(tile_maximum, simd_shuffle_xor(tile_maximum, ushort(9)));",
        ],
        ("tiled", "(element_row & 4) * 4 + (t & 4) * 2 + (element_row & 3) * 2 + (t & 2) / 2;"): [
            "(element_row & 4) * 4 + (t & 4) * 2 + (element_row & 3) * 2 + (t & 3) / 2;",
        ],
        ("tiled", "sum += simd_shuffle_xor(sum, ushort(8));"): [
            "sum += simd_shuffle_xor(sum, ushort(9));",
        ],
    },
    "A tile that all rows see, or none, is computed element by element: slower, equal results.": {
        ("tiled", "const bool masked = !WINDOW_SKIP && key + 8 <= first.begin;"): [
            "const bool masked = !WINDOW_SKIP && key + 8 < first.begin;",
            "const bool masked = !WINDOW_SKIP && key + 9 <= first.begin;",
        ],
        ("tiled", "if (masked || (key >= last.begin && key + 8 <= first.end)) {"): [
            "if (masked && (key >= last.begin && key + 8 <= first.end)) {",
            "if (masked || (key >= last.begin && key + 8 < first.end)) {",
            "if (masked || (key > last.begin && key + 8 <= first.end)) {",
            "if (masked || (key >= last.begin && key + 9 <= first.end)) {",
        ],
    },
    "The thread past the last dimension computes a sum that it does not store.": {
        ("reduce", "if (index < HEAD_DIM) {"): ["if (index <= HEAD_DIM) {"],
    },
    "Of the second kernel's report, only the stamps are read: it has no search and visits no block.": {
        ("reduce", "write_report(report, report_row, stamp_of(nonce, 4, RESOLVER), 0, 0, 0);"): [
            "write_report(report, report_row, stamp_of(nonce, 4, RESOLVER), 1, 0, 0);",
            "write_report(report, report_row, stamp_of(nonce, 4, RESOLVER), 0, 1, 0);",
            "write_report(report, report_row, stamp_of(nonce, 4, RESOLVER), 0, 0, 1);",
        ],
    },
}
