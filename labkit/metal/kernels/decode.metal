// Decode: one threadgroup per query token and head (or group of adjacent heads).
//
// Grid, in threadgroups: x = head groups, so a threadgroup serves num_heads / x heads, HEADS at
// a time, after one search; y = query tokens (PADDED_GRID: rows of the longest
// sequence; WORK_PLAN: entries); z = KV partitions (PADDED_GRID: sequences * partitions).
// 256 threads form 8 simdgroups. Simdgroup g walks the KV blocks b with b % 8 == g and keeps
// its own online softmax; the eight are merged at the end.
//
// Template: T, OUT (types), HEAD_DIM, BLOCK_SIZE, HEADS (query heads that share one KV head's
// loads; 1: none), RESOLVER, WINDOW, WINDOW_SKIP, SOFTCAP, SINKS, SPLIT.
// Inputs: q [tokens, heads, HEAD_DIM], k_pool and v_pool [blocks, BLOCK_SIZE, kv heads,
// HEAD_DIM], block_tables [seqs, columns], seq_lens, cu_seqlens_q, lookup, sinks, and the
// scalars scale, softcap, window, partitions, nonce.
// Outputs: out [tokens, heads, HEAD_DIM], or when SPLIT [tokens, heads, partitions,
// HEAD_DIM + 2]: the unnormalised sum, the largest logit and the softmax denominator. For
// the report, see write_report.

constexpr int SIMDGROUPS = 8;
constexpr int LANES = 32;
constexpr int LANES_PER_TOKEN = LANES / BLOCK_SIZE;  // lanes that share one key's product
constexpr int DIMS_PER_LANE = (HEAD_DIM + LANES - 1) / LANES;

threadgroup float4 query[HEADS * HEAD_DIM / 4];
threadgroup float weights[SIMDGROUPS * HEADS * BLOCK_SIZE];  // exp2(logit - maximum)
threadgroup float partial[SIMDGROUPS * HEAD_DIM];
threadgroup float maxima[SIMDGROUPS * HEADS];
threadgroup float sums[SIMDGROUPS * HEADS];
threadgroup uint visited[SIMDGROUPS];

const int index = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int group = int(simdgroup_index_in_threadgroup);
const uint3 position = threadgroup_position_in_grid;
const uint3 extent = threadgroups_per_grid;
const uint report_row = (position.z * extent.y + position.y) * extent.x + position.x;
const uint stamp = stamp_of(nonce, 1, RESOLVER);

const int num_heads = q_shape[1];
const int num_kv_heads = k_pool_shape[2];
const int heads = num_heads / int(extent.x);  // of this threadgroup
const int unit_head = int(position.x) * heads;
const int partition = int(position.z) % partitions;

// 1. Find the token's sequence.
const Work work = resolve<RESOLVER, 1>(cu_seqlens_q, lookup, int(seq_lens_shape[0]),
                                       int(position.y), int(position.z) / partitions);
if (work.seq < 0) {
  if (index == 0) {
    write_report(report, report_row, stamp, work.iterations, 0, 1);
  }
  return;
}
const int first_row = cu_seqlens_q[work.seq];
const int token = first_row + work.row;
const Span span = visible_span<WINDOW>(work.row, cu_seqlens_q[work.seq + 1] - first_row,
                                       seq_lens[work.seq], window);

// The KV blocks of this partition, and this lane's share of each.
const int blocks_end = (span.end + BLOCK_SIZE - 1) / BLOCK_SIZE;
const int blocks_begin = WINDOW_SKIP ? span.begin / BLOCK_SIZE : 0;
const int per_partition = (blocks_end - blocks_begin + partitions - 1) / partitions;
const int my_begin = blocks_begin + partition * per_partition;
const int my_end = min(my_begin + per_partition, blocks_end);
const int slot = lane / LANES_PER_TOKEN;  // this lane's key within the block
const int part = lane % LANES_PER_TOKEN;  // this lane's share of the key's dimensions
const int first_block = my_begin + (group - my_begin % SIMDGROUPS + SIMDGROUPS) % SIMDGROUPS;
uint blocks = 0;

