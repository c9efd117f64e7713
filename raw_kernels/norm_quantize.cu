// Computes: the int8 rows of h[r] = (x[r] / sqrt(mean(x[r]^2) + eps)) * weight, or without the
//   weight; h itself only where it is asked for.
// Shapes/dtypes: x (M, K) f32, rows x_stride elements apart; h (M, K) f32 or null, rows h_stride
//   apart; weight (K,) f32 or null; all 16-byte aligned; the scratch as quantize_q32 and
//   quantize_q256 have it.
// Launch: grid ceil(M / TOKENS) * TOKENS, block 256. K a multiple of LAYOUT.
// Defines: LAYOUT 32 | 256, PLANES 1 | 2, TOKEN_TILES 1 | 2 | 4.
// Accumulates in: as rms_norm, then as the quantisation alone: the bits of one after the other.
// Reads/writes: M K 4 read twice (the second time from cache); the int8 rows written.
// Twin: ops.cpu.norm_quantize (docs/NUMERICS.md, 2 and 4).
// Source: own order.
#include "common/norm.cuh"
#include "common/quantize_rows.cuh"

extern "C" __global__ void __launch_bounds__(256)
norm_quantize(SCRATCH, float* __restrict__ h, i64 h_stride, const float* __restrict__ x,
              i64 x_stride, const float* __restrict__ weight, int m, int k, float eps) {
  __shared__ float acc[256];
  int token = blockIdx.x, lane = threadIdx.x & 31;
  float factor = 0.0f;
  if (token < m) {                                     // the block as one
    x += token * x_stride;
    float sum = k <= 256 ? warp_sum(x, k, lane) : block_sum(x, k, acc);
    factor = rms_factor(sum, k, eps);
  }
  for (int span = threadIdx.x >> 5; span * 256 < k; span += 8) {
    int at = 256 * span + 8 * lane;
    bool exists = token < m && at < k;
    float v[8], w[8];
    load_eight(x + at, exists, v);
    load_eight(weight + at, exists && weight, w);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      v[i] = mul_rn(v[i], factor);
      if (weight) v[i] = mul_rn(v[i], w[i]);
    }
    if (h && exists) {
      float4* to = reinterpret_cast<float4*>(h + token * h_stride + at);
      to[0] = make_float4(v[0], v[1], v[2], v[3]);
      to[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
    quantize_span(v, token, span, k / LAYOUT);
  }
}
