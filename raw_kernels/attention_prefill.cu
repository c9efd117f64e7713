// Computes: what attention.cu computes, for many query rows: a block takes PAIRS (row, head) pairs
//   of one key/value head through all their chunks and keeps the running result in registers.
// Shapes/dtypes: out, q (M, H, D) f32, rows their stride in elements apart, 16-byte aligned;
//   cache_k (Hkv, capacity / 16, D, 16), cache_v (Hkv, capacity, D) f16 or f32; positions (M,) i32.
// Launch: grid (ceil(M * H / Hkv / PAIRS), Hkv), block 256; PAIRS = 64 up to D = 128, else 32.
// Defines: HEAD_DIM, a multiple of 16 up to 256; KV_BITS 16 | 32.
// Accumulates in: as attention.cu; chunks are merged as they come, which is their order.
// Reads/writes: each visible chunk of keys and values once for each block; no scratch.
// Twin: ops.cpu.attention (docs/NUMERICS.md, 5).
// Source: own.
#define PAIRS (HEAD_DIM <= 128 ? 64 : 32)
#include "common/attend.cuh"

static_assert(PAIRS / 4 * (HEAD_DIM / 8) <= 256, "a thread keeps the values of one item");

extern "C" __global__ void __launch_bounds__(256, 1)
attention_prefill(float* __restrict__ out, i64 out_stride, const float* __restrict__ q,
                  i64 q_stride, const Kv* __restrict__ cache_k, const Kv* __restrict__ cache_v,
                  const int* __restrict__ positions, int m, int n_heads, int capacity, int window,
                  float scale, float cap) {
  __shared__ float scores[PAIRS][ROW];
  __shared__ Merge merges[PAIRS];
  Group<Causal> group = {{positions, window, capacity}};
  int kv_head = blockIdx.y, last;
  group.heads = n_heads / static_cast<int>(gridDim.y);
  group.first_pair = blockIdx.x * PAIRS;
  group.n_pairs = min(PAIRS, m * group.heads - group.first_pair);
  chunks_of(group.sight, group.row(0), group.row(group.n_pairs - 1) + 1, group.chunk, last);
  q += kv_head * group.heads * HEAD_DIM, out += kv_head * group.heads * HEAD_DIM;
  if (threadIdx.x < PAIRS) merges[threadIdx.x] = {-infinity(), 0.0f, 1.0f, 0.0f};
  int d = threadIdx.x % (HEAD_DIM / 8) * 8, pair = threadIdx.x / (HEAD_DIM / 8) * 4;
  float acc[4][8] = {};
  for (; group.chunk < last; group.chunk++) {
    group.find_ranges();
    if (group.first >= group.last) continue;           // the same for all threads
    i64 slot = static_cast<i64>(group.chunk) * CHUNK % capacity;
    slot = (slot + static_cast<i64>(kv_head) * capacity) * HEAD_DIM;
    __syncthreads();
    score(group, q, q_stride, cache_k + slot, scores);
    __syncthreads();
    for (int p = threadIdx.x >> 5; p < group.n_pairs; p += 8) {
      int lo, hi;
      group.keys(group.row(p), lo, hi);
      if (lo >= hi) continue;
      float2 top_sum = soften(scores[p], lo, hi, scale, cap);
      if ((threadIdx.x & 31) == 0) merges[p].fold(top_sum.x, top_sum.y);
    }
    __syncthreads();
    if (pair >= group.n_pairs) continue;               // no barrier is left in this turn
    int lo[4], hi[4];
    float acc_c[4][8] = {};
    weigh(group, scores, cache_v + slot, pair, d, acc_c, lo, hi);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (pair + i >= group.n_pairs || lo[i] >= hi[i]) continue;
      const Merge merge = merges[pair + i];
#pragma unroll
      for (int j = 0; j < 8; j++) acc[i][j] = merge.value(acc[i][j], acc_c[i][j]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (pair + i >= group.n_pairs) continue;
    float sum = merges[pair + i].sum, v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = div_rn(acc[i][j], sum);
    float4* to = reinterpret_cast<float4*>(
        out + group.row(pair + i) * out_stride + group.head(pair + i) * HEAD_DIM + d);
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    to[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}
