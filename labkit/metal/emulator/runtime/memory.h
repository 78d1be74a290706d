// Guarded memory, and garbage that depends on the schedule.
#pragma once
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "runtime.h"

namespace emulator {

// Bytes of a guard: a page, which is 64 KiB on some ARM systems, and at least 16 KiB.
static const size_t kPage = std::max<size_t>(16384, static_cast<size_t>(sysconf(_SC_PAGESIZE)));

inline void protect(void* pages, size_t bytes, int access) {
  if (mprotect(pages, bytes, access)) fault("memory", "mprotect: %m");
}

// Which guard page a region touches: the one after it (within 16 bytes) or the one before it.
enum class Place { end, start };

// Memory between two guard pages. The rest of its pages holds a canary that differs from run
// to run, so a kernel that reads it gives different outputs.
struct Region {
  std::string name;
  unsigned char *map = nullptr, *data = nullptr;
  size_t size = 0, span = 0;
  unsigned char canary;

  Region(std::string label, size_t bytes, Place place, uint64_t seed)
      : name(std::move(label)), size(bytes), canary(static_cast<unsigned char>(0xA5 + 29 * seed)) {
    const size_t rounded = (bytes + 15) / 16 * 16;
    span = (rounded + kPage - 1) / kPage * kPage;
    void* base = mmap(nullptr, span + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) fault("memory", "no memory for %s (%zu bytes)", name.c_str(), bytes);
    map = static_cast<unsigned char*>(base) + kPage;
    protect(map, span, PROT_READ | PROT_WRITE);
    data = place == Place::start ? map : map + span - rounded;
    memset(map, canary, span);
  }
  void release() { munmap(map - kPage, span + 2 * kPage); }
  bool near(const void* address) const {
    const auto* a = static_cast<const unsigned char*>(address);
    return a >= map - kPage && a < map + span + kPage;
  }
  void check() const {
    for (const unsigned char* p = map; p < map + span; ++p) {
      if (p == data) p += size;
      if (p < map + span && *p != canary)
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
inline void fill_garbage(unsigned char* data, size_t size, uint32_t fill, Random& random) {
  if (fill < 256) {
    memset(data, static_cast<int>(fill), size);
    return;
  }
  for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
    const uint64_t bytes = random();
    memcpy(data + i, &bytes, std::min(sizeof bytes, size - i));
  }
}

}  // namespace emulator
