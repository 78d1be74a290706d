// Operations between the lanes of a simdgroup, and barriers.
//
// Each lane shows its value, waits for the others, and computes its own result from theirs:
// one switch per lane and operation. Sums run in lane order.
#pragma once
#include "types.h"

namespace emulator {

// Slots are the emulator's own memory, not the kernel's.
#define EMULATOR_UNWATCHED [[gnu::no_sanitize("thread")]]

template <typename T>
EMULATOR_UNWATCHED inline const Slot* exchange(T value, const char* operation, int line) {
  static_assert(sizeof(T) <= sizeof(Slot), "a lane's value fits its slot");
  __builtin_memcpy(my_slot().bytes, &value, sizeof value);
  return meet(operation, line);
}

template <typename T>
EMULATOR_UNWATCHED inline T value_of(const Slot* slots, int lane, const char* operation, int line) {
  if (lane < 0 || lane >= kLanes || !took_part(lane))
    fault("simd", "%s reads lane %d, which takes no part, line %d", operation, lane, line);
  T value;
  __builtin_memcpy(&value, slots[lane].bytes, sizeof value);
  return value;
}

template <typename T, typename Combine>
inline T reduce(T value, const char* operation, int line, Combine combine) {
  const Slot* slots = exchange(value, operation, line);
  bool first = true;
  T result = value;
  for (int i = 0; i < kLanes; ++i) {
    if (!took_part(i)) continue;
    const T other = value_of<T>(slots, i, operation, line);
    result = first ? other : combine(result, other);
    first = false;
  }
  return result;
}

}  // namespace emulator

namespace metal {

enum class mem_flags { mem_none, mem_device, mem_threadgroup };

inline void threadgroup_barrier(mem_flags, int line = __builtin_LINE()) {
  emulator::threadgroup_meet(line);
}
inline void simdgroup_barrier(mem_flags, int line = __builtin_LINE()) {
  emulator::simdgroup_meet(line);
}

template <typename T>
inline T simd_sum(T value, int line = __builtin_LINE()) {
  return emulator::reduce(value, "simd_sum", line, [](T a, T b) { return static_cast<T>(a + b); });
}
template <typename T>
inline T simd_max(T value, int line = __builtin_LINE()) {
  return emulator::reduce(value, "simd_max", line, [](T a, T b) { return a < b ? b : a; });
}
template <typename T>
inline T simd_min(T value, int line = __builtin_LINE()) {
  return emulator::reduce(value, "simd_min", line, [](T a, T b) { return b < a ? b : a; });
}
template <typename T>
inline T simd_shuffle(T value, ushort lane, int line = __builtin_LINE()) {
  const auto* slots = emulator::exchange(value, "simd_shuffle", line);
  return emulator::value_of<T>(slots, lane, "simd_shuffle", line);
}
template <typename T>
inline T simd_shuffle_xor(T value, ushort mask, int line = __builtin_LINE()) {
  const auto* slots = emulator::exchange(value, "simd_shuffle_xor", line);
  const int lane = static_cast<int>(emulator::lane() ^ mask);
  return emulator::value_of<T>(slots, lane, "simd_shuffle_xor", line);
}
template <typename T>
inline T simd_broadcast(T value, ushort lane, int line = __builtin_LINE()) {
  const auto* slots = emulator::exchange(value, "simd_broadcast", line);
  return emulator::value_of<T>(slots, lane, "simd_broadcast", line);
}

}  // namespace metal
