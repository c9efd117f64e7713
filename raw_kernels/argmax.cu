// Computes: id of the largest logit of every row; the lowest id on ties; a NaN is never chosen, a
//   row of nothing else gives 0.
// Shapes/dtypes: logits (M, V) f32, rows stride elements apart; values, ids (M, spans) f32, i32
//   scratch; out (M,) i32.
// Launch: argmax_spans: grid (spans, M), block 256, spans = ceil(V / SPAN);
//   argmax_merge: grid M, block 32.
// Defines: none; SPAN is 8,192 here.
// Accumulates in: comparisons only, so the order does not matter.
// Reads/writes: M V 4 read.
// Twin: ops.cpu.argmax (docs/NUMERICS.md, 6).
// Source: own.
#include "common/numerics.cuh"
#include "common/types.cuh"

#define SPAN 8192

// The better of two candidates: larger value, then lower id.
__device__ __forceinline__ void take_better(float& value, int& id, float other, int other_id) {
  if (other > value || (other == value && other_id < id)) value = other, id = other_id;
}

__device__ __forceinline__ void warp_best(float& value, int& id) {
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) {
    float other = __shfl_xor_sync(~0u, value, flip);
    int other_id = __shfl_xor_sync(~0u, id, flip);
    take_better(value, id, other, other_id);
  }
}

extern "C" __global__ void __launch_bounds__(256)
argmax_spans(const float* __restrict__ logits, i64 stride, float* __restrict__ values,
             int* __restrict__ ids, int n) {
  __shared__ float warp_values[8];
  __shared__ int warp_ids[8];
  int first = blockIdx.x * SPAN, last = min(n, first + SPAN), lane = threadIdx.x & 31;
  logits += blockIdx.y * stride;
  float best = -infinity();
  int id = first;
  for (int i = first + threadIdx.x; i < last; i += 256) {
    if (logits[i] > best) best = logits[i], id = i;
  }
  warp_best(best, id);
  if (lane == 0) warp_values[threadIdx.x >> 5] = best, warp_ids[threadIdx.x >> 5] = id;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < 8; w++) take_better(best, id, warp_values[w], warp_ids[w]);
  values[blockIdx.y * gridDim.x + blockIdx.x] = best;
  ids[blockIdx.y * gridDim.x + blockIdx.x] = id;
}

extern "C" __global__ void __launch_bounds__(32)
argmax_merge(const float* __restrict__ values, const int* __restrict__ ids, int* __restrict__ out,
             int n_spans) {
  float best = -infinity();
  int id = 0x7fffffff;
  for (int i = threadIdx.x; i < n_spans; i += 32) {
    take_better(best, id, values[blockIdx.x * n_spans + i], ids[blockIdx.x * n_spans + i]);
  }
  warp_best(best, id);
  if (threadIdx.x == 0) out[blockIdx.x] = id;
}
