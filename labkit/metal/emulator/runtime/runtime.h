// The interface between a compiled kernel and the machine that runs it.
//
// Every thread of a threadgroup is a fiber. Fibers run one at a time. A simdgroup runs in
// rounds: each live lane runs, in the schedule's order, until it reaches a simdgroup operation,
// a threadgroup barrier or its end. After a round all live lanes must be at the same place.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace emulator {

constexpr int kLanes = 32;
constexpr size_t kThreadgroupMemory = 32 * 1024;

struct Index {
  uint32_t x, y, z;
};

// The attributes that MLX binds to a kernel's parameters.
struct Thread {
  Index position_in_grid, position_in_group, group, group_size, groups, grid;
  uint32_t index_in_group, lane, simdgroup, simdgroups;
};

// The values that a lane shows to the other lanes of its simdgroup at an operation.
struct alignas(16) Slot {
  unsigned char bytes[32];
};

// The slot of the running lane for its next operation.
Slot& my_slot();

// Wait for the other live lanes of the simdgroup; return the 32 slots of this operation.
const Slot* meet(const char* operation, int line);

// Return whether a lane took part in the last operation.
bool took_part(int lane);

// Wait for the simdgroup; its memory operations are ordered.
void simdgroup_meet(int line);

// Wait for all threads of the threadgroup; its memory operations are ordered.
void threadgroup_meet(int line);

// Number of the running lane in its simdgroup.
uint32_t lane();

// End the process with one line: the kernel did something that Metal does not allow.
[[noreturn]] void fault(const char* kind, const char* format, ...);

// Leave garbage on the stack, where the next call puts its variables.
void litter();

// A threadgroup array: filled with garbage for each threadgroup, at a guard page.
struct Shared {
  Shared(const char* name, size_t size);
  const char* name;
  size_t size;
  void* data;
};

enum class Role : uint32_t { input, output };

// Written by the driver for each kernel.
struct Parameter {
  const char* name;
  Role role;
};
extern const Parameter kParameters[];
extern const int kParameterCount;
void call_kernel(void* const* buffers, const Thread& self);

}  // namespace emulator
