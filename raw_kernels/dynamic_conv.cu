// Computes: out[t, c] = sum over taps o <= t of (base[o, c] + dyn[t, o, c / group]) * x[t - o, c]
//   for one side's taps: the first product rounded, then fma for o = 1, 2, ...; each sum rounded.
// Shapes/dtypes: out, x (B, C) f32 in different memory, dyn (B, 2 * n_taps * C / group) f32 in the
//   order side, tap, group, rows their stride in elements apart; base (2, n_taps, C) f32.
// Launch: grid (ceil(C / 256), B), block 256; first = side * n_taps.
// Defines: none.
// Accumulates in: float32, taps in ascending order; a row sees itself and the rows before it.
// Reads/writes: B C 4 written, x and base once for each tap (from cache after the first).
// Twin: ops.cpu.dynamic_conv.
// Source: own order.
#include "common/numerics.cuh"
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(256)
dynamic_conv(float* __restrict__ out, i64 out_stride, const float* __restrict__ x, i64 x_stride,
             const float* __restrict__ dyn, i64 dyn_stride, const float* __restrict__ base,
             int width, int n_taps, int first, int group) {
  int c = blockIdx.x * 256 + threadIdx.x, t = blockIdx.y, n_groups = width / group;
  if (c >= width) return;
  x += t * x_stride + c;
  dyn += t * dyn_stride + static_cast<i64>(first) * n_groups + c / group;
  base += static_cast<i64>(first) * width + c;
  float acc = mul_rn(add_rn(*base, *dyn), *x);
  for (int o = 1; o < min(n_taps, t + 1); o++) {
    float k = add_rn(base[static_cast<i64>(o) * width], dyn[o * n_groups]);
    acc = fma_rn(k, x[-o * x_stride], acc);
  }
  out[t * out_stride + c] = acc;
}
