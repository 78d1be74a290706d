// Annotations for ThreadSanitizer: which fiber runs, and which operations order memory (only
// barriers do). They do nothing in a kernel that is built without ThreadSanitizer.
#pragma once

extern "C" {
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* key);
[[gnu::weak]] void __tsan_release(void* key);
}

namespace emulator {

inline void* watched_home() {
  return __tsan_get_current_fiber ? __tsan_get_current_fiber() : nullptr;
}
inline void* watched_fiber() { return __tsan_create_fiber ? __tsan_create_fiber(0) : nullptr; }
inline void watch_switch(void* fiber) {
  constexpr unsigned kOrdersNothing = 1;
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(fiber, kOrdersNothing);
}
// Operations before publish(key) are ordered before operations after observe(key).
inline void publish(void* key) {
  if (__tsan_release) __tsan_release(key);
}
inline void observe(void* key) {
  if (__tsan_acquire) __tsan_acquire(key);
}

}  // namespace emulator
