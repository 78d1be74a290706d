// What the attention kernels share: the mask, the logits, the report.
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

// Query `row` of `rows` sits at position length - rows + row and sees itself and what is
// before it, under a window the last `window` of those. A wrong map must not lead past the
// sequence, so the end stays within it.
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

// Who wrote it: kernel and resolver are mixed in as compiled, the nonce is the launch's.
inline uint stamp_of(uint nonce, uint kernel_id, uint resolver_id) {
  return nonce * 0x9E3779B1u + kernel_id * 0x85EBCA6Bu + resolver_id * 0xC2B2AE35u;
}

// One row of the report per threadgroup. Row i's stamp is offset by i: no row may stand in
// for another.
inline void write_report(device uint* report, uint index, uint stamp, uint iterations,
                         uint kv_blocks, uint surplus) {
  report[4 * index] = stamp + index;
  report[4 * index + 1] = iterations;
  report[4 * index + 2] = kv_blocks;
  report[4 * index + 3] = surplus;
}
