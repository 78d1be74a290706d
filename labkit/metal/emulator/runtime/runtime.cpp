// The machine: fibers, schedules, guarded buffers and the job that comes in on stdin.
//
// Compiled once per compiler, never with sanitizers; kernels are linked to it.
#include "runtime.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {
namespace {

constexpr size_t kPage = 16384;  // a multiple of every page size in use
constexpr size_t kStack = 256 * 1024;
constexpr unsigned char kCanary = 0xA5;
constexpr int kFaultExit = 66;

// ------------------------------------------------------------------ memory

// Memory between two guard pages, its end at the second one (to 16 bytes).
struct Region {
  std::string name;
  unsigned char *map = nullptr, *data = nullptr;
  size_t size = 0, span = 0;

  Region(std::string label, size_t bytes) : name(std::move(label)), size(bytes) {
    const size_t rounded = (bytes + 15) / 16 * 16;
    span = (rounded + kPage - 1) / kPage * kPage;
    void* base = mmap(nullptr, span + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) fault("memory", "no memory for %s (%zu bytes)", name.c_str(), bytes);
    map = static_cast<unsigned char*>(base) + kPage;
    mprotect(map, span, PROT_READ | PROT_WRITE);
    data = map + span - rounded;
    memset(map, kCanary, span);
  }
  void release() { munmap(map - kPage, span + 2 * kPage); }
  bool near(const void* address) const {
    const auto* a = static_cast<const unsigned char*>(address);
    return a >= map - kPage && a < map + span + kPage;
  }
  void check() const {
    for (const unsigned char* p = map; p < map + span; ++p) {
      if (p == data) p += size;
      if (p < map + span && *p != kCanary)
        fault("bounds", "write outside %s, at byte %td of %zu", name.c_str(), p - data, size);
    }
  }
};

struct Random {
  uint64_t state;
  uint64_t operator()() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
  }
};

enum class Order : uint32_t { forward, reverse, random };

struct Schedule {
  uint32_t order, fill;
  uint64_t seed;
};

// fill: 0..255 repeats that byte; 256 draws bytes from the seed.
void fill_garbage(unsigned char* data, size_t size, uint32_t fill, Random& random) {
  if (fill < 256) {
    memset(data, static_cast<int>(fill), size);
  } else {
    for (size_t i = 0; i < size; ++i) data[i] = static_cast<unsigned char>(random() >> 32);
  }
}

// ------------------------------------------------------------------ fibers

enum class State : uint8_t { ready, at_operation, at_barrier, done };

struct Fiber {
  Thread thread{};
  State state = State::ready;
  const char* operation = "";
  int line = 0;
  unsigned char* stack = nullptr;
#if defined(__x86_64__)
  void* sp = nullptr;
#else
  ucontext_t context{};
#endif
};

struct Simdgroup {
  int first = 0, count = 0;  // its fibers
  int order[kLanes] = {};    // in which its lanes take their turns
  int cursor = 0, live = 0;
  uint32_t phase = 0, members[2] = {};  // which lanes met, by parity of the operation
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
  Index group_size{};
};

Machine machine;
std::vector<Region>& shared_arrays() {
  static std::vector<Region> arrays;
  return arrays;
}

#if defined(__x86_64__)
// Save the callee-saved registers, change stacks, restore, return on the other side.
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
void switch_to(Fiber& from, Fiber& to) {
  machine.running = &to;
  emulator_switch(&from.sp, to.sp);
}
#else
void switch_to(Fiber& from, Fiber& to) {
  machine.running = &to;
  swapcontext(&from.context, &to.context);
}
#endif

Simdgroup& simdgroup_of(const Fiber& fiber) {
  return machine.simdgroups[fiber.thread.simdgroup];
}

// Give the turn to the next live lane of the simdgroup; after the last, to the scheduler.
void yield() {
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

[[noreturn]] void fiber_main() {
  call_kernel(machine.pointers.data(), machine.running->thread);
  machine.running->state = State::done;
  simdgroup_of(*machine.running).live -= 1;
  yield();
  abort();
}

void start_fiber(Fiber& fiber) {
  fiber.state = State::ready;
#if defined(__x86_64__)
  auto* top = reinterpret_cast<uint64_t*>(fiber.stack + kPage + kStack);
  *--top = 0;  // keeps the stack aligned as after a call
  *--top = reinterpret_cast<uint64_t>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = 0;
  fiber.sp = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack = {fiber.stack + kPage, 0, kStack};
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, reinterpret_cast<void (*)()>(&fiber_main), 0);
#endif
}

// ------------------------------------------------------------------ schedule

void shuffle(int* begin, int count) {
  for (int i = count - 1; i > 0; --i) std::swap(begin[i], begin[machine.random() % (i + 1)]);
}

void set_order(int* begin, int count) {
  std::iota(begin, begin + count, 0);
  const auto order = static_cast<Order>(machine.schedule.order);
  if (order == Order::reverse) std::reverse(begin, begin + count);
  if (order == Order::random) shuffle(begin, count);
}

