// The part of the Metal Shading Language's types and maths that the kernels use, in C++17.
//
// Address spaces expand to nothing. Conversions are stricter than Metal's where that costs
// nothing: float to half precision must be explicit.
#pragma once
#include "runtime.h"

#define device
#define constant
#define thread
#define threadgroup
#define kernel
#define METAL_FUNC inline

#define FLT_MAX __FLT_MAX__
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef _Float16 half;  // g++ rounds after every operation
typedef half float16_t;

// bfloat16: the upper half of a float, rounded to nearest even.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float value) {
    uint32_t u;
    __builtin_memcpy(&u, &value, 4);
    const bool nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    bits = static_cast<uint16_t>(nan ? (u >> 16 | 0x40u) : (u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
  }
  operator float() const {
    const uint32_t u = static_cast<uint32_t>(bits) << 16;
    float value;
    __builtin_memcpy(&value, &u, 4);
    return value;
  }
};
typedef bfloat bfloat16_t;

namespace metal {

template <typename T, int N>
struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec {
  T e[N];
  vec() = default;
  explicit vec(T value) {
    for (int i = 0; i < N; ++i) e[i] = value;
  }
  template <typename... U, typename = decltype(sizeof...(U))>
  vec(T a, T b, U... rest) : e{a, b, static_cast<T>(rest)...} {
    static_assert(sizeof...(rest) + 2 == N, "as many values as components");
  }
  template <typename U>
  explicit vec(const vec<U, N>& other) {
    for (int i = 0; i < N; ++i) e[i] = static_cast<T>(other.e[i]);
  }
  T& operator[](int i) { return e[i]; }
  const T& operator[](int i) const { return e[i]; }
};

// A position in the grid, whose components are named x, y and z.
template <>
struct vec<uint, 3> {
  uint x, y, z;
  vec() = default;
  vec(uint a, uint b, uint c) : x(a), y(b), z(c) {}
  vec(const emulator::Index& i) : x(i.x), y(i.y), z(i.z) {}
};
template <>
struct vec<ulong, 2> {
  ulong x, y;
  vec() = default;
  vec(ulong a) : x(a), y(a) {}
  vec(ulong a, ulong b) : x(a), y(b) {}
};

#define EMULATOR_VEC_OPERATOR(op)                                              \
  template <typename T, int N>                                                 \
  inline vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {       \
    vec<T, N> r;                                                               \
    for (int i = 0; i < N; ++i) r.e[i] = a.e[i] op b.e[i];                     \
    return r;                                                                  \
  }                                                                            \
  template <typename T, int N>                                                 \
  inline vec<T, N> operator op(const vec<T, N>& a, T b) {                      \
    return a op vec<T, N>(b);                                                  \
  }
EMULATOR_VEC_OPERATOR(+)
EMULATOR_VEC_OPERATOR(-)
EMULATOR_VEC_OPERATOR(*)
#undef EMULATOR_VEC_OPERATOR

template <int N>
inline float dot(const vec<float, N>& a, const vec<float, N>& b) {
  float sum = a.e[0] * b.e[0];
  for (int i = 1; i < N; ++i) sum += a.e[i] * b.e[i];
  return sum;
}

// Overloads, not templates: mixed types are ambiguous, as in Metal.
#define EMULATOR_MIN_MAX(T)                                \
  inline T min(T a, T b) { return b < a ? b : a; }         \
  inline T max(T a, T b) { return a < b ? b : a; }         \
  inline T clamp(T x, T a, T b) { return min(max(x, a), b); }
EMULATOR_MIN_MAX(int)
EMULATOR_MIN_MAX(uint)
EMULATOR_MIN_MAX(long)
EMULATOR_MIN_MAX(ulong)
#undef EMULATOR_MIN_MAX
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float abs(float a) { return __builtin_fabsf(a); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

namespace precise {
inline float exp2(float x) { return __builtin_exp2f(x); }
inline float exp(float x) { return __builtin_expf(x); }
inline float log2(float x) { return __builtin_log2f(x); }
inline float tanh(float x) { return __builtin_tanhf(x); }
}  // namespace precise

// Fast maths assumes finite arguments, so an infinity or a NaN is a fault here.
namespace fast {
inline float finite(float x, const char* function, int line) {
  if (!__builtin_isfinite(x))
    emulator::fault("fast-math", "%s(%g), line %d", function, static_cast<double>(x), line);
  return x;
}
#define EMULATOR_FAST(f)                                    \
  inline float f(float x, int line = __builtin_LINE()) {    \
    return precise::f(finite(x, "fast::" #f, line));        \
  }
EMULATOR_FAST(exp2)
EMULATOR_FAST(exp)
EMULATOR_FAST(log2)
EMULATOR_FAST(tanh)
#undef EMULATOR_FAST
}  // namespace fast

}  // namespace metal

namespace emulator {

// A vector of a threadgroup array: components can be read, but only the whole can be stored. Metal
// stores one component by storing the vector that it loaded before, so threads that store
// components of one vector undo each other's stores.
template <typename T>
struct SharedElement {
  using type = T;
};
template <typename T, int N>
struct SharedElement<metal::vec<T, N>> {
  struct type : metal::vec<T, N> {
    using metal::vec<T, N>::operator=;
    const T& operator[](int i) const { return this->e[i]; }
  };
};
template <typename T>
using Element = typename SharedElement<T>::type;

}  // namespace emulator

using metal::vec;
typedef vec<float, 2> float2;
typedef vec<float, 4> float4;
typedef vec<half, 4> half4;
typedef vec<uint, 3> uint3;
typedef vec<ulong, 2> ulong2;
