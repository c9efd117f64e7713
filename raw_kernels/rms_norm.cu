// Computes: out[r] = (x[r] / sqrt(mean(x[r]^2) + eps)) * weight, or without the weight.
// Shapes/dtypes: out, x (R, D) f32, rows out_stride and x_stride elements apart, may be the same
//   array; weight (D,) f32 or null.
// Launch: D <= 256: grid ceil(R / 8), block 256 (a warp a row); else grid R, block 256 (a block a
//   row). One kernel for each, chosen by D alone.
// Defines: none.
// Accumulates in: float32 in 32 or 256 lanes, lane l the elements l, l + lanes, ... in order, then
//   a halving tree; independent of R.
// Reads/writes: R D 4 read twice (the second time from cache), R D 4 written.
// Twin: ops.cpu.rms_norm (docs/NUMERICS.md, 4).
// Source: own order.
#include "common/norm.cuh"

__device__ __forceinline__ void scale_row(float* out, const float* x, const float* weight, int d,
                                          float factor, int lane, int lanes) {
  for (int i = lane; i < d; i += lanes) {
    float v = mul_rn(x[i], factor);
    out[i] = weight ? mul_rn(v, weight[i]) : v;
  }
}

extern "C" __global__ void __launch_bounds__(256)
rms_norm_short(float* out, i64 out_stride, const float* x, i64 x_stride, const float* weight,
               int n_rows, int d, float eps) {
  int row = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= n_rows) return;                           // whole warps leave
  x += row * x_stride;
  float factor = rms_factor(warp_sum(x, d, lane), d, eps);
  scale_row(out + row * out_stride, x, weight, d, factor, lane, 32);
}

extern "C" __global__ void __launch_bounds__(256)
rms_norm_long(float* out, i64 out_stride, const float* x, i64 x_stride, const float* weight, int d,
              float eps) {
  __shared__ float acc[256];
  i64 row = blockIdx.x;
  x += row * x_stride;
  float factor = rms_factor(block_sum(x, d, acc), d, eps);
  scale_row(out + row * out_stride, x, weight, d, factor, threadIdx.x, 256);
}