std::string where(const Fiber& fiber) {
  const Index& g = fiber.thread.group;
  char text[160];
  snprintf(text, sizeof text, "threadgroup (%u, %u, %u), simdgroup %u, lane %u", g.x, g.y, g.z,
           fiber.thread.simdgroup, fiber.thread.lane);
  return text;
}

std::string place(const Fiber& fiber) {
  if (fiber.state == State::done) return "has returned";
  return std::string("is at ") + fiber.operation + ", line " + std::to_string(fiber.line);
}

[[noreturn]] void diverged(const char* what, const Fiber& a, const Fiber& b) {
  fault("divergence", "%s: %s %s, lane %u of simdgroup %u %s", what, where(a).c_str(),
        place(a).c_str(), b.thread.lane, b.thread.simdgroup, place(b).c_str());
}

// All live lanes have stopped: they must have stopped at the same place.
void check_round(Simdgroup& group) {
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

void run_round(Simdgroup& group) {
  group.cursor = 0;
  group.phase ^= 1;
  group.members[group.phase] = 0;
  if (static_cast<Order>(machine.schedule.order) == Order::random)
    shuffle(group.order, group.count);
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

// Every simdgroup is parked: either all threads stand at one barrier, or all are done.
bool release_barrier() {
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

void run_threadgroup(Index position, Index size) {
  const Index full = machine.group_size;
  const uint32_t threads = size.x * size.y * size.z;
  const int groups = static_cast<int>((threads + kLanes - 1) / kLanes);
  machine.simdgroups.assign(groups, Simdgroup{});
  machine.turn.resize(groups);
  set_order(machine.turn.data(), groups);
  for (Region& array : shared_arrays())
    fill_garbage(array.data, array.size, machine.schedule.fill, machine.random);
  for (int g = 0; g < groups; ++g) {
    Simdgroup& group = machine.simdgroups[g];
    group.first = g * kLanes;
    group.count = std::min<int>(kLanes, static_cast<int>(threads) - g * kLanes);
    group.live = group.count;
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
    start_fiber(fiber);
  }
  do {
    for (int left = groups; left > 0;) {
      for (int g : machine.turn) {
        Simdgroup& group = machine.simdgroups[g];
        const bool random = static_cast<Order>(machine.schedule.order) == Order::random;
        while (!group.parked) {
          run_round(group);
          if (random && machine.random() % 4 == 0) break;  // let another simdgroup go first
        }
      }
      left = static_cast<int>(std::count_if(machine.simdgroups.begin(), machine.simdgroups.end(),
                                            [](const Simdgroup& s) { return !s.parked; }));
    }
  } while (release_barrier());
  for (const Region& array : shared_arrays()) array.check();
}

// ------------------------------------------------------------------ job

void read_all(void* data, size_t size) {
  auto* p = static_cast<unsigned char*>(data);
  while (size) {
    const ssize_t n = read(STDIN_FILENO, p, size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fault("job", "the job ends early");
    p += n, size -= static_cast<size_t>(n);
  }
}

void write_all(const void* data, size_t size) {
  auto* p = static_cast<const unsigned char*>(data);
  while (size) {
    const ssize_t n = write(STDOUT_FILENO, p, size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fault("job", "the results cannot be written");
    p += n, size -= static_cast<size_t>(n);
  }
}

template <typename T>
T read_value() {
  T value;
  read_all(&value, sizeof value);
  return value;
}

void on_signal(int number, siginfo_t* info, void*) {
  const char* verb = "access outside";
  for (const auto* regions : {&machine.buffers, &shared_arrays()}) {
    for (const Region& region : *regions) {
      if (!region.near(info->si_addr)) continue;
      const auto offset = static_cast<unsigned char*>(info->si_addr) - region.data;
      if (offset >= 0 && static_cast<size_t>(offset) < region.size) verb = "write to read-only";
      fault("bounds", "%s %s, at byte %td of %zu, by %s", verb, region.name.c_str(), offset,
            region.size, where(*machine.running).c_str());
    }
  }
  fault("crash", "%s at address %p, by %s", strsignal(number), info->si_addr,
        where(*machine.running).c_str());
}

void install_handlers() {
  static unsigned char stack[64 * 1024];
  stack_t alternate{};
  alternate.ss_sp = stack;
  alternate.ss_size = sizeof stack;
  sigaltstack(&alternate, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(number, &action, nullptr);
}

struct Job {
  Index grid{}, threads{};
  std::vector<Schedule> schedules;
  std::vector<std::vector<unsigned char>> data;  // of inputs; empty for outputs
  std::vector<uint64_t> sizes;
};

Job read_job() {
  Job job;
  job.grid = read_value<Index>();
  job.threads = read_value<Index>();
  job.schedules.resize(read_value<uint32_t>());
  for (Schedule& schedule : job.schedules) schedule = read_value<Schedule>();
  for (int i = 0; i < kParameterCount; ++i) {
    job.sizes.push_back(read_value<uint64_t>());
    const bool input = kParameters[i].role == Role::input;
    job.data.emplace_back(input ? job.sizes.back() : 0);
    read_all(job.data.back().data(), job.data.back().size());
  }
  return job;
}

void make_fibers(const Job& job) {
  const size_t count = size_t{job.threads.x} * job.threads.y * job.threads.z;
  if (count == 0 || count > 1024) fault("launch", "%zu threads in a threadgroup (1 to 1024)", count);
  machine.fibers.resize(count);
  const size_t each = kPage + kStack;  // a guard page under every stack
  void* map = mmap(nullptr, each * count, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) fault("memory", "no memory for %zu stacks", count);
  for (size_t i = 0; i < count; ++i) {
    machine.fibers[i].stack = static_cast<unsigned char*>(map) + i * each;
    mprotect(machine.fibers[i].stack, kPage, PROT_NONE);
  }
}

void make_buffers(const Job& job) {
  for (int i = 0; i < kParameterCount; ++i) {
    Region region(kParameters[i].name, job.sizes[i]);
    if (kParameters[i].role == Role::input) {
      memcpy(region.data, job.data[i].data(), job.sizes[i]);
      mprotect(region.map, region.span, PROT_READ);
    } else {
      fill_garbage(region.data, region.size, machine.schedule.fill, machine.random);
    }
    machine.buffers.push_back(region);
    machine.pointers.push_back(region.data);
  }
}

void run_grid(const Job& job) {
  const Index t = job.threads, g = job.grid;
  const Index n = {(g.x + t.x - 1) / t.x, (g.y + t.y - 1) / t.y, (g.z + t.z - 1) / t.z};
  machine.group_size = t;
  for (Fiber& fiber : machine.fibers) {
    fiber.thread.grid = g;
    fiber.thread.groups = n;
  }
  std::vector<int> order(size_t{n.x} * n.y * n.z);
  set_order(order.data(), static_cast<int>(order.size()));
  for (int i : order) {
    const auto u = static_cast<uint32_t>(i);
    const Index p = {u % n.x, u / n.x % n.y, u / n.x / n.y};
    // Threadgroups at the grid's edge are smaller, as with dispatchThreads.
    run_threadgroup(p, {std::min(t.x, g.x - p.x * t.x), std::min(t.y, g.y - p.y * t.y),
                        std::min(t.z, g.z - p.z * t.z)});
  }
}

void run_job() {
  const Job job = read_job();
  make_fibers(job);
  for (const Schedule& schedule : job.schedules) {
    machine.schedule = schedule;
    machine.random = Random{schedule.seed * 2 + 1};
    make_buffers(job);
    run_grid(job);
    for (int i = 0; i < kParameterCount; ++i) {
      machine.buffers[i].check();
      if (kParameters[i].role == Role::output) write_all(machine.buffers[i].data, job.sizes[i]);
      machine.buffers[i].release();
    }
    machine.buffers.clear();
    machine.pointers.clear();
  }
}

}  // namespace

Slot& my_slot() {
  Fiber& self = *machine.running;
  Simdgroup& group = simdgroup_of(self);
  return group.slots[group.phase][self.thread.lane];
}

const Slot* meet(const char* operation, int line) {
  Fiber& self = *machine.running;
  Simdgroup& group = simdgroup_of(self);
  const uint32_t phase = group.phase;
  group.members[phase] |= 1u << self.thread.lane;
  self.state = State::at_operation;
  self.operation = operation;
  self.line = line;
  yield();
  return group.slots[phase];
}

bool took_part(int lane) {
  const Simdgroup& group = simdgroup_of(*machine.running);
  return group.members[group.phase ^ 1] >> lane & 1;
}

void threadgroup_meet(int line) {
  Fiber& self = *machine.running;
  self.state = State::at_barrier;
  self.operation = "threadgroup_barrier";
  self.line = line;
  yield();
}

uint32_t lane() { return machine.running->thread.lane; }

void fault(const char* kind, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  dprintf(STDERR_FILENO, "FAULT %s: %s\n", kind, text);
  _exit(kFaultExit);
}

Shared::Shared(const char* name, size_t size) {
  auto& arrays = shared_arrays();
  size_t total = size;
  for (const Region& array : arrays) total += array.size;
  if (total > kThreadgroupMemory)
    fault("launch", "%zu bytes of threadgroup memory with %s, %zu allowed", total, name,
          kThreadgroupMemory);
  arrays.emplace_back(std::string("threadgroup ") + name, size);
  data = arrays.back().data;
  fill_garbage(arrays.back().data, size, machine.schedule.fill, machine.random);
}

}  // namespace emulator

int main() {
  emulator::install_handlers();
  emulator::run_job();
  return 0;
}
