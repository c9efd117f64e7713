// Computes: out[r] = ((x[r] / sqrt(mean(x[r]^2) + eps)) * weight) * silu(z[r]).
// Shapes/dtypes: out, x, z (R, D) f32, rows their stride in elements apart, out may be x or z;
//   weight (D,) f32.
// Launch: D <= 256: grid ceil(R / 8), block 256 (a warp a row); else grid R, block 256 (a block a
//   row). One kernel for each, chosen by D alone.
// Defines: none.
// Accumulates in: float32 in 32 or 256 lanes, lane l the elements l, l + lanes, ... in order, then
//   a halving tree; independent of R.
// Reads/writes: R D 4 of x read twice (the second time from cache), of z once; R D 4 written.
// Twin: ops.cpu.gated_rms_norm (docs/NUMERICS.md, 9).
// Source: own order.
#include "common/norm.cuh"
#include "common/special.cuh"

__device__ __forceinline__ void gate_row(float* out, const float* x, const float* z,
                                         const float* weight, int d, float factor, int lane,
                                         int lanes) {
  for (int i = lane; i < d; i += lanes) {
    out[i] = mul_rn(mul_rn(mul_rn(x[i], factor), weight[i]), silu_f32(z[i]));
  }
}

extern "C" __global__ void __launch_bounds__(256)
gated_rms_norm_short(float* out, i64 out_stride, const float* x, i64 x_stride, const float* z,
                     i64 z_stride, const float* weight, int n_rows, int d, float eps) {
  int row = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= n_rows) return;                           // whole warps leave
  x += row * x_stride;
  float factor = rms_factor(warp_sum(x, d, lane), d, eps);
  gate_row(out + row * out_stride, x, z + row * z_stride, weight, d, factor, lane, 32);
}

extern "C" __global__ void __launch_bounds__(256)
gated_rms_norm_long(float* out, i64 out_stride, const float* x, i64 x_stride, const float* z,
                    i64 z_stride, const float* weight, int d, float eps) {
  __shared__ float acc[256];
  i64 row = blockIdx.x;
  x += row * x_stride;
  float factor = rms_factor(block_sum(x, d, acc), d, eps);
  gate_row(out + row * out_stride, x, z + row * z_stride, weight, d, factor, threadIdx.x, 256);
}
