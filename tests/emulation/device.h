// CUDA C on the host: the keywords, types and intrinsics that the kernels use, for g++.
//
// A generated file includes this header and then the unchanged .cu file. The threads of a block are
// fibers of one OS thread (runtime.cpp); a barrier or warp collective parks the fiber until every
// participant has arrived. Here is what raw_kernels/ uses, and dp4a and votes; the rest does not
// compile, so a new intrinsic is always a decision. Same bits as on the card for IEEE operations;
// compiled with -ffp-contract=off and run with FTZ and DAZ, like nvcc -fmad=false -ftz=true.
#pragma once
#define CUDFLASH_EMULATION 1

#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>

// ---- keywords -------------------------------------------------------------------------------
#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// One section holds the static shared memory of the file; only non-template functions may have it.
#define __shared__ static __attribute__((section("emulated_shared"), aligned(16)))

// ---- vector types ---------------------------------------------------------------------------
struct __align__(8) int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct uint3 { unsigned x, y, z; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- runtime --------------------------------------------------------------------------------
namespace emulation {

enum State { kReady, kAtBarrier, kAtCollective, kReturned };
enum Collective { kShuffle, kVote, kSyncWarp, kMma };

struct Thread {
  void* stack_pointer;
  uint3 index;
  int linear, lane, warp;
  State state;
  Collective kind;
  unsigned mask;
  int line;                              // source line of the barrier or collective waited at
  void* operands;                        // of the collective
  uint32_t block_epoch, warp_epoch;      // barriers passed; orders memory for the checker
};

extern Thread* current;
extern uint3 block_index, block_shape, grid_shape;

[[noreturn]] void fail(const char* format, ...);
void* dynamic_shared();
void barrier(int line);
void sync_warp_epoch();
// `combine` sees the 32 threads of the warp once all lanes of `mask` have arrived.
typedef void (*Combine)(Thread* warp, unsigned mask);
void collective(Collective kind, unsigned mask, int line, void* operands, Combine combine);

struct Launch {
  unsigned grid[3], block[3];
  size_t dynamic_bytes;
  char *shared_begin, *shared_end;       // static shared memory of the kernel's file
  void (*run)(void** arguments);
  void** arguments;
};
int launch(const Launch& what);

// Not the kernel's own access: the checker must not see it.
#define EMULATED_UNCHECKED __attribute__((no_sanitize("thread")))
template <class... P, size_t... I>
EMULATED_UNCHECKED void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_const_t<P>*>(arguments[I])...);
}
template <class... P>
EMULATED_UNCHECKED void call(void (*kernel)(P...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<P...>{});
}

template <class T>
constexpr char kind_of() {
  if (std::is_pointer<T>::value) return 'p';
  if (std::is_floating_point<T>::value) return sizeof(T) == 4 ? 'f' : 'd';
  return sizeof(T) == 4 ? 'i' : sizeof(T) == 8 ? 'q' : '?';
}
template <class... P>
const char* signature(void (*)(P...)) {
  static const char text[] = {kind_of<P>()..., 0};
  return text;
}

struct Shuffle { uint64_t value, result; int source; };
void combine_shuffle(Thread* warp, unsigned mask);
template <class T>
T shuffle(unsigned mask, T value, int source, int line) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  Shuffle operands{0, 0, source};
  memcpy(&operands.value, &value, sizeof(T));
  collective(kShuffle, mask, line, &operands, combine_shuffle);
  memcpy(&value, &operands.result, sizeof(T));
  return value;
}
struct Vote { int predicate; unsigned result; };
void combine_vote(Thread* warp, unsigned mask);
struct MmaInt8 { int* d; const unsigned *a, *b; const int* c; int k; };
void combine_mma_int8(Thread* warp, unsigned mask);

}  // namespace emulation

