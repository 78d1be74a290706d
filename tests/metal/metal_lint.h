// Declarations of what the kernels use, for clang's OpenCL C++ mode: its address spaces are
// Metal's, and without the generic one a pointer must say where it points. Nothing runs.
// bfloat is a stand-in for half; min, max and dot are OpenCL's own.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private

typedef half bfloat16_t;
typedef half float16_t;
typedef int int32_t;
typedef uint uint32_t;

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

namespace metal {

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

namespace fast {
float exp2(float);
}
namespace precise {
float tanh(float);
}

template <typename T>
T simd_sum(T);
template <typename T>
T simd_max(T);
template <typename T>
T simd_shuffle(T, ushort);
template <typename T>
T simd_shuffle_xor(T, ushort);

template <typename T, int R, int C>
struct simdgroup_matrix {
  vec<T, 2> elements;
  __private vec<T, 2>& thread_elements() __private;
  __private simdgroup_matrix& operator=(simdgroup_matrix) __private;
};
template <typename T, int R, int C>
simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
template <typename T, int R, int C>
void simdgroup_load(__private simdgroup_matrix<T, R, C>&, const __global T*, ulong, ulong2, bool);
template <typename D, typename A, typename B, typename E>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, 8, 8>&,
                                   __private simdgroup_matrix<A, 8, 8>&,
                                   __private simdgroup_matrix<B, 8, 8>&,
                                   __private simdgroup_matrix<E, 8, 8>&);

}  // namespace metal
