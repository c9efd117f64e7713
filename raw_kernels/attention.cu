// Computes: softmax attention of M query rows over the cached keys they may see, positions
//   max(0, p - window + 1) .. p, or 0 .. p for window 0: a partial result for every chunk of 128
//   absolute positions, then their merge.
// Shapes/dtypes: out, q (M, H, D) f32, rows their stride in elements apart, 16-byte aligned;
//   cache_k (Hkv, capacity / 16, D, 16), cache_v (Hkv, capacity, D) f16 or f32; positions (M,) i32;
//   records (M, H, slots, D + 4) f32 scratch: largest score, sum, 2 unused, weighted sum of values.
// Launch: attention_chunks: grid (slots, Hkv), block 64 .. 256, a multiple of 32;
//   slots = capacity / 128 + 1 always suffices. attention_merge: grid (H, M), block D.
// Defines: HEAD_DIM, a multiple of 16 up to 256; KV_BITS 16 | 32.
// Accumulates in: float32. Score: fma over d in order; weights added in 16 lanes by key index
//   modulo 16, ascending, then a halving tree; values: fma over keys in order; chunks merged in
//   order. A row's result depends on its absolute positions alone.
// Reads/writes: each visible chunk of keys and values once for up to 64 (row, head) pairs that
//   share a key/value head, from cache for further pairs.
// Twin: ops.cpu.attention (docs/NUMERICS.md, 5).
// Source: own; online softmax as in Milakov and Gimelshein, arXiv 1805.02867.
#include "common/kv.cuh"
#include "common/special.cuh"

#ifndef HEAD_DIM
#error "HEAD_DIM: values of a head"
#endif
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM > 0 && HEAD_DIM <= 256, "HEAD_DIM");
#define CHUNK 128
#define PAIRS 64                                       // (row, head) pairs at a time
#define RECORD (HEAD_DIM + 4)

// Visible positions of a row: lo .. hi - 1, empty if it sees nothing or more than the cache holds.
__device__ __forceinline__ void visible(int p, int window, int capacity, int& lo, int& hi) {
  lo = window > 0 && p >= window ? p - window + 1 : 0;
  hi = p + 1;
  if (p < 0 || p - lo >= capacity) lo = hi = 0;
}

// What a chunk has to do for one group of pairs; keys are counted in the chunk.
struct Group {
  const int* positions;
  int chunk, window, capacity, heads;                  // heads: query heads of one key/value head
  int first_pair, n_pairs;                             // of the group
  int first, last, common, end;                        // keys some pair sees; keys all pairs see

  __device__ __forceinline__ int row(int pair) const { return (first_pair + pair) / heads; }
  __device__ __forceinline__ int head(int pair) const { return (first_pair + pair) % heads; }
  // Visible keys of a row inside the chunk; returns the row's first chunk.
  __device__ __forceinline__ int keys(int row, int& lo, int& hi) const {
    visible(positions[row], window, capacity, lo, hi);
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
__device__ __forceinline__ void score(const Group& group, const float* q, i64 q_stride,
                                      const Kv* cache_k, float (*scores)[CHUNK]) {
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

// Weighted sums of values: a thread takes 4 pairs and 8 values of a head.
__device__ __forceinline__ void weigh(const Group& group, const float (*weights)[CHUNK],
                                      const Kv* cache_v, float* const* records, int n_records) {
  int n_items = (group.n_pairs + 3) / 4 * (HEAD_DIM / 8);
  for (int item = threadIdx.x; item < n_items; item += blockDim.x) {
    int d = item % (HEAD_DIM / 8) * 8, pair = item / (HEAD_DIM / 8) * 4;
    float acc[4][8] = {};
    int lo[4], hi[4];
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
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (pair + i >= n_records || lo[i] >= hi[i]) continue;
      float4* to = reinterpret_cast<float4*>(records[pair + i] + 4 + d);
      to[0] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
      to[1] = make_float4(acc[i][4], acc[i][5], acc[i][6], acc[i][7]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
attention_chunks(const float* __restrict__ q, i64 q_stride, const Kv* __restrict__ cache_k,
                 const Kv* __restrict__ cache_v, const int* __restrict__ positions,
                 float* __restrict__ records, int m, int n_heads, int capacity, int window,
                 float scale, float cap) {
  __shared__ float scores[PAIRS][CHUNK];
  __shared__ float* to[PAIRS];
  Group group = {positions, 0x7fffffff, window, capacity, n_heads / static_cast<int>(gridDim.y)};
  int kv_head = blockIdx.y, n_warps = blockDim.x / 32;
  for (int r = 0; r < m; r++) {                        // first chunk that some row sees
    int lo, hi;
    visible(positions[r], window, capacity, lo, hi);
    if (lo < hi) group.chunk = min(group.chunk, lo / CHUNK);
  }
  if (group.chunk == 0x7fffffff) return;               // the block leaves as one
  group.chunk += blockIdx.x;
  i64 slot = static_cast<i64>(group.chunk) * CHUNK % capacity;
  slot += static_cast<i64>(kv_head) * capacity;
  q += kv_head * group.heads * HEAD_DIM;
  int total = m * group.heads;
  for (group.first_pair = 0; group.first_pair < total; group.first_pair += PAIRS) {
    group.n_pairs = min(PAIRS, total - group.first_pair);
    group.find_ranges();
    if (group.first >= group.last) continue;           // the same for all threads
    score(group, q, q_stride, cache_k + slot * HEAD_DIM, scores);
    __syncthreads();
    for (int pair = threadIdx.x >> 5; pair < group.n_pairs; pair += n_warps) {
      int lo, hi, row = group.row(pair), place = group.chunk - group.keys(row, lo, hi);
      if (lo >= hi) continue;
      float2 top_sum = soften(scores[pair], lo, hi, scale, cap);
      if ((threadIdx.x & 31) > 0) continue;
      i64 index = static_cast<i64>(row) * n_heads + kv_head * group.heads + group.head(pair);
      to[pair] = records + (index * gridDim.x + place) * RECORD;
      to[pair][0] = top_sum.x, to[pair][1] = top_sum.y;
    }
    __syncthreads();
    weigh(group, scores, cache_v + slot * HEAD_DIM, to, group.n_pairs);
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(HEAD_DIM)
attention_merge(float* __restrict__ out, i64 out_stride, const float* __restrict__ records,
                const int* __restrict__ positions, int slots, int capacity, int window) {
  int head = blockIdx.x, row = blockIdx.y, lo, hi;
  visible(positions[row], window, capacity, lo, hi);
  int n_chunks = lo < hi ? (hi - 1) / CHUNK - lo / CHUNK + 1 : 0;
  records += (static_cast<i64>(row) * gridDim.x + head) * slots * RECORD;
  float top = -infinity(), sum = 0.0f, acc = 0.0f;
  for (int i = 0; i < n_chunks; i++, records += RECORD) {
    float top_c = records[0], sum_c = records[1], acc_c = records[4 + threadIdx.x];
    float larger_top = larger(top, top_c);
    float a = exp_f32(sub_rn(top, larger_top)), b = exp_f32(sub_rn(top_c, larger_top));
    top = larger_top;
    sum = fma_rn(sum, a, mul_rn(sum_c, b));
    acc = fma_rn(acc, a, mul_rn(acc_c, b));
  }
  out[row * out_stride + head * HEAD_DIM + threadIdx.x] = div_rn(acc, sum);
}
