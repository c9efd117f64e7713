// Checking mode: every load and store of a kernel compiled with -fsanitize=thread arrives here.
//
// Counted, when asked for: how many 32-byte sectors a warp's global accesses touch, and how often
// its shared accesses meet in a bank, by source line.
//
// Only the instrumentation of g++ is used, not its runtime. Found: global accesses outside the
// buffers of the launch, misaligned accesses, reads of unwritten shared memory, races inside a
// block (two threads, one of them writing, no barrier between) and between blocks. Two threads of
// a warp are ordered by __syncwarp, two of a block by __syncthreads; a shuffle orders no memory.
#include <dlfcn.h>
#include <stdio.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "runtime.h"

extern "C" char _DYNAMIC[] __attribute__((visibility("hidden")));

namespace emulation {
namespace {

struct Access {
  int thread = -1, block = -1;
  uint32_t block_epoch = 0, warp_epoch = 0;
  const void* place = nullptr;

  void set(int this_block, const void* pc) {
    thread = current->linear, block = this_block, place = pc;
    block_epoch = current->block_epoch, warp_epoch = current->warp_epoch;
  }
  // Whether this earlier access is ordered before one of the current thread.
  bool ordered(int this_block) const {
    if (thread < 0) return true;
    if (block != this_block) return false;
    if (thread == current->linear || block_epoch != current->block_epoch) return true;
    return thread / 32 == current->warp && warp_epoch != current->warp_epoch;
  }
};

// Of one byte: the last writer, and the last two readers of different threads.
struct Shadow {
  Access writer, readers[2];
  bool written = false;
};

struct Buffer {
  const char* begin;
  size_t n_bytes;
  std::vector<Shadow> shadow;
};

std::vector<Buffer> buffers;
std::vector<Shadow> shared;
int block_number;

// One warp-wide request: the k-th time that lanes of a warp come by the same place.
struct Request {
  unsigned lanes = 0;
  uintptr_t addresses[32];
};

// All requests of one load or store in the source, and what they cost.
struct Site {
  bool is_shared, write;
  size_t n_bytes;
  std::vector<unsigned> times;                         // per thread of the block
  std::vector<std::vector<Request>> warps;
  unsigned long n_requests = 0, cost = 0, least = 0;
};

std::map<const void*, Site> sites;
bool counting;
std::string counted;

void count_access(const void* p, size_t n, bool write, bool is_shared, const void* pc) {
  Site& site = sites[pc];
  site.is_shared = is_shared, site.write = write, site.n_bytes = n;
  size_t thread = current->linear, warp = current->warp;
  if (site.times.size() <= thread) site.times.resize(thread + 1);
  if (site.warps.size() <= warp) site.warps.resize(warp + 1);
  unsigned turn = site.times[thread]++;
  if (site.warps[warp].size() <= turn) site.warps[warp].resize(turn + 1);
  Request& request = site.warps[warp][turn];
  request.lanes |= 1u << current->lane;
  request.addresses[current->lane] = (uintptr_t)p;
}

// Sectors that a request touches, and the fewest that hold as many different bytes.
void add_sectors(Site& site, const Request& request) {
  std::set<uintptr_t> sectors, words;
  size_t word = site.n_bytes < 4 ? site.n_bytes : 4;
  for (int lane = 0; lane < 32; lane++) {
    if (!(request.lanes >> lane & 1)) continue;
    for (size_t i = 0; i < site.n_bytes; i += word) {
      words.insert(request.addresses[lane] + i);
      sectors.insert((request.addresses[lane] + i) / 32);
    }
  }
  site.cost += sectors.size(), site.least += (words.size() * word + 31) / 32;
}

// Passes over the 32 banks: 8 bytes are served by half warps, 16 bytes by quarters; a pass serves
// one word of each bank, to any number of lanes.
void add_passes(Site& site, const Request& request) {
  int together = site.n_bytes <= 4 ? 32 : site.n_bytes == 8 ? 16 : 8;
  for (int first = 0; first < 32; first += together) {
    std::set<uintptr_t> banks[32];
    size_t most = 0;
    for (int lane = first; lane < first + together; lane++) {
      if (!(request.lanes >> lane & 1)) continue;
      for (size_t i = 0; i < site.n_bytes; i += 4) {
        uintptr_t word = (request.addresses[lane] + i) / 4;
        std::set<uintptr_t>& bank = banks[word % 32];
        bank.insert(word);
        if (bank.size() > most) most = bank.size();
      }
    }
    site.cost += most, site.least += most > 0;
  }
}

// Requests of a block that has ended.
void settle() {
  for (auto& entry : sites) {
    Site& site = entry.second;
    for (const std::vector<Request>& warp : site.warps) {
      for (const Request& request : warp) {
        if (!request.lanes) continue;
        site.n_requests++;
        site.is_shared ? add_passes(site, request) : add_sectors(site, request);
      }
    }
    site.warps.clear(), site.times.clear();
  }
}

unsigned long offset_in_library(const void* pc) {
  Dl_info info;
  if (!pc || !dladdr(pc, &info)) return 0;
  return (const char*)pc - (const char*)info.dli_fbase - 1;
}

void* own_base() {
  Dl_info info;
  dladdr(&buffers, &info);
  return info.dli_fbase;
}

// "@hex" is replaced by the source line afterwards.
void report(const char* what, const void* pc, const Access* other) {
  char text[300];
  int n = snprintf(text, sizeof text, "%s at @%lx", what, offset_in_library(pc));
  if (other) {
    snprintf(text + n, sizeof text - n, ", thread %d of block %d at @%lx", other->thread,
             other->block, offset_in_library(other->place));
  }
  note(text);
}

void touch(Shadow& s, bool write, bool is_shared, const void* pc) {
  if (is_shared && !write && !s.written) report("read of unwritten shared memory", pc, nullptr);
  if (!s.writer.ordered(block_number)) {
    report(s.writer.block != block_number ? "race between blocks"
           : write                        ? "race: unordered writes"
                                          : "race: read after unordered write", pc, &s.writer);
  }
  if (!write) {
    int slot = s.readers[0].thread >= 0 && s.readers[0].thread != current->linear;
    s.readers[slot].set(block_number, pc);
    return;
  }
  for (const Access& reader : s.readers) {
    if (!reader.ordered(block_number)) {
      report(reader.block != block_number ? "race between blocks"
                                          : "race: write after unordered read", pc, &reader);
    }
  }
  s.writer.set(block_number, pc);
  s.readers[0] = s.readers[1] = Access();
  s.written = true;
}

void access(const void* p, size_t n, bool write, const void* pc) {
  size_t offset;
  if (!current) return;
  bool is_shared = find_shared(p, &offset);            // first: it may lie beside the runtime's own
  if (!is_shared && is_private(p)) return;
  if ((uintptr_t)p & (n - 1)) report("misaligned access", pc, nullptr);
  if (is_shared) {
    if (offset + n > shared.size()) {
      fail("shared access out of bounds at @%lx", offset_in_library(pc));
    }
    for (size_t i = 0; i < n; i++) touch(shared[offset + i], write, true, pc);
    if (counting) count_access(p, n, write, true, pc);
    return;
  }
  for (Buffer& b : buffers) {
    size_t at = (const char*)p - b.begin;
    if ((const char*)p < b.begin || at + n > b.n_bytes) continue;
    for (size_t i = 0; i < n; i++) touch(b.shadow[at + i], write, false, pc);
    if (counting) count_access(p, n, write, false, pc);
    return;
  }
  // a constant of the library: its read-only part ends where the dynamic section begins
  Dl_info info;
  if (!write && (const char*)p < _DYNAMIC && dladdr(p, &info) && info.dli_fbase == own_base()) {
    return;
  }
  fail("global %s of %zu bytes out of bounds at @%lx", write ? "write" : "read", n,
       offset_in_library(pc));
}

}  // namespace

void check_block_begin() {
  settle();
  shared.assign(shared_bytes(), Shadow());
  block_number++;
}

extern "C" {

void emulation_clear_buffers() {
  buffers.clear();
  block_number = -1;
}
void emulation_add_buffer(const void* p, size_t n) {
  for (Buffer& b : buffers) {
    if (b.begin == p && b.n_bytes >= n) return;  // one array given twice
  }
  buffers.push_back({(const char*)p, n, std::vector<Shadow>(n)});
}

// Start counting, or stop and give lines "@place space direction bytes requests cost least".
void emulation_count(int on) {
  counting = on;
  if (on) sites.clear();
}
const char* emulation_counted() {
  settle();
  counted.clear();
  for (const auto& entry : sites) {
    const Site& s = entry.second;
    char text[160];
    snprintf(text, sizeof text, "@%lx %s %s %zu %lu %lu %lu\n", offset_in_library(entry.first),
             s.is_shared ? "shared" : "global", s.write ? "write" : "read", s.n_bytes, s.n_requests,
             s.cost, s.least);
    counted += text;
  }
  return counted.c_str();
}

#define PLACE __builtin_return_address(0)
#define HOOKS(N)                                                                        \
  void __tsan_read##N(void* p) { access(p, N, false, PLACE); }                          \
  void __tsan_write##N(void* p) { access(p, N, true, PLACE); }                          \
  void __tsan_unaligned_read##N(void* p) { access(p, N, false, PLACE); }                \
  void __tsan_unaligned_write##N(void* p) { access(p, N, true, PLACE); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, size_t n) {
  for (size_t i = 0; i < n; i++) access((char*)p + i, 1, false, PLACE);
}
void __tsan_write_range(void* p, size_t n) {
  for (size_t i = 0; i < n; i++) access((char*)p + i, 1, true, PLACE);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

}  // extern "C"
}  // namespace emulation
