// Sum of squares of a row in the order of docs/NUMERICS.md, 4: 32 or 256 lanes, lane l the elements
// l, l + lanes, ... in order, then a halving tree.
#pragma once
#include "numerics.cuh"
#include "types.cuh"

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

// Sum over a row by one warp; every lane gets it.
__device__ __forceinline__ float warp_sum(const float* x, int d, int lane) {
  return __shfl_sync(~0u, warp_tree(lane_sum(x, d, lane, 32)), 0);
}

// Sum over a row by a block of 256 threads; every thread gets it. `acc` is shared, 256 floats.
__device__ __forceinline__ float block_sum(const float* x, int d, float* acc) {
  int lane = threadIdx.x;
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
  return acc[0];
}

__device__ __forceinline__ float root_factor(float value, float eps) {
  return div_rn(1.0f, sqrt_rn(add_rn(value, eps)));
}

__device__ __forceinline__ float rms_factor(float sum, int d, float eps) {
  return root_factor(div_rn(sum, from_int(d)), eps);
}
