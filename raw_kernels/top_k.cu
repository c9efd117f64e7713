// Computes: the k largest logits of every row: value descending, lowest id first on ties; a NaN is
//   never chosen; id -1 and -infinity where a row has fewer than k numbers.
// Shapes/dtypes: logits (M, V) f32, out_ids (M, k) i32, out_values (M, k) f32, rows their stride in
//   elements apart; values, ids (M, spans, min(k, SPAN)) f32, i32 scratch: the best of every span.
// Launch: top_k_spans: grid (spans, M), block 256, spans = ceil(V / SPAN) <= MAX_SPANS;
//   top_k_merge: grid M, block 32.
// Defines: none; SPAN is 4,096, MAX_SPANS 1,024 here.
// Accumulates in: comparisons only, so the order does not matter.
// Reads/writes: M V 4 read once; a span lies in registers while its best are taken one by one.
// Twin: ops.cpu.top_k (docs/NUMERICS.md, 6).
// Source: own.
#include "common/numerics.cuh"
#include "common/types.cuh"

#define SPAN 4096
#define PER_THREAD (SPAN / 256)
#define MAX_SPANS 1024
#define NOTHING 0x7fffffff                             // no id: behind every other at -infinity

// The better of two candidates: larger value, then lower id; a NaN is never better.
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
top_k_spans(const float* __restrict__ logits, i64 stride, float* __restrict__ values,
            int* __restrict__ ids, int n, int k) {
  __shared__ float warp_values[2][8];
  __shared__ int warp_ids[2][8];
  int first = blockIdx.x * SPAN + threadIdx.x, warp = threadIdx.x >> 5, kept = min(k, SPAN);
  i64 to = (static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x) * kept;
  logits += blockIdx.y * stride;
  float v[PER_THREAD];
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    int at = first + 256 * i;
    v[i] = at < n ? logits[at] : quiet_nan();
  }
  u32 taken = 0;
  float own = -infinity();
  int own_id = NOTHING;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) take_better(own, own_id, v[i], first + 256 * i);
  for (int j = 0; j < kept; j++) {
    float best = own;
    int id = own_id, half = j & 1;                     // two halves: one barrier a turn
    warp_best(best, id);
    if ((threadIdx.x & 31) == 0) warp_values[half][warp] = best, warp_ids[half][warp] = id;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < 8; w++) take_better(best, id, warp_values[half][w], warp_ids[half][w]);
    if (threadIdx.x == 0) {
      values[to + j] = best;
      ids[to + j] = id == NOTHING ? -1 : id;
    }
    if (id != own_id || id == NOTHING) continue;
    taken |= 1u << ((id - first) / 256);               // its owner looks for its next best
    own = -infinity(), own_id = NOTHING;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
      if (!(taken >> i & 1)) take_better(own, own_id, v[i], first + 256 * i);
    }
  }
}

extern "C" __global__ void __launch_bounds__(32)
top_k_merge(int* __restrict__ out_ids, i64 ids_stride, float* __restrict__ out_values,
            i64 values_stride, const float* __restrict__ values, const int* __restrict__ ids,
            int spans, int k) {
  __shared__ int heads[MAX_SPANS];                     // a lane's spans: lane, lane + 32, ...
  int lane = threadIdx.x, kept = min(k, SPAN);
  i64 begin = static_cast<i64>(blockIdx.x) * spans * kept;
  values += begin, ids += begin;
  out_ids += blockIdx.x * ids_stride, out_values += blockIdx.x * values_stride;
  for (int s = lane; s < spans; s += 32) heads[s] = 0;
  int own_span = 0, own_id = NOTHING;
  float own = -infinity();
  bool stale = true;
  for (int j = 0; j < k; j++) {
    if (stale) {
      own = -infinity(), own_id = NOTHING;
      for (int s = lane; s < spans; s += 32) {
        i64 at = static_cast<i64>(s) * kept + heads[s];
        if (heads[s] == kept || ids[at] < 0) continue;
        int before = own_id;
        take_better(own, own_id, values[at], ids[at]);
        if (own_id != before) own_span = s;
      }
    }
    float best = own;
    int id = own_id;
    warp_best(best, id);
    stale = id == own_id && id != NOTHING;
    if (stale) heads[own_span]++;
    if (lane == 0) {
      out_ids[j] = id == NOTHING ? -1 : id;
      out_values[j] = best;
    }
  }
}
