// Metal's words in CUDA, so that MLX compiles the Metal kernels for NVIDIA GPUs as well.
//
// MLX puts this text and the headers before the kernel that it generates, and compiles unmarked
// functions for the device. The macros must follow all of MLX's includes, which they would change.
//
// A simdgroup is a warp. A simdgroup_matrix has the layout that the tiled kernel assumes on Metal,
// and its products go through shuffles: the tensor cores of a GPU multiply larger matrices.

#ifndef FLT_MAX
#define FLT_MAX 3.402823466e+38f
#endif

using uint = unsigned int;
using ushort = unsigned short;
using ulong = unsigned long;

constexpr unsigned int FULL_WARP = 0xFFFFFFFFu;

// N neighbouring elements, loaded at once.
template <typename T, int N>
struct alignas(sizeof(T) * N) vec {
  T elements[N];
};

struct alignas(16) MetalFloat4 {
  float elements[4];

  MetalFloat4() = default;

  template <typename T>
  __device__ explicit MetalFloat4(const vec<T, 4>& other) {
    for (int i = 0; i < 4; ++i) {
      elements[i] = float(other.elements[i]);
    }
  }

  __device__ float& operator[](int i) { return elements[i]; }
};

__device__ inline float dot(const MetalFloat4& a, const MetalFloat4& b) {
  float sum = 0;
  for (int i = 0; i < 4; ++i) {
    sum += a.elements[i] * b.elements[i];
  }
  return sum;
}

__device__ inline float simd_shuffle(float x, int lane) {
  return __shfl_sync(FULL_WARP, x, lane);
}

__device__ inline float simd_shuffle_xor(float x, int mask) {
  return __shfl_xor_sync(FULL_WARP, x, mask);
}

__device__ inline float simd_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) {
    x += simd_shuffle_xor(x, mask);
  }
  return x;
}

__device__ inline float simd_max(float x) {
  for (int mask = 16; mask > 0; mask /= 2) {
    x = fmaxf(x, simd_shuffle_xor(x, mask));
  }
  return x;
}

namespace metal {}

namespace fast {
__device__ inline float exp2(float x) { return exp2f(x); }
}  // namespace fast

namespace precise {
__device__ inline float tanh(float x) { return tanhf(x); }
}  // namespace precise

// An 8 x 8 matrix, of which each lane holds two neighbouring elements of a row.
template <typename T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  static_assert(ROWS == 8 && COLUMNS == 8, "Metal has 8 x 8 matrices only");

  T elements[2];

  __device__ T* thread_elements() { return elements; }
};

__device__ inline int simdgroup_matrix_row(int lane) { return (lane / 4 & 4) + lane / 2 % 4; }

__device__ inline int simdgroup_matrix_column(int lane) {
  return (lane / 4 & 2) * 2 + lane % 2 * 2;
}

// The lane that holds an element, as its element column % 2.
__device__ inline int simdgroup_matrix_lane(int row, int column) {
  return (row & 4) * 4 + (column & 4) * 2 + (row & 3) * 2 + (column & 2) / 2;
}

template <typename T, int ROWS, int COLUMNS>
__device__ inline simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T value) {
  return {{value, value}};
}

// `origin` is not used: the kernels pass 0.
template <typename T>
__device__ inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const T* from,
                                      size_t stride, int origin, bool transpose) {
  const int lane = threadIdx.x % 32;
  const int row = simdgroup_matrix_row(lane);
  const int column = simdgroup_matrix_column(lane);
  for (int i = 0; i < 2; ++i) {
    matrix.elements[i] =
        transpose ? from[(column + i) * stride + row] : from[row * stride + column + i];
  }
}

// d = a @ b + c
template <typename A, typename B>
__device__ inline void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d,
                                                     const simdgroup_matrix<A, 8, 8>& a,
                                                     const simdgroup_matrix<B, 8, 8>& b,
                                                     const simdgroup_matrix<float, 8, 8>& c) {
  const int lane = threadIdx.x % 32;
  const int row = simdgroup_matrix_row(lane);
  const int column = simdgroup_matrix_column(lane);
  float sums[2] = {c.elements[0], c.elements[1]};
  for (int k = 0; k < 8; ++k) {
    const float left = simd_shuffle(float(a.elements[k % 2]), simdgroup_matrix_lane(row, k));
    const int holder = simdgroup_matrix_lane(k, column);
    for (int i = 0; i < 2; ++i) {
      sums[i] += left * simd_shuffle(float(b.elements[i]), holder);
    }
  }
  d.elements[0] = sums[0];
  d.elements[1] = sums[1];
}

#define device
#define constant
#define thread
#define threadgroup __shared__
#define float4 MetalFloat4
#define ulong2(value) (value)
#define thread_index_in_threadgroup threadIdx.x
#define thread_index_in_simdgroup (threadIdx.x % 32)
#define simdgroup_index_in_threadgroup (threadIdx.x / 32)
#define threadgroup_position_in_grid make_uint3(blockIdx.x, blockIdx.y, blockIdx.z)
#define threadgroups_per_grid make_uint3(gridDim.x, gridDim.y, gridDim.z)
#define threadgroup_barrier(flags) __syncthreads()
#define simdgroup_barrier(flags) __syncwarp()
