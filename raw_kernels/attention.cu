// Computes: softmax attention of M query rows over the cached keys they may see, positions
//   max(0, p - window + 1) .. p, or 0 .. p for window 0: a partial result for every chunk of 128
//   absolute positions, then their merge.
// Shapes/dtypes: out, q (M, H, D) f32, rows their stride in elements apart, 16-byte aligned;
//   cache_k (Hkv, capacity / 16, D, 16), cache_v (Hkv, capacity, D) f16 or f32; positions (M,) i32;
//   records (M, H, slots, D + 4) f32 scratch: largest score, sum, 2 unused, weighted sum of values.
// Launch: attention_chunks: grid (slots, Hkv), block 64 .. 256, a multiple of 32;
//   slots = capacity / 128 + 1. attention_merge: grid (H, M), block D.
// Defines: HEAD_DIM, a multiple of 16 up to 256; KV_BITS 16 | 32.
// Accumulates in: float32. Score: fma over d in order; weights added in 16 lanes by key index
//   modulo 16, ascending, then a halving tree; values: fma over keys in order; chunks merged in
//   order. A row's result depends on its absolute positions alone.
// Reads/writes: each visible chunk of keys and values once for up to 64 (row, head) pairs that
//   share a key/value head, from cache for further pairs.
// Twin: ops.cpu.attention (docs/NUMERICS.md, 5).
// Source: own; online softmax as in Milakov and Gimelshein, arXiv 1805.02867.
#include "common/attend.cuh"

extern "C" __global__ void __launch_bounds__(256)
attention_chunks(const float* __restrict__ q, i64 q_stride, const Kv* __restrict__ cache_k,
                 const Kv* __restrict__ cache_v, const int* __restrict__ positions,
                 float* __restrict__ records, int m, int n_heads, int capacity, int window,
                 float scale, float cap) {
  __shared__ float scores[PAIRS][ROW];
  __shared__ float* to[PAIRS];
  Group<Causal> group = {{positions, window, capacity}};
  int kv_head = blockIdx.y, slots = gridDim.x, last;
  group.heads = n_heads / static_cast<int>(gridDim.y);
  chunks_of(group.sight, 0, m, group.chunk, last);
  q += kv_head * group.heads * HEAD_DIM;
  Records to_records = {records, m, n_heads, slots, kv_head, 0};
  for (group.chunk += blockIdx.x; group.chunk < last; group.chunk += slots) {
    i64 slot = static_cast<i64>(group.chunk) * CHUNK % capacity;
    slot = (slot + static_cast<i64>(kv_head) * capacity) * HEAD_DIM;
    attend_chunk(group, q, q_stride, cache_k + slot, cache_v + slot, scores, to, to_records, scale,
                 cap);
  }
}

extern "C" __global__ void __launch_bounds__(HEAD_DIM)
attention_merge(float* __restrict__ out, i64 out_stride, const float* __restrict__ records,
                const int* __restrict__ positions, int slots, int capacity, int window) {
  int head = blockIdx.x, row = blockIdx.y, lo, hi;
  Causal{positions, window, capacity}.visible(row, lo, hi);
  int n_chunks = lo < hi ? (hi - 1) / CHUNK - lo / CHUNK + 1 : 0;
  records += (static_cast<i64>(row) * gridDim.x + head) * slots * RECORD;
  Merge merge = {-infinity(), 0.0f};
  float acc = 0.0f;
  fold_records(merge, acc, records, n_chunks);
  out[row * out_stride + head * HEAD_DIM + threadIdx.x] = div_rn(acc, merge.sum);
}
