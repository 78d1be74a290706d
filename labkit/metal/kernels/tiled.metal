// Tiled (FlashAttention-2 style): one threadgroup per Q-block of 32 query rows and head (or
// group of adjacent heads).
//
// Grid, in threadgroups: x = head groups, so a threadgroup serves num_heads / x heads, one by
// one, after one search; y = tokens / 32 + sequences Q-blocks, of which surplus
// ones exit (PADDED_GRID: Q-blocks of the longest sequence; WORK_PLAN: entries);
// z = 1 (PADDED_GRID: sequences). 128 threads form 4 simdgroups of 8 rows each. Queries,
// sums and outputs stay in registers as 8x8 matrices; a tile is 32 keys, four 8x8 products.
// K and V tiles are loaded from the pool in place: 8 keys never cross a KV block.
//
// A lane holds two neighbouring elements of one row of a matrix. Apple does not document
// which ones; the layout here is the one that MLX's own kernels rely on.
//
// Template: T, HEAD_DIM, BLOCK_SIZE, RESOLVER, WINDOW, WINDOW_SKIP, SOFTCAP, SINKS.
// Inputs as in decode.metal, without partitions. Outputs: out [tokens, heads, HEAD_DIM],
// report.

constexpr int BQ = 32;
constexpr int TILE = 32;  // keys
constexpr int SLABS = HEAD_DIM / 8;

const int lane = int(thread_index_in_simdgroup);
const int group = int(simdgroup_index_in_threadgroup);
const uint3 position = threadgroup_position_in_grid;
const uint3 extent = threadgroups_per_grid;
const uint report_row = (position.z * extent.y + position.y) * extent.x + position.x;
const uint stamp = stamp_of(nonce, 2, RESOLVER);
const bool reporter = thread_index_in_threadgroup == 0;

const int num_heads = q_shape[1];
const int num_kv_heads = k_pool_shape[2];
const int heads = num_heads / int(extent.x);  // of this threadgroup
const int unit_head = int(position.x) * heads;

// 1. Find the Q-block's sequence.
const Work work = resolve<RESOLVER, BQ>(cu_seqlens_q, lookup, int(seq_lens_shape[0]),
                                        int(position.y), int(position.z));
if (work.seq < 0) {
  if (reporter) {
    write_report(report, report_row, stamp, work.iterations, 0, 1);
  }
  return;
}
const int first_token = cu_seqlens_q[work.seq];
const int rows = cu_seqlens_q[work.seq + 1] - first_token;
const int length = seq_lens[work.seq];
const int first_row = work.row + group * 8;  // of this simdgroup
if (first_row >= rows) {
  return;  // no barrier below waits for this simdgroup
}
const int last_row = min(first_row + 7, rows - 1);
const int element_row = (lane / 4 & 4) + lane / 2 % 4;
const int element_col = (lane / 4 & 2) * 2 + lane % 2 * 2;
const int my_row = first_row + element_row;

// 2. Find the keys that are visible to this lane's row, to the first and the last row of the
// simdgroup, and to the threadgroup. Rows past the end repeat the last and are not stored.
const Span mine = visible_span<WINDOW>(min(my_row, rows - 1), rows, length, window);
const Span first = visible_span<WINDOW>(first_row, rows, length, window);
const Span last = visible_span<WINDOW>(last_row, rows, length, window);
const Span top_row = visible_span<WINDOW>(work.row, rows, length, window);
const Span end_row = visible_span<WINDOW>(min(work.row + BQ, rows) - 1, rows, length, window);
const int walk_begin = WINDOW_SKIP ? top_row.begin / BLOCK_SIZE * BLOCK_SIZE : 0;
const int my_begin = WINDOW_SKIP ? first.begin : 0;

