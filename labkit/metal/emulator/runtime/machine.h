// The machine: runs simdgroups in rounds, and threadgroups one after another.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "fibers.h"

namespace emulator {

struct Simdgroup {
  int first = 0, count = 0;  // index of the first fiber, and number of fibers
  int order[kLanes] = {};    // the order in which the lanes run
  int cursor = 0;
  uint32_t phase = 0, members[2] = {};  // lanes that took part, by parity of the operation
  Slot slots[2][kLanes];
  bool parked = false;  // at a threadgroup barrier, or done
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Simdgroup> simdgroups;
  std::vector<int> turn;  // order of the simdgroups
  Fiber* running = nullptr;
  Fiber home;  // the scheduler's own context
  Schedule schedule{};
  Random random{1};
  std::vector<Region> buffers;
  std::vector<void*> pointers;
  std::vector<Shared*> arrays;        // threadgroup arrays
  std::vector<Region> array_regions;  // memory of the threadgroup arrays in this run
  unsigned char stack_garbage[kStackGarbage];
  // Two keys, because a thread may reach the next barrier before another has left this one.
  char barrier_keys[2], start_key, end_key;
  Index group_size{};

  bool shuffled() const { return static_cast<Order>(schedule.order) == Order::random; }
  // Every second schedule guards the memory before the buffers instead of after them.
  Place place() const {
    return static_cast<Order>(schedule.order) == Order::reverse ? Place::start : Place::end;
  }
};

static Machine machine;

inline Simdgroup& simdgroup_of(const Fiber& fiber) {
  return machine.simdgroups[fiber.thread.simdgroup];
}

inline void switch_to(Fiber& from, Fiber& to) {
  machine.running = &to;
  watch_switch(to.watched);
  change(from, to);
}

// Switch to the next live lane of the simdgroup; after the last, to the scheduler.
inline void yield() {
  Fiber& self = *machine.running;
  Simdgroup& group = simdgroup_of(self);
  while (group.cursor < group.count) {
    Fiber& next = machine.fibers[group.first + group.order[group.cursor++]];
    if (next.state != State::ready) continue;
    if (&next != &self) switch_to(self, next);
    return;
  }
  switch_to(self, machine.home);
}

[[noreturn]] inline void fiber_main() {
  observe(&machine.start_key);
  call_kernel(machine.pointers.data(), machine.running->thread);
  publish(&machine.end_key);
  machine.running->state = State::done;
  yield();
  abort();
}

inline void shuffle(int* begin, int count) {
  for (int i = count - 1; i > 0; --i) std::swap(begin[i], begin[machine.random() % (i + 1)]);
}

inline void set_order(int* begin, int count) {
  std::iota(begin, begin + count, 0);
  const auto order = static_cast<Order>(machine.schedule.order);
  if (order == Order::reverse) std::reverse(begin, begin + count);
  if (order == Order::random) shuffle(begin, count);
}

inline std::string where(const Fiber& fiber) {
  const Index& g = fiber.thread.group;
  char text[160];
  snprintf(text, sizeof text, "threadgroup (%u, %u, %u), simdgroup %u, lane %u", g.x, g.y, g.z,
           fiber.thread.simdgroup, fiber.thread.lane);
  return text;
}

inline std::string place(const Fiber& fiber) {
  if (fiber.state == State::done) return "has returned";
  return std::string("is at ") + fiber.operation + ", line " + std::to_string(fiber.line);
}

[[noreturn]] inline void diverged(const char* what, const Fiber& a, const Fiber& b) {
  fault("divergence", "%s: %s %s, lane %u of simdgroup %u %s", what, where(a).c_str(),
        place(a).c_str(), b.thread.lane, b.thread.simdgroup, place(b).c_str());
}

// All live lanes have stopped; they must have stopped at the same operation.
inline void check_round(Simdgroup& group) {
  const Fiber* first = nullptr;
  for (int i = 0; i < group.count; ++i) {
    const Fiber& fiber = machine.fibers[group.first + i];
    if (fiber.state == State::done) continue;
    if (!first) first = &fiber;
    if (fiber.line != first->line || strcmp(fiber.operation, first->operation) != 0)
      diverged("lanes of one simdgroup are at different operations", *first, fiber);
  }
  group.parked = !first || first->state == State::at_barrier;
}

inline void run_round(Simdgroup& group) {
  group.cursor = 0;
  group.phase ^= 1;
  group.members[group.phase] = 0;
  if (machine.shuffled()) shuffle(group.order, group.count);
  for (int i = 0; i < group.count; ++i) {
    Fiber& fiber = machine.fibers[group.first + i];
    if (fiber.state != State::done) fiber.state = State::ready;
  }
  while (group.cursor < group.count) {
    Fiber& next = machine.fibers[group.first + group.order[group.cursor++]];
    if (next.state == State::ready) switch_to(machine.home, next);
  }
  check_round(group);
}

// Every simdgroup is parked: all threads must be at one barrier, or all done.
inline bool release_barrier() {
  const Fiber *waiting = nullptr, *gone = nullptr;
  for (const Fiber& fiber : machine.fibers) {
    if (fiber.state == State::done) {
      gone = &fiber;
    } else if (!waiting) {
      waiting = &fiber;
    } else if (fiber.line != waiting->line) {
      diverged("threads of one threadgroup are at different barriers", *waiting, fiber);
    }
  }
  if (waiting && gone) diverged("a barrier that not every thread reaches", *waiting, *gone);
  for (Simdgroup& group : machine.simdgroups) group.parked = false;
  return waiting != nullptr;
}

// Set up the simdgroups and threads of one threadgroup.
inline void start_threadgroup(Index position, Index size) {
  const Index full = machine.group_size;
  const uint32_t threads = size.x * size.y * size.z;
  const int groups = static_cast<int>((threads + kLanes - 1) / kLanes);
  machine.simdgroups.assign(groups, Simdgroup{});
  machine.turn.resize(groups);
  set_order(machine.turn.data(), groups);
  for (Region& array : machine.array_regions)
    fill_garbage(array.data, array.size, machine.schedule.fill, machine.random);
  for (int g = 0; g < groups; ++g) {
    Simdgroup& group = machine.simdgroups[g];
    group.first = g * kLanes;
    group.count = std::min<int>(kLanes, static_cast<int>(threads) - g * kLanes);
    set_order(group.order, group.count);
  }
  for (uint32_t i = 0; i < threads; ++i) {
    Fiber& fiber = machine.fibers[i];
    Thread& t = fiber.thread;
    t.position_in_group = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    t.group = position;
    t.group_size = size;
    t.position_in_grid = {position.x * full.x + t.position_in_group.x,
                          position.y * full.y + t.position_in_group.y,
                          position.z * full.z + t.position_in_group.z};
    t.index_in_group = i;
    t.lane = i % kLanes;
    t.simdgroup = i / kLanes;
    t.simdgroups = static_cast<uint32_t>(groups);
    start(fiber, &fiber_main);
  }
}

inline void run_threadgroup(Index position, Index size) {
  start_threadgroup(position, size);
  publish(&machine.start_key);
  const auto busy = [] {
    return std::any_of(machine.simdgroups.begin(), machine.simdgroups.end(),
                       [](const Simdgroup& group) { return !group.parked; });
  };
  do {
    while (busy()) {
      for (int g : machine.turn) {
        Simdgroup& group = machine.simdgroups[g];
        while (!group.parked) {
          run_round(group);
          if (machine.shuffled() && machine.random() % 4 == 0) break;  // another simdgroup may run first
        }
      }
    }
  } while (release_barrier());
  observe(&machine.end_key);
  for (const Region& array : machine.array_regions) array.check();
}

}  // namespace emulator
