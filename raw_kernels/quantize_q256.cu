// Computes: int8 activation rows for formats of 256 values; per 256: top = max |x|,
//   d = top / finest; with one plane an exponent e per 32: 3, 2, 1 or 0 as the run's own largest
//   magnitude exceeds top / 2, / 4, / 8; q = rint(x * ((finest / top) * 2^-e)); finest is
//   127 * 2^3, or 32512 with two planes.
// Shapes/dtypes: x (M, K) f32, rows x_stride elements apart, 16-byte aligned; for each group of
//   TOKENS tokens: codes (K / 32, TOKEN_TILES, 32) Fragment, d (K / 256, TOKENS) f32,
//   exponents (K / 256, TOKENS) u16, two bits for each 32, sums (K / 256, TOKEN_TILES, 32)
//   Fragment: sum(q) << e of the 16 runs of 16, cut in signed bytes, s = 256 * high + low; lane
//   4 g + t has runs 4 t .. 4 t + 3 of token g: low bytes, high bytes, for each plane.
// Launch: grid (ceil(K / 1024), ceil(M / TOKENS) * TOKENS), block 128. K a multiple of 256.
// Defines: PLANES 1 | 2, TOKEN_TILES 1 | 2 | 4.
// Accumulates in: int32 sums; a row's result depends on the row alone.
// Reads/writes: M K 4 read; M K (PLANES * 9 / 8 + 6 / 256) written.
// Twin: ops.cpu.quantize_rows, layout q256 (docs/NUMERICS.md, 2).
// Source: own contract; see spec of the packed products.
#include "common/quantize256.cuh"

extern "C" __global__ void __launch_bounds__(128)
quantize_q256(const float* __restrict__ x, i64 x_stride, Fragment* __restrict__ codes,
              float* __restrict__ d, u16* __restrict__ exponents, Fragment* __restrict__ sums,
              int m, int k) {
  int unit = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  int units = k / 256, token = blockIdx.y;
  if (unit >= units) return;                           // whole warps leave
  float v[8];
  load_eight(x + token * x_stride + 256 * unit + 8 * lane, token < m, v);
  quantize_span256(v, token, unit, units, codes, d, exponents, sums);
}
