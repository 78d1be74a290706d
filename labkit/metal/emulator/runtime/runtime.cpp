// The process that runs one kernel: it reads a job from stdin, and writes outputs to stdout and
// a kernel's fault to stderr, in one line.
//
// Compiled once per compiler, never with sanitizers; kernels are linked to it.
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/time.h>
#include <unistd.h>

#include "machine.h"

namespace emulator {
namespace {

constexpr int kFaultExit = 66;

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

std::string running_thread() {
  return machine.running ? where(*machine.running) : "the emulator itself";
}

void on_signal(int number, siginfo_t* info, void*) {
  const char* verb = "access outside";
  for (const auto* regions : {&machine.buffers, &machine.array_regions}) {
    for (const Region& region : *regions) {
      if (!region.near(info->si_addr)) continue;
      const auto offset = static_cast<unsigned char*>(info->si_addr) - region.data;
      if (offset >= 0 && static_cast<size_t>(offset) < region.size) verb = "write to read-only";
      fault("bounds", "%s %s, at byte %td of %zu, by %s", verb, region.name.c_str(), offset,
            region.size, running_thread().c_str());
    }
  }
  fault("crash", "%s at address %p, by %s", strsignal(number), info->si_addr,
        running_thread().c_str());
}

void on_alarm(int) {
  fault("timeout", "not done in its processor time; now in %s", running_thread().c_str());
}

void set_alarm(double seconds) {
  struct itimerval timer {};
  timer.it_value.tv_sec = static_cast<time_t>(seconds);
  timer.it_value.tv_usec = static_cast<suseconds_t>((seconds - static_cast<double>(timer.it_value.tv_sec)) * 1e6);
  setitimer(ITIMER_VIRTUAL, &timer, nullptr);
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
  struct sigaction alarm {};
  alarm.sa_handler = on_alarm;
  alarm.sa_flags = SA_ONSTACK;
  sigaction(SIGVTALRM, &alarm, nullptr);
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(number, &action, nullptr);
}

struct Job {
  Index grid{}, threads{};
  double cpu_seconds = 0;  // largest CPU time of a run
  std::vector<Schedule> schedules;
  std::vector<std::vector<unsigned char>> data;  // content of inputs; empty for outputs
  std::vector<uint64_t> sizes;
};

Job read_job() {
  Job job;
  job.grid = read_value<Index>();
  job.threads = read_value<Index>();
  job.cpu_seconds = read_value<double>();
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

Region place_array(const Shared& array) {
  return Region(std::string("threadgroup ") + array.name, array.size, machine.place(), machine.schedule.seed);
}

// Set up a run: new buffers, threadgroup arrays and stack garbage.
void prepare_run(const Job& job) {
  for (int i = 0; i < kParameterCount; ++i) {
    Region region(kParameters[i].name, job.sizes[i], machine.place(), machine.schedule.seed);
    if (kParameters[i].role == Role::input) {
      memcpy(region.data, job.data[i].data(), job.sizes[i]);
      protect(region.map, region.span, PROT_READ);
    } else {
      fill_garbage(region.data, region.size, machine.schedule.fill, machine.random);
    }
    machine.buffers.push_back(region);
    machine.pointers.push_back(region.data);
  }
  for (size_t i = 0; i < machine.arrays.size(); ++i) {
    machine.array_regions[i].release();
    machine.array_regions[i] = place_array(*machine.arrays[i]);
    machine.arrays[i]->data = machine.array_regions[i].data;
  }
  fill_garbage(machine.stack_garbage, kStackGarbage, machine.schedule.fill, machine.random);
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
  const size_t threads = size_t{job.threads.x} * job.threads.y * job.threads.z;
  if (threads == 0 || threads > 1024)
    fault("launch", "%zu threads in a threadgroup (1 to 1024)", threads);
  machine.home.watched = watched_home();
  machine.fibers = make_fibers(threads);
  for (const Schedule& schedule : job.schedules) {
    machine.schedule = schedule;
    machine.random = Random{schedule.seed * 2 + 1};
    prepare_run(job);
    set_alarm(job.cpu_seconds);
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

void simdgroup_meet(int line) {
  Simdgroup& group = simdgroup_of(*machine.running);
  Slot* key = group.slots[group.phase];
  publish(key);
  meet("simdgroup_barrier", line);
  observe(key);
}

void threadgroup_meet(int line) {
  Fiber& self = *machine.running;
  self.state = State::at_barrier;
  self.operation = "threadgroup_barrier";
  self.line = line;
  char* key = &machine.barrier_keys[self.barriers++ & 1];
  publish(key);
  yield();
  observe(key);
}

[[gnu::noinline]] void litter() {
  unsigned char space[kStackGarbage];
  memcpy(space, machine.stack_garbage, sizeof space);
  asm volatile("" : : "r"(space) : "memory");
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

Shared::Shared(const char* array_name, size_t bytes) : name(array_name), size(bytes) {
  size_t total = bytes;
  for (const Shared* array : machine.arrays) total += array->size;
  if (total > kThreadgroupMemory)
    fault("launch", "%zu bytes of threadgroup memory with %s, %zu allowed", total, name,
          kThreadgroupMemory);
  machine.arrays.push_back(this);
  machine.array_regions.push_back(place_array(*this));
  data = machine.array_regions.back().data;
  fill_garbage(machine.array_regions.back().data, size, machine.schedule.fill, machine.random);
}

}  // namespace emulator

int main() {
  emulator::install_handlers();
  emulator::run_job();
  return 0;
}
