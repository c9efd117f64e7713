// Computes: out[r] = W x[r]; per 32 values s = sum(code * q) in int32, acc = fma(f32(s), d_w * d,
//   acc), with minima then acc = fma(m_w, sum, acc).
// Shapes/dtypes: out (M, N) f32, rows out_stride elements apart; tiles from retile; codes, d, start
//   and sum from quantize_q32.
// Launch: grid (ceil(N / ROWS), ceil(M / TOKENS)), block 256 * ROW_GROUPS; ROWS = 32 * ROW_GROUPS.
// Defines: FORMAT (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL), PLANES 1 | 2, TOKEN_TILES 1 | 2,
//   ROW_GROUPS 1 | 2, SLICES 8 | 16 (16 from K = 16,384, then ROW_GROUPS 1).
// Accumulates in: int32 by tensor cores, then float32, units of a slice in order, slices in order;
//   a row's result depends on the row and K alone.
// Reads/writes: N K kTileBytes / 1024 of weights once for each group of tokens; activations once
//   for each block of rows.
// Twin: ops.cpu.matmul (docs/NUMERICS.md, 3).
// Source: own; blocks as in ggml ggml-common.h.
#include "common/product32.cuh"

extern "C" __global__ void __launch_bounds__(256 * ROW_GROUPS, 1)
matmul_q32(float* __restrict__ out, i64 out_stride, const u8* __restrict__ tiles,
           const Fragment* __restrict__ codes, const float* __restrict__ d,
           const int* __restrict__ start, const float* __restrict__ sum, int m, int n, int k) {
  __shared__ float part[SLICES][ROWS][TOKENS + 1];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t2 = 2 * (lane & 3);
  int group = warp / SLICE_WARPS, units = k / 32;
  // a group past the last tile computes the last one again and stores nothing
  i64 tile = min(static_cast<int>(blockIdx.x) * ROW_GROUPS + group, (n + 31) / 32 - 1);
  tiles += tile * units * FORMAT::kTileBytes;
  i64 first_unit = static_cast<i64>(blockIdx.y) * units;
  codes += first_unit * TOKEN_TILES * 32 + lane;
  d += first_unit * TOKENS + t2, start += first_unit * TOKENS + t2, sum += first_unit * TOKENS + t2;
  for (int slice = warp % SLICE_WARPS; slice < SLICES; slice += SLICE_WARPS) {
    float acc[2][TOKEN_TILES][4] = {};
    int last = slice_begin(units, slice + 1);
#pragma unroll 4
    for (int u = slice_begin(units, slice); u < last; u++) {
      add_unit(tiles + static_cast<i64>(u) * FORMAT::kTileBytes, codes + u * TOKEN_TILES * 32,
               d + u * TOKENS, start + u * TOKENS, sum + u * TOKENS, acc);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int row = 32 * group + 16 * i + (lane >> 2) + 8 * (e >> 1);
          part[slice][row][8 * j + t2 + (e & 1)] = acc[i][j][e];
        }
      }
    }
  }
  __syncthreads();
  add_slices(part, TOKENS, out, out_stride, blockIdx.x * ROWS, n, blockIdx.y * TOKENS, m);
}
