// Functions that all attention kernels share: the mask, the logits, the report.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

constant constexpr float LOG2E = 1.44269504f;

// Lowest finite value. The softmax state starts from it instead of -INFINITY: no infinity
// enters fast maths, and exp2(LOWEST - x) is an exact 0.
constant constexpr float LOWEST = -FLT_MAX;

// The keys that one query sees: positions begin .. end - 1.
struct Span {
  int begin;
  int end;
};

// Query `row` of `rows` is at position length - rows + row. It sees the keys up to its own
// position; with a window, only the last `window` of them. The end is limited to `length`,
// because a wrong map may give a row outside the sequence.
template <bool WINDOW>
inline Span visible_span(int row, int rows, int length, int window) {
  const int end = min(length - rows + row + 1, length);
  return {WINDOW ? max(end - window, 0) : 0, end};
}

// A logit in base 2: exp2(x * log2(e)) is exp(x).
template <bool SOFTCAP>
inline float base2_logit(float product, float scale, float softcap) {
  float logit = product * scale;
  if (SOFTCAP) {
    logit = softcap * precise::tanh(logit / softcap);
  }
  return logit * LOG2E;
}

// The stamp of a launch: its nonce, mixed with the ids that are compiled into the kernel.
inline uint stamp_of(uint nonce, uint kernel_id, uint resolver_id) {
  return nonce * 0x9E3779B1u + kernel_id * 0x85EBCA6Bu + resolver_id * 0xC2B2AE35u;
}

// Write the threadgroup's row of the report. Row i has the launch's stamp plus i, so that a
// row that was copied from another one is detected.
inline void write_report(device uint* report, uint index, uint stamp, uint iterations,
                         uint kv_blocks, uint surplus) {
  report[4 * index] = stamp + index;
  report[4 * index + 1] = iterations;
  report[4 * index + 2] = kv_blocks;
  report[4 * index + 3] = surplus;
}