uint blocks = 0;
for (int head = unit_head; head < unit_head + heads; ++head) {
  const int kv_head = head / (num_heads / num_kv_heads);

  // 3. Load the queries into registers.
  simdgroup_matrix<T, 8, 8> queries[SLABS];
  simdgroup_matrix<float, 8, 8> acc[SLABS];
  for (int d = 0; d < SLABS; ++d) {
    acc[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int i = 0; i < 2; ++i) {
      const size_t at = (size_t(first_token + my_row) * num_heads + head) * HEAD_DIM;
      queries[d].thread_elements()[i] = my_row < rows ? q[at + d * 8 + element_col + i] : T(0.0f);
    }
  }
  float maximum = LOWEST;
  float sum = 0;  // of this lane's columns only; the row's lanes are added up at the end

  // 4. Walk the keys, a tile at a time.
  for (int tile = walk_begin / TILE * TILE; tile < end_row.end; tile += TILE) {
    simdgroup_matrix<float, 8, 8> scores[TILE / 8];
    size_t rows_of_pool[TILE / 8];
    float tile_maximum = LOWEST;
    for (int j = 0; j < TILE / 8; ++j) {
      const int key = tile + j * 8;
      if (key % BLOCK_SIZE == 0 && key >= walk_begin && key < end_row.end) {
        blocks++;
      }
      scores[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      if (key + 8 <= my_begin || key >= last.end) {
        continue;  // no row of this simdgroup sees any of these keys
      }
      const size_t block_id =
          size_t(block_tables[size_t(work.seq) * block_tables_shape[1] + key / BLOCK_SIZE]);
      rows_of_pool[j] = ((block_id * BLOCK_SIZE + key % BLOCK_SIZE) * num_kv_heads + kv_head);
      simdgroup_matrix<T, 8, 8> k;
      for (int d = 0; d < SLABS; ++d) {
        simdgroup_load(k, k_pool + rows_of_pool[j] * HEAD_DIM + d * 8,
                       ulong(num_kv_heads * HEAD_DIM), ulong2(0), true);
        simdgroup_multiply_accumulate(scores[j], queries[d], k, scores[j]);
      }
      for (int i = 0; i < 2; ++i) {
        const int at = key + element_col + i;
        if (at >= mine.begin && at < mine.end) {
          const float logit = base2_logit<SOFTCAP>(scores[j].thread_elements()[i], scale, softcap);
          scores[j].thread_elements()[i] = logit;
          tile_maximum = max(tile_maximum, logit);
        }
      }
    }

    // Online softmax by rows; a row is held by the four lanes that differ in bits 0 and 3.
    // A tile without visible keys does not change the maximum: the factor is exp2(0).
    tile_maximum = max(tile_maximum, simd_shuffle_xor(tile_maximum, ushort(1)));
    tile_maximum = max(tile_maximum, simd_shuffle_xor(tile_maximum, ushort(8)));
    const float new_maximum = max(maximum, tile_maximum);
    const float factor = fast::exp2(maximum - new_maximum);
    maximum = new_maximum;
    sum *= factor;
    for (int d = 0; d < SLABS; ++d) {
      acc[d].thread_elements()[0] *= factor;
      acc[d].thread_elements()[1] *= factor;
    }
    for (int j = 0; j < TILE / 8; ++j) {
      const int key = tile + j * 8;
      if (key + 8 <= my_begin || key >= last.end) {
        continue;
      }
      for (int i = 0; i < 2; ++i) {
        const int at = key + element_col + i;
        const bool visible = at >= mine.begin && at < mine.end;
        const float weight =
            visible ? fast::exp2(scores[j].thread_elements()[i] - maximum) : 0.0f;
        scores[j].thread_elements()[i] = weight;
        sum += weight;
      }
      const device T* values = v_pool + rows_of_pool[j] * HEAD_DIM;
      const size_t stride = size_t(num_kv_heads) * HEAD_DIM;
      // Without WINDOW_SKIP, values before the window of every row are read, too, and become 0.
      const bool masked = !WINDOW_SKIP && key + 8 <= first.begin;
      if (masked || (key >= last.begin && key + 8 <= first.end)) {  // all eight, or none
        simdgroup_matrix<T, 8, 8> v;
        for (int d = 0; d < SLABS; ++d) {
          simdgroup_load(v, values + d * 8, ulong(stride), ulong2(0), false);
          for (int i = 0; i < 2; ++i) {
            v.thread_elements()[i] = masked ? T(0.0f) : v.thread_elements()[i];
          }
          simdgroup_multiply_accumulate(acc[d], scores[j], v, acc[d]);
        }
      } else {
        // At the mask's edge, some rows do not see every value. A masked value may be NaN, and
        // 0 * NaN is NaN, so values are added one by one and masked ones are skipped.
        for (int t = 0; t < 8; ++t) {
          const int holder =
              (element_row & 4) * 4 + (t & 4) * 2 + (element_row & 3) * 2 + (t & 2) / 2;
          const float weight = simd_shuffle(scores[j].thread_elements()[t & 1], ushort(holder));
          if (key + t >= mine.begin && key + t < mine.end) {
            for (int d = 0; d < SLABS; ++d) {
              const size_t at = t * stride + d * 8 + element_col;
              acc[d].thread_elements()[0] += weight * float(values[at]);
              acc[d].thread_elements()[1] += weight * float(values[at + 1]);
            }
          }
        }
      }
    }
  }

  // 5. Normalise and store.
  sum += simd_shuffle_xor(sum, ushort(1));
  sum += simd_shuffle_xor(sum, ushort(8));
  float factor = 1;
  if (SINKS) {
    const float top = max(maximum, sinks[head] * LOG2E);
    factor = fast::exp2(maximum - top);
    sum = sum * factor + fast::exp2(sinks[head] * LOG2E - top);
  }
  if (my_row < rows) {
    const size_t at = (size_t(first_token + my_row) * num_heads + head) * HEAD_DIM;
    for (int d = 0; d < SLABS; ++d) {
      for (int i = 0; i < 2; ++i) {
        out[at + d * 8 + element_col + i] = T(acc[d].thread_elements()[i] * factor / sum);
      }
    }
  }
}
if (reporter) {
  write_report(report, report_row, stamp, work.iterations, blocks, 0);
}
