// Computes: out[r, h] = x[r, h] / sqrt(sum(x[r, h]^2) + eps).
// Shapes/dtypes: out, x (R, H, D) f32, the heads of a row side by side, rows out_stride and x_stride
//   elements apart, may be the same array.
// Launch: D <= 256: grid (ceil(H / 8), R), block 256 (a warp a head); else grid (H, R), block 256
//   (a block a head). One kernel for each, chosen by D alone.
// Defines: none.
// Accumulates in: float32 in 32 or 256 lanes, lane l the elements l, l + lanes, ... in order, then
//   a halving tree; independent of R and H.
// Reads/writes: R H D 4 read twice (the second time from cache), R H D 4 written.
// Twin: ops.cpu.l2_norm (docs/NUMERICS.md, 9).
// Source: own order.
#include "common/norm.cuh"

__device__ __forceinline__ void scale_head(float* out, const float* x, int d, float factor, int lane,
                                           int lanes) {
  for (int i = lane; i < d; i += lanes) out[i] = mul_rn(x[i], factor);
}

extern "C" __global__ void __launch_bounds__(256)
l2_norm_short(float* out, i64 out_stride, const float* x, i64 x_stride, int n_heads, int d,
              float eps) {
  int head = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (head >= n_heads) return;                         // whole warps leave
  i64 row = blockIdx.y;
  x += row * x_stride + head * d;
  float factor = root_factor(warp_sum(x, d, lane), eps);
  scale_head(out + row * out_stride + head * d, x, d, factor, lane, 32);
}

extern "C" __global__ void __launch_bounds__(256)
l2_norm_long(float* out, i64 out_stride, const float* x, i64 x_stride, int d, float eps) {
  __shared__ float acc[256];
  i64 row = blockIdx.y, shift = static_cast<i64>(blockIdx.x) * d;
  x += row * x_stride + shift;
  float factor = root_factor(block_sum(x, d, acc), eps);
  scale_head(out + row * out_stride + shift, x, d, factor, threadIdx.x, 256);
}
