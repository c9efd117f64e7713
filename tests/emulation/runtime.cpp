// Scheduler of the emulator: fibers, barriers, warp collectives, schedules, poisoned shared memory.
//
// Blocks run one after another, so a kernel in which one block waits for another deadlocks here; no
// kernel of ours does. Never compiled with the checker's instrumentation.
#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "runtime.h"

namespace emulation {

Thread* current;
uint3 block_index, block_shape, grid_shape;

static const size_t kStackBytes = 64 << 10, kGuardBytes = 4096;  // as in host_module.py
static std::vector<Thread> threads;
static char* first_stack;  // of the process: every kernel library runs on the same ones
static size_t n_stacks;
static void* scheduler_stack;
static const Launch* running;
static std::vector<char> dynamic_memory;
static char* dynamic_begin;
static int n_arrived, n_returned, barrier_line;
static bool failed;
static char message[1024];

enum Schedule { kInOrder, kReverse, kRandom };
static Schedule schedule = kInOrder;
static uint64_t random_state = 1;

static unsigned next_random(unsigned below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state % below;
}

// ---- context switch (System V x86-64: the callee-saved registers and the stack pointer) --------
extern "C" void emulation_switch(void** save, void* load);
asm(R"(
.text
.type emulation_switch,@function
emulation_switch:
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
.size emulation_switch,.-emulation_switch
)");

static void leave() { emulation_switch(&current->stack_pointer, scheduler_stack); }

static void entry() {
  running->run(running->arguments);
  current->state = kReturned;
  leave();
  abort();
}

static char* stack(size_t i) { return first_stack + i * (kStackBytes + kGuardBytes) + kGuardBytes; }

static void prepare(Thread& t, int linear) {
  const unsigned* b = running->block;
  unsigned i = linear;
  t = Thread{};
  t.index = {i % b[0], i / b[0] % b[1], i / (b[0] * b[1])};
  t.linear = linear, t.lane = linear & 31, t.warp = linear >> 5;
  uint64_t* top = reinterpret_cast<uint64_t*>(stack(linear) + kStackBytes - 64);
  *--top = 0;                                          // a return address that nobody returns to
  *--top = reinterpret_cast<uint64_t>(&entry);
  for (int k = 0; k < 6; k++) *--top = 0;
  t.stack_pointer = top;
}

// ---- errors ---------------------------------------------------------------------------------
static void set_message(const char* text) {
  if (!message[0]) {
    snprintf(message, sizeof message, "block (%u, %u, %u), thread %d: %s", block_index.x,
             block_index.y, block_index.z, current ? current->linear : -1, text);
  }
  failed = true;
}

void fail(const char* format, ...) {
  char text[800];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  set_message(text);
  current->state = kReturned;
  leave();
  abort();
}

void note(const char* text) { set_message(text); }

// ---- memory ---------------------------------------------------------------------------------
void* dynamic_shared() { return dynamic_begin; }

bool find_shared(const void* p, size_t* offset) {
  const char* c = static_cast<const char*>(p);
  size_t n_static = running->shared_end - running->shared_begin;
  if (c >= running->shared_begin && c < running->shared_end) {
    *offset = c - running->shared_begin;
  } else if (c >= dynamic_begin && c < dynamic_begin + running->dynamic_bytes) {
    *offset = n_static + (c - dynamic_begin);
  } else {
    return false;
  }
  return true;
}

size_t shared_bytes() {
  return running->shared_end - running->shared_begin + running->dynamic_bytes;
}

bool is_private(const void* p) {
  const char* c = static_cast<const char*>(p);
  const char* own = reinterpret_cast<char*>(threads.data());
  if (c >= own && c < own + threads.size() * sizeof(Thread)) return true;
  if (c >= first_stack && c < stack(threads.size()) - kGuardBytes) return true;
  return c >= reinterpret_cast<const char*>(&current) - 256 &&
         c < reinterpret_cast<const char*>(&current) + 256;
}

// ---- block barrier --------------------------------------------------------------------------
static void release_barrier() {
  for (Thread& t : threads) {
    t.state = kReady;
    t.block_epoch++;
  }
  n_arrived = 0;
}

void barrier(int line) {
  if (n_returned) fail("__syncthreads at line %d after %d threads returned", line, n_returned);
  if (n_arrived && barrier_line != line) {
    fail("divergent __syncthreads: lines %d and %d", barrier_line, line);
  }
  barrier_line = line;
  current->state = kAtBarrier;
  current->line = line;
  if (++n_arrived == (int)threads.size()) {
    release_barrier();
  } else {
    leave();
  }
}

// ---- warp collectives -----------------------------------------------------------------------
void sync_warp_epoch() { current->warp_epoch++; }

void collective(Collective kind, unsigned mask, int line, void* operands, Combine combine) {
  Thread* me = current;
  Thread* warp = &threads[me->warp * 32];
  int n = min(32, (int)threads.size() - me->warp * 32);
  if (!(mask >> me->lane & 1)) {
    fail("line %d: lane %d is not in its mask %08x", line, me->lane, mask);
  }
  if (n < 32 && mask >> n) fail("line %d: mask %08x names lanes beyond the block", line, mask);
  unsigned arrived = 0;
  me->state = kAtCollective, me->kind = kind, me->mask = mask, me->line = line;
  me->operands = operands;
  for (int i = 0; i < n; i++) {
    Thread& t = warp[i];
    if (!(mask >> i & 1)) continue;
    if (t.state == kReturned) fail("line %d: lane %d of mask %08x has returned", line, i, mask);
    if (t.state != kAtCollective) continue;
    if (t.mask != mask || t.kind != kind || t.line != line) {
      fail("divergent warp: lane %d at line %d with mask %08x, lane %d at line %d with mask %08x",
           me->lane, line, mask, i, t.line, t.mask);
    }
    arrived |= 1u << i;
  }
  if (arrived != mask) {
    leave();
    return;
  }
  if (combine) combine(warp, mask);
  for (int i = 0; i < n; i++) {
    if (mask >> i & 1) warp[i].state = kReady;
  }
}

void combine_shuffle(Thread* warp, unsigned mask) {
  for (int i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    Shuffle* s = static_cast<Shuffle*>(warp[i].operands);
    if (s->source < 0 || s->source > 31 || !(mask >> s->source & 1)) {
      fail("shuffle: lane %d reads lane %d outside mask %08x", i, s->source, mask);
    }
    s->result = static_cast<Shuffle*>(warp[s->source].operands)->value;
  }
}

void combine_vote(Thread* warp, unsigned mask) {
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) {
    if ((mask >> i & 1) && static_cast<Vote*>(warp[i].operands)->predicate) bits |= 1u << i;
  }
  for (int i = 0; i < 32; i++) {
    if (mask >> i & 1) static_cast<Vote*>(warp[i].operands)->result = bits;
  }
}

