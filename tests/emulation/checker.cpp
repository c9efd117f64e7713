// Checking mode: every load and store of a kernel compiled with -fsanitize=thread arrives here.
//
// Only the instrumentation of g++ is used, not its runtime. Found: global accesses outside the
// buffers of the launch, misaligned accesses, reads of unwritten shared memory, races inside a
// block (two threads, one of them writing, no barrier between) and between blocks. Two threads of
// a warp are ordered by __syncwarp, two of a block by __syncthreads; a shuffle orders no memory.
#include <dlfcn.h>
#include <stdio.h>

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
  if (!current || is_private(p)) return;
  if ((uintptr_t)p & (n - 1)) report("misaligned access", pc, nullptr);
  size_t offset;
  if (find_shared(p, &offset)) {
    if (offset + n > shared.size()) {
      fail("shared access out of bounds at @%lx", offset_in_library(pc));
    }
    for (size_t i = 0; i < n; i++) touch(shared[offset + i], write, true, pc);
    return;
  }
  for (Buffer& b : buffers) {
    size_t at = (const char*)p - b.begin;
    if ((const char*)p < b.begin || at + n > b.n_bytes) continue;
    for (size_t i = 0; i < n; i++) touch(b.shadow[at + i], write, false, pc);
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