for (int first_head = unit_head; first_head < unit_head + heads; first_head += HEADS) {
  const int kv_head = first_head / (num_heads / num_kv_heads);

  // 2. Load the query, once for all simdgroups. A lane stores whole vectors: Metal stores one
  // component by storing the vector that it loaded before, which undoes other lanes' stores.
  for (int i = index; i < HEADS * HEAD_DIM / 4; i += SIMDGROUPS * LANES) {
    const size_t at = (size_t(token) * num_heads + first_head) * HEAD_DIM + 4 * i;
    query[i] = float4(*(const device vec<T, 4>*)(q + at));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // 3. Walk the KV blocks.
  float maximum[HEADS];
  float sum[HEADS];  // of this lane's keys only; the lanes are added up at the end
  float acc[HEADS * DIMS_PER_LANE];  // dimensions lane, lane + 32, ... of the weighted values
  for (int h = 0; h < HEADS; ++h) {
    maximum[h] = LOWEST;
    sum[h] = 0;
    for (int i = 0; i < DIMS_PER_LANE; ++i) {
      acc[h * DIMS_PER_LANE + i] = 0;
    }
  }
  for (int block = first_block; block < my_end; block += SIMDGROUPS) {
    blocks++;
    const size_t block_id = size_t(block_tables[size_t(work.seq) * block_tables_shape[1] + block]);
    const int slot_begin = max(span.begin - block * BLOCK_SIZE, 0);
    const int slot_end = min(span.end - block * BLOCK_SIZE, BLOCK_SIZE);
    const bool visible = slot >= slot_begin && slot < slot_end;

    // Logits: LANES_PER_TOKEN lanes share a key. Slots past the sequence's end are not read.
    float logit[HEADS];
    for (int h = 0; h < HEADS; ++h) {
      logit[h] = 0;
    }
    if (slot < slot_end) {
      const device T* key =
          k_pool + ((block_id * BLOCK_SIZE + slot) * num_kv_heads + kv_head) * HEAD_DIM;
      for (int d = part * 4; d < HEAD_DIM; d += LANES_PER_TOKEN * 4) {
        const float4 k = float4(*(const device vec<T, 4>*)(key + d));
        for (int h = 0; h < HEADS; ++h) {
          logit[h] += dot(query[(h * HEAD_DIM + d) / 4], k);
        }
      }
    }
    for (int h = 0; h < HEADS; ++h) {
      for (int step = LANES_PER_TOKEN / 2; step > 0; step /= 2) {
        logit[h] += simd_shuffle_xor(logit[h], ushort(step));
      }
      logit[h] = visible ? base2_logit<SOFTCAP>(logit[h], scale, softcap) : LOWEST;

      // Online softmax. A block without visible keys does not change the maximum, because its
      // own maximum is LOWEST. The factor is then exp2(0), and every weight is 0.
      const float new_maximum = max(maximum[h], simd_max(logit[h]));
      const float factor = fast::exp2(maximum[h] - new_maximum);
      const float weight = visible ? fast::exp2(logit[h] - new_maximum) : 0.0f;
      maximum[h] = new_maximum;
      sum[h] = sum[h] * factor + (part == 0 ? weight : 0.0f);
      for (int i = 0; i < DIMS_PER_LANE; ++i) {
        acc[h * DIMS_PER_LANE + i] *= factor;
      }
      if (part == 0) {
        weights[(group * HEADS + h) * BLOCK_SIZE + slot] = weight;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    // Values: each lane has some dimensions, and all heads share a load. Without WINDOW_SKIP,
    // masked ones are read, too. They may be NaN, and 0 * NaN is NaN, so they become 0.
    for (int s = WINDOW_SKIP ? slot_begin : 0; s < slot_end; ++s) {
      const device T* value =
          v_pool + ((block_id * BLOCK_SIZE + s) * num_kv_heads + kv_head) * HEAD_DIM;
      for (int i = 0; i < DIMS_PER_LANE; ++i) {
        const int d = lane + i * LANES;
        if (d < HEAD_DIM) {
          const float loaded = float(value[d]);
          const float v = s < slot_begin ? 0.0f : loaded;
          for (int h = 0; h < HEADS; ++h) {
            acc[h * DIMS_PER_LANE + i] += weights[(group * HEADS + h) * BLOCK_SIZE + s] * v;
          }
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);  // before the next block's weights
  }

  // 4. Merge the eight simdgroups, head by head.
  for (int h = 0; h < HEADS; ++h) {
    const float total = simd_sum(sum[h]);
    if (lane == 0) {
      maxima[group * HEADS + h] = maximum[h];
      sums[group * HEADS + h] = total;
    }
  }
  if (lane == 0) {
    visited[group] = blocks;
  }
  for (int h = 0; h < HEADS; ++h) {
    const int head = first_head + h;
    for (int i = 0; i < DIMS_PER_LANE; ++i) {
      const int d = lane + i * LANES;
      if (d < HEAD_DIM) {
        partial[group * HEAD_DIM + d] = acc[h * DIMS_PER_LANE + i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (index < HEAD_DIM) {
      float top = LOWEST;
      for (int g = 0; g < SIMDGROUPS; ++g) {
        top = max(top, maxima[g * HEADS + h]);
      }
      float denominator = 0;
      if (SINKS && !SPLIT) {  // a sink counts once per query: with SPLIT, reduce.metal adds it
        top = max(top, sinks[head] * LOG2E);
        denominator = fast::exp2(sinks[head] * LOG2E - top);
      }
      float numerator = 0;
      for (int g = 0; g < SIMDGROUPS; ++g) {
        const float factor = fast::exp2(maxima[g * HEADS + h] - top);
        denominator += sums[g * HEADS + h] * factor;
        numerator += partial[g * HEAD_DIM + index] * factor;
      }
      const size_t row = size_t(token) * num_heads + head;
      if (SPLIT) {
        const size_t at = (row * partitions + partition) * (HEAD_DIM + 2);
        out[at + index] = OUT(numerator);
        if (index == 0) {
          out[at + HEAD_DIM] = OUT(top);
          out[at + HEAD_DIM + 1] = OUT(denominator);
        }
      } else {
        out[row * HEAD_DIM + index] = OUT(numerator / denominator);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // before the next head's partial sums
  }
}
if (index == 0) {
  uint total = 0;
  for (int g = 0; g < SIMDGROUPS; ++g) {
    total += visited[g];
  }
  write_report(report, report_row, stamp, work.iterations, total, 0);
}
