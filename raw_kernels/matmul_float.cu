// Computes: out[r] = W x[r] for float weights: acc = fma(w, x, acc) for each element in order.
// Shapes/dtypes: out (M, N) f32, rows out_stride elements apart; tiles (ceil(N / 32), ceil(K / E),
//   32, E) of the weight type, E = 16 bytes, rows side by side, zeros past N and K (retile_float);
//   x (M, K) f32, rows x_stride elements apart, 16-byte aligned. K a multiple of 4.
// Launch: matmul_float: grid (ceil(N / 32), ceil(M / TOKENS)), block 256.
//   retile_float: grid (ceil(K / E), ceil(N / 32)), block 32 * E.
// Defines: FORMAT F16 | BF16 | F32, TOKENS 1 | 2 | 4 | 8 | 16, SLICES 8 | 16 (16 from K = 16,384).
// Accumulates in: float32, elements of a slice in order, slices in order; a row's result depends on
//   the row and K alone.
// Reads/writes: the weights once for each group of tokens; x once for each block of rows.
// Twin: ops.cpu.matmul with an F32, F16 or BF16 matrix (docs/NUMERICS.md, 3).
// Source: own.
#include "common/numerics.cuh"
#include "common/ptx.cuh"
#include "common/slices.cuh"

#if !defined(FORMAT) || !defined(TOKENS)
#error "FORMAT: F16, BF16 or F32; TOKENS: rows of x a pass"
#endif

struct F16 {
  static const int kPer16Bytes = 8;
  typedef u16 Bits;
  static __device__ __forceinline__ float value(u32 word, int i) {
    return half_to_float(static_cast<u16>(word >> (16 * (i & 1))));
  }
};
struct BF16 {
  static const int kPer16Bytes = 8;
  typedef u16 Bits;
  static __device__ __forceinline__ float value(u32 word, int i) {
    return bf16_to_float(word >> (16 * (i & 1)) & 0xffff);
  }
};
struct F32 {
  static const int kPer16Bytes = 4;
  typedef u32 Bits;
  static __device__ __forceinline__ float value(u32 word, int) { return __uint_as_float(word); }
};
#define E (FORMAT::kPer16Bytes)

extern "C" __global__ void __launch_bounds__(256)
retile_float(const FORMAT::Bits* __restrict__ raw, FORMAT::Bits* __restrict__ tiles, int n, int k) {
  int row = blockIdx.y * 32 + threadIdx.x / E, column = blockIdx.x * E + threadIdx.x % E;
  i64 to = (static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x) * 32 * E + threadIdx.x;
  tiles[to] = row < n && column < k ? raw[static_cast<i64>(row) * k + column] : 0;
}

// Elements first .. last - 1 of one 16-byte step of 32 rows, for every token.
__device__ __forceinline__ void add_step(uint4 w, const float* const (&x)[TOKENS], int at,
                                         int first, int last, float (&acc)[TOKENS]) {
  const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < E; i += 4) {
    if (i + 4 <= first || i >= last) continue;
    float4 v[TOKENS];
#pragma unroll
    for (int r = 0; r < TOKENS; r++) v[r] = __ldg(reinterpret_cast<const float4*>(x[r] + at + i));
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (i + j < first || i + j >= last) continue;
      float value = FORMAT::value(words[(i + j) * 4 / E], i + j);
#pragma unroll
      for (int r = 0; r < TOKENS; r++) {
        float other = j == 0 ? v[r].x : j == 1 ? v[r].y : j == 2 ? v[r].z : v[r].w;
        acc[r] = fma_rn(value, other, acc[r]);
      }
    }
  }
}

// ptxas: without a stated minimum of blocks (0) it keeps to 128 registers, and 8 tokens spill.
#define MIN_BLOCKS (TOKENS == 8)

extern "C" __global__ void __launch_bounds__(256, MIN_BLOCKS)
matmul_float(float* __restrict__ out, i64 out_stride, const uint4* __restrict__ tiles,
             const float* __restrict__ x, i64 x_stride, int m, int n, int k) {
  __shared__ float part[SLICES][32][TOKENS + 1];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first_token = blockIdx.y * TOKENS;
  int steps = (k + E - 1) / E;
  tiles += static_cast<i64>(blockIdx.x) * steps * 32 + lane;
  const float* rows[TOKENS];
#pragma unroll
  for (int r = 0; r < TOKENS; r++) {                   // a row past the last one is the last again
    rows[r] = x + static_cast<i64>(min(first_token + r, m - 1)) * x_stride;
  }
  for (int slice = warp; slice < SLICES; slice += SLICE_WARPS) {
    float acc[TOKENS] = {};
    int begin = slice_begin(k, slice), end = slice_begin(k, slice + 1);
    for (int step = begin / E; step * E < end; step++) {
      uint4 w = __ldg(tiles + static_cast<i64>(step) * 32);
      if (begin <= step * E && step * E + E <= end) {
        add_step(w, rows, step * E, 0, E, acc);
      } else {
        add_step(w, rows, step * E, begin - step * E, end - step * E, acc);
      }
    }
#pragma unroll
    for (int r = 0; r < TOKENS; r++) part[slice][lane][r] = acc[r];
  }
  __syncthreads();
  add_slices(part, TOKENS, out, out_stride, blockIdx.x * 32, n, first_token, m);
}
