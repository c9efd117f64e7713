// Computes: softmax attention of M query rows over pinned positions 0 .. n_sink - 1 and what is not
//   pinned of the row's own span, max(lo, n_sink) .. hi - 1: a partial result for every chunk of
//   128 absolute positions of either kind, then their merge, the pinned chunks first.
// Shapes/dtypes: out, q (M, H, D) f32, rows their stride in elements apart, 16-byte aligned; caches
//   as in kv_write.cu, position p in slot p % capacity; sinks the same, position p in slot p, or
//   null; ranges (M, 2) i32: lo, hi; n_sink (1,) i32 or null; records (M, H, slots, D + 4) f32.
// Launch: span_chunks: grid (slots, Hkv), block 64 .. 256, a multiple of 32;
//   slots = sink_capacity / 128 + capacity / 128 + 1. span_merge: grid (H, M), block D.
// Defines: HEAD_DIM, a multiple of 16 up to 256; KV_BITS 16 | 32.
// Accumulates in: as attention.cu; a row's result depends on n_sink, lo, hi and its query alone.
//   NaN: lo < 0, more positions than the cache holds, n_sink outside the sink, nothing visible.
// Reads/writes: as attention.cu.
// Twin: ops.cpu.attention_span (docs/NUMERICS.md, 5).
// Source: own.
#include "common/attend.cuh"

// Pinned rows that exist; -1 if there are more than the sink holds.
__device__ __forceinline__ int pinned_rows(const int* n_sink, int sink_capacity) {
  int n = n_sink ? *n_sink : 0;
  return n < 0 || n > sink_capacity ? -1 : n;
}

// The row's own span without what is pinned.
struct Unpinned {
  const int* ranges;
  int pinned, capacity;

  // Whether the row can be served at all.
  __device__ __forceinline__ bool sound(int row, int& lo, int& hi) const {
    int least = ranges[2 * row];
    hi = ranges[2 * row + 1], lo = max(least, pinned);
    return pinned >= 0 && least >= 0 && static_cast<i64>(hi) - lo <= capacity;
  }
  __device__ __forceinline__ void visible(int row, int& lo, int& hi) const {
    if (!sound(row, lo, hi) || hi <= lo) lo = hi = 0;
  }
};

// The pinned positions, for rows that can be served.
struct Pinned {
  Unpinned rest;

  __device__ __forceinline__ void visible(int row, int& lo, int& hi) const {
    hi = rest.sound(row, lo, hi) ? rest.pinned : 0, lo = 0;
  }
};

extern "C" __global__ void __launch_bounds__(256, KV_BITS == 16 ? 2 : 1)
span_chunks(const float* __restrict__ q, i64 q_stride, const Kv* __restrict__ cache_k,
            const Kv* __restrict__ cache_v, const Kv* __restrict__ sink_k,
            const Kv* __restrict__ sink_v, const int* __restrict__ ranges,
            const int* __restrict__ n_sink, float* __restrict__ records, int m, int n_heads,
            int capacity, int sink_capacity, float scale, float cap) {
  __shared__ float scores[PAIRS][ROW];
  __shared__ float* to[PAIRS];
  Unpinned rest = {ranges, pinned_rows(n_sink, sink_capacity), capacity};
  int kv_head = blockIdx.y, heads = n_heads / static_cast<int>(gridDim.y);
  int sinks = sink_capacity / CHUNK, first, last;
  q += kv_head * heads * HEAD_DIM;
  Records to_records = {records, m, n_heads, static_cast<int>(gridDim.x), kv_head, 0};
  if (static_cast<int>(blockIdx.x) < sinks) {
    Group<Pinned> group = {{rest}, static_cast<int>(blockIdx.x), heads};
    i64 slot = static_cast<i64>(kv_head) * sink_capacity + group.chunk * CHUNK;
    if (group.chunk * CHUNK < rest.pinned) {
      attend_chunk(group, q, q_stride, sink_k + slot * HEAD_DIM, sink_v + slot * HEAD_DIM, scores,
                   to, to_records, scale, cap);
    }
    return;
  }
  to_records.offset = sinks;
  chunks_of(rest, 0, m, first, last);
  Group<Unpinned> group = {rest, first, heads};
  for (group.chunk += blockIdx.x - sinks; group.chunk < last; group.chunk += gridDim.x - sinks) {
    i64 slot = static_cast<i64>(group.chunk) * CHUNK % capacity;
    slot = (slot + static_cast<i64>(kv_head) * capacity) * HEAD_DIM;
    attend_chunk(group, q, q_stride, cache_k + slot, cache_v + slot, scores, to, to_records, scale,
                 cap);
  }
}

extern "C" __global__ void __launch_bounds__(HEAD_DIM)
span_merge(float* __restrict__ out, i64 out_stride, const float* __restrict__ records,
           const int* __restrict__ ranges, const int* __restrict__ n_sink, int slots, int capacity,
           int sink_capacity) {
  int head = blockIdx.x, row = blockIdx.y, lo, hi;
  Unpinned rest = {ranges, pinned_rows(n_sink, sink_capacity), capacity};
  records += (static_cast<i64>(row) * gridDim.x + head) * slots * RECORD;
  Merge merge = {-infinity(), 0.0f};
  float acc = 0.0f;
  Pinned{rest}.visible(row, lo, hi);
  fold_records(merge, acc, records, (hi + CHUNK - 1) / CHUNK);
  rest.visible(row, lo, hi);
  records += static_cast<i64>(sink_capacity / CHUNK) * RECORD;
  fold_records(merge, acc, records, lo < hi ? (hi - 1) / CHUNK - lo / CHUNK + 1 : 0);
  out[row * out_stride + head * HEAD_DIM + threadIdx.x] = div_rn(acc, merge.sum);
}