// Fragments of mma.m16n8k16 and k32 .s8 (PTX ISA, "Matrix fragments for mma.m16n8k32"): lane
// l = 4 g + t holds rows g and g + 8 of A, column g of B, columns 2 t and 2 t + 1 of C and D.
void combine_mma_int8(Thread* warp, unsigned) {
  int8_t a[16][32], b[8][32];
  int k = static_cast<MmaInt8*>(warp->operands)->k;
  for (int l = 0; l < 32; l++) {
    MmaInt8* m = static_cast<MmaInt8*>(warp[l].operands);
    int g = l >> 2, t = l & 3;
    for (int part = 0; part < k / 16; part++) {
      memcpy(&a[g][16 * part + 4 * t], &m->a[2 * part], 4);
      memcpy(&a[g + 8][16 * part + 4 * t], &m->a[2 * part + 1], 4);
      memcpy(&b[g][16 * part + 4 * t], &m->b[part], 4);
    }
  }
  unsigned d[16][8];                                   // the hardware wraps around
  for (int i = 0; i < 16; i++) {
    for (int j = 0; j < 8; j++) {
      int sum = 0;
      for (int x = 0; x < k; x++) sum += a[i][x] * b[j][x];
      d[i][j] = (unsigned)sum;
    }
  }
  for (int l = 0; l < 32; l++) {
    MmaInt8* m = static_cast<MmaInt8*>(warp[l].operands);
    int g = l >> 2, t = l & 3;
    for (int e = 0; e < 4; e++) {
      m->d[e] = (int)((unsigned)m->c[e] + d[g + 8 * (e >> 1)][2 * t + (e & 1)]);
    }
  }
}

