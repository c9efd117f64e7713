// One chunk of 128 absolute positions for up to PAIRS (row, head) pairs that share a key/value head.
//
// What a row may see comes from a Sight: `visible(row, lo, hi)` gives its positions lo .. hi - 1,
// lo = hi = 0 for none. Order of all sums: docs/NUMERICS.md, 5. A pair past the last is computed as
// the last again and not stored. Online softmax as in Milakov and Gimelshein, arXiv 1805.02867.
#pragma once
#include "kv.cuh"
#include "special.cuh"

#ifndef HEAD_DIM
#error "HEAD_DIM: values of a head"
#endif
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM > 0 && HEAD_DIM <= 256, "HEAD_DIM");
#define CHUNK 128
#ifndef PAIRS
#define PAIRS 64                                       // (row, head) pairs at a time
#endif
#define ROW (CHUNK + 4)                                // of scores: groups of pairs in other banks
#define RECORD (HEAD_DIM + 4)

// Positions max(0, p - window + 1) .. p, or 0 .. p for window 0; none if the cache holds fewer.
struct Causal {
  const int* positions;
  int window, capacity;

  __device__ __forceinline__ void visible(int row, int& lo, int& hi) const {
    int p = positions[row];
    lo = window > 0 && p >= window ? p - window + 1 : 0;
    hi = p + 1;
    if (p < 0 || p - lo >= capacity) lo = hi = 0;
  }
};

// What a chunk has to do for one group of pairs; keys are counted in the chunk.
template <class Sight>
struct Group {
  Sight sight;
  int chunk, heads;                                    // heads: query heads of one key/value head
  int first_pair, n_pairs;                             // of the group
  int first, last, common, end;                        // keys some pair sees; keys all pairs see

  __device__ __forceinline__ int row(int pair) const { return (first_pair + pair) / heads; }
  __device__ __forceinline__ int head(int pair) const { return (first_pair + pair) % heads; }
  // Visible keys of a row inside the chunk; returns the row's first chunk.
  __device__ __forceinline__ int keys(int row, int& lo, int& hi) const {
    sight.visible(row, lo, hi);
    int first_chunk = lo / CHUNK;
    lo = max(lo - CHUNK * chunk, 0), hi = min(hi - CHUNK * chunk, CHUNK);
    return first_chunk;
  }
  __device__ __forceinline__ void find_ranges() {
    first = CHUNK, last = 0, common = 0, end = CHUNK;
    for (int r = row(0); r <= row(n_pairs - 1); r++) {
      int lo, hi;
      keys(r, lo, hi);
      if (lo < hi) first = min(first, lo), last = max(last, hi);
      common = max(common, lo), end = min(end, hi);
    }
    if (common >= end) common = end = last;
  }
};

// Products of query and key: a thread takes 4 pairs and 8 keys.
template <class Sight>
__device__ __forceinline__ void score(const Group<Sight>& group, const float* q, i64 q_stride,
                                      const Kv* cache_k, float (*scores)[ROW]) {
  int n_items = (group.n_pairs + 3) / 4 * (CHUNK / 8);
  for (int item = threadIdx.x; item < n_items; item += blockDim.x) {
    int key = item % (CHUNK / 8) * 8, pair = item / (CHUNK / 8) * 4;
    if (key + 8 <= group.first || key >= group.last) continue;
    const Kv* k = cache_k + key / 16 * (HEAD_DIM * 16) + key % 16;
    const float* queries[4];
    float acc[4][8] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {                      // a pair past the last is the last again
      int at = min(pair + i, group.n_pairs - 1);
      queries[i] = q + group.row(at) * q_stride + group.head(at) * HEAD_DIM;
    }
    for (int d = 0; d < HEAD_DIM; d += 4) {
      float4 x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = *reinterpret_cast<const float4*>(queries[i] + d);
#pragma unroll
      for (int part = 0; part < 4; part++) {
        float v[8];
        load_kv8(k + (d + part) * 16, v);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float f = part == 0 ? x[i].x : part == 1 ? x[i].y : part == 2 ? x[i].z : x[i].w;
#pragma unroll
          for (int j = 0; j < 8; j++) acc[i][j] = fma_rn(v[j], f, acc[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (pair + i >= group.n_pairs) continue;
      float4* to = reinterpret_cast<float4*>(&scores[pair + i][key]);
      to[0] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
      to[1] = make_float4(acc[i][4], acc[i][5], acc[i][6], acc[i][7]);
    }
  }
}

// Scores of one pair to weights, by one warp; returns the largest score and the sum of weights.
__device__ __forceinline__ float2 soften(float* scores, int lo, int hi, float scale, float cap) {
  int lane = threadIdx.x & 31;
  float s[4], top = -infinity(), sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int key = lane + 32 * i;
    s[i] = -infinity();
    if (key >= lo && key < hi) {
      s[i] = mul_rn(scores[key], scale);
      if (cap > 0.0f) s[i] = softcap_f32(s[i], cap);
    }
    top = larger(s[i], top);
  }
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) top = larger(__shfl_xor_sync(~0u, top, flip), top);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float p = exp_f32(sub_rn(s[i], top));
    scores[lane + 32 * i] = p;
    // lanes 0 .. 15 add keys l, l + 16, l + 32, ... in order; the other lanes' sums are not used
    float other = __shfl_xor_sync(~0u, p, 16);
    sum = add_rn(add_rn(sum, p), other);
  }
#pragma unroll
  for (int half = 8; half > 0; half /= 2) sum = add_rn(sum, __shfl_xor_sync(~0u, sum, half));
  return make_float2(top, __shfl_sync(~0u, sum, 0));
}

