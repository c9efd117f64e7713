// Computes: flag = 1 if every value is finite, else 0.
// Shapes/dtypes: x (M, N) f32, rows stride elements apart; parts (M, spans) i32 scratch; flag (1,)
//   i32.
// Launch: finite_spans: grid (spans, M), block 256, spans = ceil(N / SPAN); finite_merge: grid 1,
//   block 256, count = M spans; alone, with count 0, for an empty x.
// Defines: none; SPAN is 8,192 here.
// Accumulates in: largest exponent, so the order does not matter.
// Reads/writes: M N 4 read.
// Twin: ops.cpu.check_finite (docs/NUMERICS.md, 6).
// Source: own.
#include "common/numerics.cuh"
#include "common/types.cuh"

#define SPAN 8192
#define EXPONENT 0x7f800000

// Whether all threads of the block say yes; for thread 0 alone.
__device__ __forceinline__ int block_all(int yes, int* warps) {
  unsigned votes = __ballot_sync(~0u, yes);
  if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = votes == ~0u;
  __syncthreads();
  if (threadIdx.x > 0) return 0;
  int all = 1;
  for (int w = 0; w < 8; w++) all &= warps[w];
  return all;
}

extern "C" __global__ void __launch_bounds__(256)
finite_spans(const float* __restrict__ x, i64 stride, int* __restrict__ parts, int n) {
  __shared__ int warps[8];
  int first = blockIdx.x * SPAN, last = min(n, first + SPAN), top = 0;
  x += blockIdx.y * stride;
  for (int i = first + threadIdx.x; i < last; i += 256) {
    top = max(top, __float_as_int(x[i]) & EXPONENT);
  }
  int all = block_all(top < EXPONENT, warps);
  if (threadIdx.x == 0) parts[blockIdx.y * gridDim.x + blockIdx.x] = all;
}

extern "C" __global__ void __launch_bounds__(256)
finite_merge(int* __restrict__ flag, const int* __restrict__ parts, int count) {
  __shared__ int warps[8];
  int yes = 1;
  for (int i = threadIdx.x; i < count; i += 256) yes &= parts[i];
  int all = block_all(yes, warps);
  if (threadIdx.x == 0) *flag = all;
}
