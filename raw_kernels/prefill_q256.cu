// Computes: what matmul_q256.cu computes, for many tokens: a warp takes 16 * ROW_TILES rows and
//   8 * TOKEN_TILES tokens through all of K, so that a weight is unpacked once for all of them.
// Shapes/dtypes: as matmul_q256.cu.
// Launch: grid (ceil(N / ROWS), ceil(M / TOKENS)), block 32 * ROW_GROUPS;
//   ROWS = 16 * ROW_TILES * ROW_GROUPS.
// Defines: FORMAT (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS), PLANES 1 | 2, TOKEN_TILES 1 | 2 | 4,
//   ROW_TILES 1 | 2, ROW_GROUPS 1 .. 8, SLICES 8 | 16 (16 from K = 16,384).
// Accumulates in: as matmul_q256.cu; a finished slice is added to the sum of those before it.
// Reads/writes: weights once for each group of tokens, activations once for each warp (from cache
//   for all but the first of a block).
// Twin: ops.cpu.matmul (docs/NUMERICS.md, 3).
// Source: own.
#include "common/product256.cuh"

// ptxas: with a stated minimum of blocks it hoists loads up to 255 registers and spills (sm_120);
// without one (0) it spills on sm_75.
#if PLANES == 2 && __CUDA_ARCH__ >= 800
#define MIN_BLOCKS 0
#else
#define MIN_BLOCKS 1
#endif

extern "C" __global__ void __launch_bounds__(32 * ROW_GROUPS, MIN_BLOCKS)
prefill_q256(float* __restrict__ out, i64 out_stride, const u8* __restrict__ tiles,
             const Fragment* __restrict__ codes, const float* __restrict__ d,
             const u16* __restrict__ exponents, const Fragment* __restrict__ sums, int m, int n,
             int k) {
  int lane = threadIdx.x & 31, units = k / 256, n_tiles = (n + 15) / 16;
  int tile = (blockIdx.x * ROW_GROUPS + (threadIdx.x >> 5)) * ROW_TILES;
  if (tile >= n_tiles) return;                         // whole warps leave; there is no barrier
  i64 tile_stride = static_cast<i64>(units) * FORMAT::kTileBytes;
  tiles += tile * tile_stride;
  if (tile + ROW_TILES > n_tiles) tile_stride = 0;     // the last tile again, not stored
  i64 first_unit = static_cast<i64>(blockIdx.y) * units;
  codes += first_unit * 8 * TOKEN_TILES * 32 + lane;
  sums += first_unit * TOKEN_TILES * 32 + lane;
  d += first_unit * TOKENS, exponents += first_unit * TOKENS;
  float total[ROW_TILES][TOKEN_TILES][4] = {};
  int u = 0;
  for (int slice = 0; slice < SLICES; slice++) {
    float acc[ROW_TILES][TOKEN_TILES][4] = {};
    for (int last = slice_begin(units, slice + 1); u < last; u++) {
      add_unit(tiles, tile_stride, codes, d, exponents, sums, acc);
      tiles += FORMAT::kTileBytes, codes += 8 * TOKEN_TILES * 32, sums += TOKEN_TILES * 32;
      d += TOKENS, exponents += TOKENS;
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) total[i][j][e] = add_rn(total[i][j][e], acc[i][j][e]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) {
      store_fragment(total[i][j], out, out_stride, 16 * (tile + i), n,
                     blockIdx.y * TOKENS + 8 * j, m);
    }
  }
}
