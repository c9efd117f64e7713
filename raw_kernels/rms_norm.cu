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
#include "common/numerics.cuh"
#include "common/types.cuh"

// Sum of squares of the elements lane, lane + lanes, ...
__device__ __forceinline__ float lane_sum(const float* x, int d, int lane, int lanes) {
  float acc = 0.0f;
  for (int i = lane; i < d; i += lanes) acc = fma_rn(x[i], x[i], acc);
  return acc;
}

// Halving tree over a warp; lane 0 holds the sum.
__device__ __forceinline__ float warp_tree(float acc) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    acc = add_rn(acc, __shfl_down_sync(~0u, acc, half));
  }
  return acc;
}

__device__ __forceinline__ float factor_of(float sum, int d, float eps) {
  return div_rn(1.0f, sqrt_rn(add_rn(div_rn(sum, from_int(d)), eps)));
}

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
  float sum = __shfl_sync(~0u, warp_tree(lane_sum(x, d, lane, 32)), 0);
  scale_row(out + row * out_stride, x, weight, d, factor_of(sum, d, eps), lane, 32);
}

extern "C" __global__ void __launch_bounds__(256)
rms_norm_long(float* out, i64 out_stride, const float* x, i64 x_stride, const float* weight, int d,
              float eps) {
  __shared__ float acc[256];
  int lane = threadIdx.x;
  x += static_cast<i64>(blockIdx.x) * x_stride;
  acc[lane] = lane_sum(x, d, lane, 256);
  __syncthreads();
#pragma unroll
  for (int half = 128; half >= 32; half /= 2) {
    if (lane < half) acc[lane] = add_rn(acc[lane], acc[lane + half]);
    __syncthreads();
  }
  if (lane < 32) {
    float sum = warp_tree(acc[lane]);
    if (lane == 0) acc[0] = sum;
  }
  __syncthreads();
  scale_row(out + static_cast<i64>(blockIdx.x) * out_stride, x, weight, d,
            factor_of(acc[0], d, eps), lane, 256);
}