// Weighted sums of values of 4 pairs and 8 values of a head; lo, hi: the keys that each pair sees.
template <class Sight>
__device__ __forceinline__ void weigh(const Group<Sight>& group, const float (*weights)[ROW],
                                      const Kv* cache_v, int pair, int d, float (&acc)[4][8],
                                      int (&lo)[4], int (&hi)[4]) {
  const float* w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int at = min(pair + i, group.n_pairs - 1);
    group.keys(group.row(at), lo[i], hi[i]);
    w[i] = weights[at];
  }
  for (int key = group.first; key < group.last; key++) {
    float v[8];
    load_kv8(cache_v + static_cast<i64>(key) * HEAD_DIM + d, v);
    bool all = key >= group.common && key < group.end;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!all && (key < lo[i] || key >= hi[i])) continue;
      float p = w[i][key];
#pragma unroll
      for (int j = 0; j < 8; j++) acc[i][j] = fma_rn(v[j], p, acc[i][j]);
    }
  }
}

// Where the partial results of a launch go: records (M, n_heads, slots, RECORD).
struct Records {
  float* first;
  int m, n_heads, slots, kv_head, offset;              // offset: places before the sight's first

  template <class Sight>
  __device__ __forceinline__ float* of(const Group<Sight>& group, int pair, int place) const {
    i64 row_head = static_cast<i64>(group.row(pair)) * n_heads + kv_head * group.heads;
    return first + ((row_head + group.head(pair)) * slots + offset + place) * RECORD;
  }
};

// Partial results of all rows' pairs for one chunk; keys and values begin at the chunk's slot.
template <class Sight>
__device__ __forceinline__ void attend_chunk(Group<Sight> group, const float* q, i64 q_stride,
                                             const Kv* cache_k, const Kv* cache_v,
                                             float (*scores)[ROW], float** to,
                                             const Records& records, float scale, float cap) {
  int total = records.m * group.heads, n_warps = blockDim.x / 32;
  for (group.first_pair = 0; group.first_pair < total; group.first_pair += PAIRS) {
    group.n_pairs = min(PAIRS, total - group.first_pair);
    group.find_ranges();
    if (group.first >= group.last) continue;           // the same for all threads
    score(group, q, q_stride, cache_k, scores);
    __syncthreads();
    for (int pair = threadIdx.x >> 5; pair < group.n_pairs; pair += n_warps) {
      int lo, hi, place = group.chunk - group.keys(group.row(pair), lo, hi);
      if (lo >= hi) continue;
      float2 top_sum = soften(scores[pair], lo, hi, scale, cap);
      if ((threadIdx.x & 31) > 0) continue;
      to[pair] = records.of(group, pair, place);
      to[pair][0] = top_sum.x, to[pair][1] = top_sum.y;
    }
    __syncthreads();
    int n_items = (group.n_pairs + 3) / 4 * (HEAD_DIM / 8);
    for (int item = threadIdx.x; item < n_items; item += blockDim.x) {
      int d = item % (HEAD_DIM / 8) * 8, pair = item / (HEAD_DIM / 8) * 4, lo[4], hi[4];
      float acc[4][8] = {};
      weigh(group, scores, cache_v, pair, d, acc, lo, hi);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (pair + i >= group.n_pairs || lo[i] >= hi[i]) continue;
        float4* out = reinterpret_cast<float4*>(to[pair + i] + 4 + d);
        out[0] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
        out[1] = make_float4(acc[i][4], acc[i][5], acc[i][6], acc[i][7]);
      }
    }
    __syncthreads();
  }
}

// Chunks that some of the rows see: first .. last - 1, empty if none sees anything.
template <class Sight>
__device__ __forceinline__ void chunks_of(const Sight& sight, int first_row, int last_row,
                                          int& first, int& last) {
  first = 0x7fffffff, last = 0;
  for (int r = first_row; r < last_row; r++) {
    int lo, hi;
    sight.visible(r, lo, hi);
    if (lo < hi) first = min(first, lo / CHUNK), last = max(last, (hi - 1) / CHUNK + 1);
  }
  if (last == 0) first = 0;
}

// A running result, the largest score and the sum, and one more chunk's factors for both.
struct Merge {
  float top, sum, own, other;

  __device__ __forceinline__ void fold(float top_c, float sum_c) {
    float larger_top = larger(top, top_c);
    own = exp_f32(sub_rn(top, larger_top)), other = exp_f32(sub_rn(top_c, larger_top));
    top = larger_top;
    sum = fma_rn(sum, own, mul_rn(sum_c, other));
  }
  __device__ __forceinline__ float value(float acc, float acc_c) const {
    return fma_rn(acc, own, mul_rn(acc_c, other));
  }
};

// Fold `n` records of one row and head into one value of it (thread's).
__device__ __forceinline__ void fold_records(Merge& merge, float& acc, const float* records,
                                             int n) {
  for (int i = 0; i < n; i++, records += RECORD) {
    merge.fold(records[0], records[1]);
    acc = merge.value(acc, records[4 + threadIdx.x]);
  }
}
