// Computes: out[r] = W x[r]; per 256 values, in int32, s = sum_j scale_j * (sum(code * q) << e_j)
//   and t = sum_j min_j * (sum(q) << e_j); acc = fma(v(s), d_w * d, acc), with minima then
//   acc = fma(-v(t), dmin_w * d, acc); v is f32, or fma(f32(s_high), 256, f32(s_low)).
// Shapes/dtypes: out (M, N) f32, rows out_stride elements apart; tiles from retile; codes, d,
//   exponents and sums from quantize_q256.
// Launch: grid (ceil(N / ROWS), ceil(M / TOKENS)), block 256 * ROW_GROUPS;
//   ROWS = 16 * ROW_TILES * ROW_GROUPS.
// Defines: FORMAT (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS), PLANES 1 | 2, TOKEN_TILES 1 | 2,
//   ROW_TILES 1 | 2, ROW_GROUPS 1 | 2, SLICES 8 | 16 (16 from K = 16,384, then ROWS <= 32).
// Accumulates in: int32 by tensor cores, then float32, units of a slice in order, slices in order;
//   a row's result depends on the row and K alone.
// Reads/writes: N K kTileBytes / 4096 of weights once for each group of tokens; activations once
//   for each block of rows.
// Twin: ops.cpu.matmul (docs/NUMERICS.md, 3).
// Source: own; blocks as in ggml ggml-common.h.
#include "common/product256.cuh"

// ptxas: without a stated minimum of blocks (0) it keeps to 128 registers and spills in the lighter
// builds; with one it hoists loads up to 255 and spills in the heaviest.
#define MIN_BLOCKS (PLANES * TOKEN_TILES == 4 && (FORMAT::kHasMin || FORMAT::kSub == 16) ? 0 : 1)

extern "C" __global__ void __launch_bounds__(256 * ROW_GROUPS, MIN_BLOCKS)
matmul_q256(float* __restrict__ out, i64 out_stride, const u8* __restrict__ tiles,
            const Fragment* __restrict__ codes, const float* __restrict__ d,
            const u16* __restrict__ exponents, const Fragment* __restrict__ sums, int m, int n,
            int k) {
  __shared__ float part[SLICES][ROWS][TOKENS + 1];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int group = warp / SLICE_WARPS, units = k / 256, n_tiles = (n + 15) / 16;
  i64 tile_stride = static_cast<i64>(units) * FORMAT::kTileBytes;
  // tiles past the last one: the last is computed again and nothing is stored
  int tile = min((static_cast<int>(blockIdx.x) * ROW_GROUPS + group) * ROW_TILES, n_tiles - 1);
  tiles += tile * tile_stride;
  if (tile + ROW_TILES > n_tiles) tile_stride = 0;
  i64 first_unit = static_cast<i64>(blockIdx.y) * units;
  codes += first_unit * 8 * TOKEN_TILES * 32 + lane;
  sums += first_unit * TOKEN_TILES * 32 + lane;
  d += first_unit * TOKENS, exponents += first_unit * TOKENS;
  for (int slice = warp % SLICE_WARPS; slice < SLICES; slice += SLICE_WARPS) {
    float acc[ROW_TILES][TOKEN_TILES][4] = {};
    int last = slice_begin(units, slice + 1);
    for (int u = slice_begin(units, slice); u < last; u++) {
      add_unit(tiles + static_cast<i64>(u) * FORMAT::kTileBytes, tile_stride,
               codes + u * 8 * TOKEN_TILES * 32, d + u * TOKENS, exponents + u * TOKENS,
               sums + u * TOKEN_TILES * 32, acc);
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int row = 16 * (group * ROW_TILES + i) + (lane >> 2) + 8 * (e >> 1);
          part[slice][row][8 * j + 2 * (lane & 3) + (e & 1)] = acc[i][j][e];
        }
      }
    }
  }
  __syncthreads();
  add_slices(part, TOKENS, out, out_stride, blockIdx.x * ROWS, n, blockIdx.y * TOKENS, m);
}
