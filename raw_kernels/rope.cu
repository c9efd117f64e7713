// Computes: for each pair (a, b) of the first n_dims values of a head: a' = fma(a, c, -(b * s)),
//   b' = fma(b, c, a * s); the other values stay. A position outside the table gives NaNs.
// Shapes/dtypes: x (M, H, D) f32 in place, rows x_stride elements apart; positions (M,) i32;
//   table (n_pos, n_dims / 2, 2) f32, cosine and sine, 8-byte aligned.
// Launch: grid (ceil(H * n_dims / 2 / 128), M), block 128. n_dims even.
// Defines: SPLIT_HALF 0 (pairs 2 i, 2 i + 1) | 1 (pairs i, i + n_dims / 2).
// Accumulates in: nothing; every pair alone.
// Reads/writes: M H n_dims 4 read and written, M n_dims 4 of the table.
// Twin: ops.cpu.rope (docs/NUMERICS.md, 4).
// Source: pairings as ggml's NORMAL and NEOX modes (ggml.h, enum of rope types).
#include "common/numerics.cuh"
#include "common/types.cuh"

#ifndef SPLIT_HALF
#error "SPLIT_HALF: 0 for interleaved pairs, 1 for halves"
#endif

extern "C" __global__ void __launch_bounds__(128)
rope(float* __restrict__ x, i64 x_stride, const int* __restrict__ positions,
     const float2* __restrict__ table, int n_pos, int n_heads, int d, int n_dims) {
  int n_pairs = n_dims / 2, i = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y;
  if (i >= n_heads * n_pairs) return;
  int head = i / n_pairs, pair = i % n_pairs, position = positions[row];
  float* a = x + row * x_stride + static_cast<i64>(head) * d + (SPLIT_HALF ? pair : 2 * pair);
  float* b = a + (SPLIT_HALF ? n_pairs : 1);
  if (position < 0 || position >= n_pos) {
    *a = *b = quiet_nan();
    return;
  }
  float2 cs = table[static_cast<i64>(position) * n_pairs + pair];
  float x0 = *a, x1 = *b;
  *a = fma_rn(x0, cs.x, -mul_rn(x1, cs.y));
  *b = fma_rn(x1, cs.x, mul_rn(x0, cs.y));
}
