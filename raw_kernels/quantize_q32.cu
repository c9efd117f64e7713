// Computes: int8 activation rows for formats of 32 values; per 32: top = max |x|, d = top / limit,
//   q = rint(x * (limit / top)), start = -8 * sum(q), sum = d * f32(sum(q)).
// Shapes/dtypes: x (M, K) f32, rows x_stride elements apart, 16-byte aligned; for each group of
//   TOKENS tokens: codes (K / 32, TOKEN_TILES, 32) Fragment, d (K / 32, TOKENS) f32,
//   start (K / 32, TOKENS) i32, sum (K / 32, TOKENS) f32.
// Launch: grid (ceil(K / 1024), ceil(M / TOKENS) * TOKENS), block 128. K a multiple of 32.
// Defines: PLANES 1 | 2, TOKEN_TILES 1 | 2 | 4.
// Accumulates in: int32 sums; a row's result depends on the row alone.
// Reads/writes: M K 4 read; M K (PLANES + 12 / 32) written.
// Twin: ops.cpu.quantize_rows, layout q32 (docs/NUMERICS.md, 2).
// Source: own contract; scales per 32 as in ggml's block_q8_0.
#include "common/quantize32.cuh"

extern "C" __global__ void __launch_bounds__(128)
quantize_q32(const float* __restrict__ x, i64 x_stride, Fragment* __restrict__ codes,
             float* __restrict__ d, int* __restrict__ start, float* __restrict__ sum, int m,
             int k) {
  int span = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, token = blockIdx.y;
  if (span * 256 >= k) return;                         // whole warps leave
  int at = 256 * span + 8 * lane;
  float v[8];
  load_eight(x + token * x_stride + at, at < k && token < m, v);
  quantize_span32(v, token, span, k / 32, codes, d, start, sum);
}