// ---- scheduler ------------------------------------------------------------------------------
static void resume(Thread& t) {
  current = &t;
  emulation_switch(&scheduler_stack, t.stack_pointer);
  if (t.state != kReturned || failed) return;
  n_returned++;
  if (n_arrived) {
    char text[160];
    snprintf(text, sizeof text, "returns while %d threads wait at __syncthreads, line %d",
             n_arrived, barrier_line);
    set_message(text);
  }
}

static bool resume_warps() {
  // In order or in reverse: every warp runs until all of its lanes wait for the block.
  int n = threads.size(), n_warps = (n + 31) / 32;
  bool progress = false;
  for (int i = 0; i < n_warps; i++) {
    int w = schedule == kReverse ? n_warps - 1 - i : i, lanes = min(32, n - 32 * w);
    for (bool again = true; again && !failed;) {
      again = false;
      for (int l = 0; l < lanes && !failed; l++) {
        Thread& t = threads[32 * w + (schedule == kReverse ? lanes - 1 - l : l)];
        if (t.state == kReady) {
          resume(t);
          again = progress = true;
        }
      }
    }
  }
  return progress;
}

static bool resume_one() {
  int n = threads.size(), start = next_random(n);
  for (int i = 0; i < n; i++) {
    Thread& t = threads[(start + i) % n];
    if (t.state != kReady) continue;
    resume(t);
    return true;
  }
  return false;
}

static void report_deadlock() {
  int at_barrier = 0, at_collective = 0;
  Thread* example = nullptr;
  for (Thread& t : threads) {
    at_barrier += t.state == kAtBarrier;
    at_collective += t.state == kAtCollective;
    if (t.state == kAtCollective) example = &t;
  }
  char text[240];
  int n = snprintf(text, sizeof text, "deadlock: %d threads at __syncthreads, %d at a collective",
                   at_barrier, at_collective);
  if (example) {
    snprintf(text + n, sizeof text - n, " (thread %d, line %d, mask %08x)", example->linear,
             example->line, example->mask);
  }
  current = example;
  set_message(text);
}

static void run_block() {
  // 0xFF is a NaN and -1: what was never written shows in the result.
  size_t n_static = running->shared_end - running->shared_begin;
  if (n_static) memset(running->shared_begin, 0xff, n_static);
  if (running->dynamic_bytes) memset(dynamic_begin, 0xff, running->dynamic_bytes);
  for (size_t i = 0; i < threads.size(); i++) prepare(threads[i], i);
  n_arrived = n_returned = 0;
  if (check_block_begin) check_block_begin();
  while (n_returned < (int)threads.size() && !failed) {
    bool progress = schedule == kRandom ? resume_one() : resume_warps();
    if (!progress && !failed) report_deadlock();
  }
}

static void allocate(const Launch& what) {
  size_t n = (size_t)what.block[0] * what.block[1] * what.block[2];
  if (n > n_stacks) abort();  // more than a block may have; the caller checks
  threads.assign(n, Thread{});
  dynamic_memory.assign(what.dynamic_bytes + 128, 0);
  dynamic_begin = dynamic_memory.data() + (-(uintptr_t)dynamic_memory.data() & 127);
}

int launch(const Launch& what) {
  running = &what;
  failed = false;
  message[0] = 0;
  current = nullptr;
  block_shape = {what.block[0], what.block[1], what.block[2]};
  grid_shape = {what.grid[0], what.grid[1], what.grid[2]};
  allocate(what);
  unsigned mode = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(mode | 0x8040);               // flush subnormal results and operands
  unsigned n = what.grid[0] * what.grid[1] * what.grid[2];
  unsigned first = schedule == kRandom && n ? next_random(n) : 0;
  for (unsigned i = 0; i < n && !failed; i++) {
    unsigned at = schedule == kReverse ? n - 1 - i : (first + i) % n;
    block_index = {at % what.grid[0], at / what.grid[0] % what.grid[1],
                   at / (what.grid[0] * what.grid[1])};
    run_block();
  }
  __builtin_ia32_ldmxcsr(mode);
  current = nullptr;
  return failed;
}

extern "C" const char* emulation_message() { return message; }
extern "C" void emulation_stacks(char* first, size_t count) {
  first_stack = first;
  n_stacks = count;
}
extern "C" void emulation_schedule(int which, uint64_t seed) {
  schedule = static_cast<Schedule>(which);
  random_state = seed * 2654435761u + 88172645463325252ull;
}

}  // namespace emulation
