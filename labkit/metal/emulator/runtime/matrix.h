// simdgroup_matrix<T, 8, 8>: two elements per lane, in the layout that MLX relies on.
//
// Apple does not document which lane holds which element; see element_row below.
#pragma once
#include "simd.h"

namespace emulator {

inline int element_row(uint lane) { return static_cast<int>((lane / 4 & 4) + lane / 2 % 4); }
inline int element_col(uint lane) { return static_cast<int>((lane / 4 & 2) * 2 + lane % 2 * 2); }
inline int lane_of(int row, int col) {
  return (row & 4) * 4 + (col & 4) * 2 + (row & 3) * 2 + (col & 2) / 2;
}

}  // namespace emulator

namespace metal {

template <typename T, int Rows, int Cols>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Cols == 8, "Metal has 8x8 matrices");
  static constexpr uint MATRIX = 0x8A7F1C53;
  vec<T, 2> e;
  uint tag = MATRIX;  // what lies behind an array of matrices has none
  vec<T, 2>& thread_elements(int line = __builtin_LINE()) {
    if (tag != MATRIX) emulator::fault("bounds", "a matrix behind its array, line %d", line);
    return e;
  }
};

template <typename T, int Rows, int Cols>
inline simdgroup_matrix<T, Rows, Cols> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Cols> m;
  m.e = vec<T, 2>(value);
  return m;
}

template <typename T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* source, ulong stride = 8,
                           ulong2 origin = ulong2(0), bool transpose = false) {
  const ulong row = static_cast<ulong>(emulator::element_row(emulator::lane()));
  const ulong col = static_cast<ulong>(emulator::element_col(emulator::lane()));
  const T* base = source + origin.y * stride + origin.x;
  for (ulong i = 0; i < 2; ++i)
    m.e[static_cast<int>(i)] = transpose ? base[(col + i) * stride + row] : base[row * stride + col + i];
}

// d = a * b + c, in float; elements of a and b are read from the lanes that hold them.
template <typename D, typename A, typename B, typename C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                          const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b,
                                          const simdgroup_matrix<C, 8, 8>& c,
                                          int line = __builtin_LINE()) {
  struct Mine {
    float a[2], b[2];
  };
  const Mine mine = {{static_cast<float>(a.e[0]), static_cast<float>(a.e[1])},
                     {static_cast<float>(b.e[0]), static_cast<float>(b.e[1])}};
  const auto* slots = emulator::exchange(mine, "simdgroup_multiply_accumulate", line);
  const int row = emulator::element_row(emulator::lane());
  const int col = emulator::element_col(emulator::lane());
  float sum[2] = {static_cast<float>(c.e[0]), static_cast<float>(c.e[1])};
  for (int k = 0; k < 8; ++k) {
    const auto left = emulator::value_of<Mine>(slots, emulator::lane_of(row, k), "matrix", line);
    const auto right = emulator::value_of<Mine>(slots, emulator::lane_of(k, col), "matrix", line);
    for (int i = 0; i < 2; ++i) sum[i] += left.a[k & 1] * right.b[i];
  }
  d.e = vec<D, 2>(static_cast<D>(sum[0]), static_cast<D>(sum[1]));
}

}  // namespace metal
