// Computes: what matmul_q32.cu computes, for many tokens: a warp takes 32 rows and 8 * TOKEN_TILES
//   tokens through all of K, so that a weight is unpacked once for all of them.
// Shapes/dtypes: as matmul_q32.cu.
// Launch: grid (ceil(N / ROWS), ceil(M / TOKENS)), block 32 * ROW_GROUPS; ROWS = 32 * ROW_GROUPS.
// Defines: FORMAT (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL), PLANES 1 | 2, TOKEN_TILES 1 | 2 | 4,
//   ROW_GROUPS 1 .. 8, SLICES 8 | 16 (16 from K = 16,384).
// Accumulates in: as matmul_q32.cu; a finished slice is added to the sum of those before it.
// Reads/writes: weights once for each group of tokens, activations once for each warp (from cache
//   for all but the first of a block).
// Twin: ops.cpu.matmul (docs/NUMERICS.md, 3).
// Source: own.
#include "common/product32.cuh"

extern "C" __global__ void __launch_bounds__(32 * ROW_GROUPS, 1)
prefill_q32(float* __restrict__ out, i64 out_stride, const u8* __restrict__ tiles,
            const Fragment* __restrict__ codes, const float* __restrict__ d,
            const int* __restrict__ start, const float* __restrict__ sum, int m, int n, int k) {
  int lane = threadIdx.x & 31, units = k / 32, t2 = 2 * (lane & 3);
  i64 tile = static_cast<int>(blockIdx.x) * ROW_GROUPS + (threadIdx.x >> 5);
  if (tile >= (n + 31) / 32) return;                   // whole warps leave; there is no barrier
  tiles += tile * units * FORMAT::kTileBytes;
  i64 first_unit = static_cast<i64>(blockIdx.y) * units;
  codes += first_unit * TOKEN_TILES * 32 + lane;
  d += first_unit * TOKENS + t2, start += first_unit * TOKENS + t2, sum += first_unit * TOKENS + t2;
  float total[2][TOKEN_TILES][4] = {};
  int u = 0;
  for (int slice = 0; slice < SLICES; slice++) {
    float acc[2][TOKEN_TILES][4] = {};
    for (int last = slice_begin(units, slice + 1); u < last; u++) {
      add_unit(tiles, codes, d, start, sum, acc);
      tiles += FORMAT::kTileBytes, codes += TOKEN_TILES * 32;
      d += TOKENS, start += TOKENS, sum += TOKENS;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) total[i][j][e] = add_rn(total[i][j][e], acc[i][j][e]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) {
      store_fragment(total[i][j], out, out_stride, static_cast<int>(32 * tile) + 16 * i, n,
                     blockIdx.y * TOKENS + 8 * j, m);
    }
  }
}
