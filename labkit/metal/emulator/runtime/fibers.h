// Fibers: a thread's registers and stack, and the switch from one fiber to another.
#pragma once
#include <stdint.h>
#include <sys/mman.h>

#include <vector>

#include "memory.h"
#include "watchers.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {

constexpr size_t kStack = 256 * 1024;
constexpr size_t kStackGarbage = 4096;  // bytes of a kernel's frame that start as garbage

enum class State : uint8_t { ready, at_operation, at_barrier, done };

struct Fiber {
  Thread thread{};
  State state = State::ready;
  const char* operation = "";
  int line = 0;
  uint32_t barriers = 0;  // number of barriers that this thread has reached
  unsigned char* stack = nullptr;
  void* watched = nullptr;
#if defined(__x86_64__)
  void* sp = nullptr;
#else
  ucontext_t context{};
#endif
};

#if defined(__x86_64__)
// Save the callee-saved registers, switch stacks, restore, return on the other stack.
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");
extern "C" void emulator_switch(void** save, void* load) asm("emulator_switch");
inline void change(Fiber& from, Fiber& to) { emulator_switch(&from.sp, to.sp); }
#else
inline void change(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
#endif

// Make the fiber begin at `entry`.
inline void start(Fiber& fiber, void (*entry)()) {
  fiber.state = State::ready;
  fiber.barriers = 0;
#if defined(__x86_64__)
  auto* top = reinterpret_cast<uint64_t*>(fiber.stack + kPage + kStack);
  *--top = 0;  // keeps the stack aligned as after a call
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  fiber.sp = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack = {fiber.stack + kPage, 0, kStack};
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#endif
}

// Stacks for `count` fibers, a guard page under each.
inline std::vector<Fiber> make_fibers(size_t count) {
  std::vector<Fiber> fibers(count);
  const size_t each = kPage + kStack;
  void* map = mmap(nullptr, each * count, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) fault("memory", "no memory for %zu stacks", count);
  for (size_t i = 0; i < count; ++i) {
    fibers[i].watched = watched_fiber();
    fibers[i].stack = static_cast<unsigned char*>(map) + i * each;
    protect(fibers[i].stack, kPage, PROT_NONE);
  }
  return fibers;
}

}  // namespace emulator