extern "C" char __start_emulated_shared[] __attribute__((weak));
extern "C" char __stop_emulated_shared[] __attribute__((weak));
#define EMULATED_KERNEL(NAME)                                                                    \
  extern "C" const char* signature_##NAME() { return emulation::signature(NAME); }               \
  extern "C" int launch_##NAME(const unsigned* g, const unsigned* b, size_t n, void** arguments) { \
    return emulation::launch({{g[0], g[1], g[2]}, {b[0], b[1], b[2]}, n,                         \
                              __start_emulated_shared, __stop_emulated_shared,                   \
                              [](void** p) { emulation::call(NAME, p); }, arguments});           \
  }

#define threadIdx (emulation::current->index)
#define blockIdx (emulation::block_index)
#define blockDim (emulation::block_shape)
#define gridDim (emulation::grid_shape)

// ---- synchronisation ------------------------------------------------------------------------
// Places are told apart by source line, which survives unrolling and inlining.
#define EMULATED_LINE int line = __builtin_LINE()
static inline void __syncthreads(EMULATED_LINE) { emulation::barrier(line); }
static inline void __syncwarp(unsigned mask = ~0u, EMULATED_LINE) {
  emulation::collective(emulation::kSyncWarp, mask, line, nullptr, nullptr);
  emulation::sync_warp_epoch();
}

// ---- warp shuffles and votes ----------------------------------------------------------------
template <class T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATED_LINE) {
  int lane = emulation::current->lane;
  return emulation::shuffle(mask, value, (lane & -width) | (source & (width - 1)), line);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, EMULATED_LINE) {
  int lane = emulation::current->lane, source = lane ^ flip;
  return emulation::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, line);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                                 EMULATED_LINE) {
  int lane = emulation::current->lane, source = lane + (int)delta;
  return emulation::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, line);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATED_LINE) {
  emulation::Vote operands{predicate, 0};
  emulation::collective(emulation::kVote, mask, line, &operands, emulation::combine_vote);
  return operands.result;
}

// ---- arithmetic -----------------------------------------------------------------------------
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline float fabsf(float a) { return __builtin_fabsf(a); }
static inline float __int2float_rn(int a) { return (float)a; }
static inline int __float2int_rn(float a) { return (int)__builtin_rintf(a); }
static inline int __float_as_int(float a) { int r; memcpy(&r, &a, 4); return r; }
static inline float __int_as_float(int a) { float r; memcpy(&r, &a, 4); return r; }
static inline unsigned __float_as_uint(float a) { unsigned r; memcpy(&r, &a, 4); return r; }
static inline float __uint_as_float(unsigned a) { float r; memcpy(&r, &a, 4); return r; }
static inline int __popc(unsigned a) { return __builtin_popcount(a); }
static inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (int8_t)(a >> i) * (int8_t)(b >> i);
  return c;
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  uint64_t bytes = x | (uint64_t)y << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    unsigned choice = selector >> (4 * i) & 15, byte = bytes >> (8 * (choice & 7)) & 255;
    result |= (choice & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
  }
  return result;
}
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return b > a ? b : a; }
template <class T> static inline T __ldg(const T* p) { return *p; }

// ---- what common/ptx.cuh does by inline PTX -------------------------------------------------
static inline float half_to_float(uint16_t bits) {
  _Float16 h;
  memcpy(&h, &bits, 2);
  return (float)h;
}
static inline uint16_t float_to_half(float value) {
  _Float16 h = (_Float16)value;
  uint16_t bits;
  memcpy(&bits, &h, 2);
  return bits;
}
static inline void mma_m16n8k32_s8(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                   const int (&c)[4], EMULATED_LINE) {
  emulation::MmaInt8 operands{d, a, b, c, 32};
  emulation::collective(emulation::kMma, ~0u, line, &operands, emulation::combine_mma_int8);
}
static inline void mma_m16n8k16_s8(int (&d)[4], const unsigned (&a)[2], unsigned b,
                                   const int (&c)[4], EMULATED_LINE) {
  emulation::MmaInt8 operands{d, a, &b, c, 16};
  emulation::collective(emulation::kMma, ~0u, line, &operands, emulation::combine_mma_int8);
}
