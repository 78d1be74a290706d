// Split-KV, second step: merge the partitions of one query token and head.
//
// Grid, in threadgroups: x = heads, y = query tokens. Threads own dimensions.
// Template: T, HEAD_DIM, RESOLVER (only for the stamp), SINKS.
// Inputs: partials float [tokens, heads, partitions, HEAD_DIM + 2] (sum, maximum,
// denominator; see decode.metal), sinks, and the scalars partitions and nonce.
// Outputs: out [tokens, heads, HEAD_DIM], report.
// The sink counts once per query, so it is added here and not in the partitions.

const int index = int(thread_index_in_threadgroup);
const uint3 position = threadgroup_position_in_grid;
const uint report_row = position.y * threadgroups_per_grid.x + position.x;
const size_t row = report_row;

float top = SINKS ? sinks[position.x] * LOG2E : LOWEST;
for (int p = 0; p < partitions; ++p) {
  top = max(top, partials[(row * partitions + p) * (HEAD_DIM + 2) + HEAD_DIM]);
}
float denominator = SINKS ? fast::exp2(sinks[position.x] * LOG2E - top) : 0.0f;
float numerator = 0;
for (int p = 0; p < partitions; ++p) {
  const size_t at = (row * partitions + p) * (HEAD_DIM + 2);
  const float factor = fast::exp2(partials[at + HEAD_DIM] - top);
  denominator += partials[at + HEAD_DIM + 1] * factor;
  if (index < HEAD_DIM) {
    numerator += partials[at + index] * factor;
  }
}
if (index < HEAD_DIM) {
  out[row * HEAD_DIM + index] = T(numerator / denominator);
}
if (index == 0) {
  write_report(report, report_row, stamp_of(nonce, 4, RESOLVER), 0, 0, 0);
}
