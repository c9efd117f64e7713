// Computes: decay = exp(a * softplus(alpha + dt)), beta = sigmoid(b), every element alone.
// Shapes/dtypes: decay, beta, alpha, b (M, H) f32, rows their stride in elements apart, decay may
//   be alpha and beta may be b; a, dt (H,) f32.
// Launch: grid (ceil(H / 64), M), block 64.
// Defines: none.
// Accumulates in: nothing; one rounding for each written operation.
// Reads/writes: M H 16.
// Twin: ops.cpu.delta_gates.
// Source: own; gates of the gated delta net, Yang et al., arXiv 2412.06464.
#include "common/special.cuh"
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(64)
delta_gates(float* decay, i64 decay_stride, float* beta, i64 beta_stride, const float* alpha,
            i64 alpha_stride, const float* b, i64 b_stride, const float* __restrict__ a,
            const float* __restrict__ dt, int n_heads) {
  int h = blockIdx.x * 64 + threadIdx.x;
  i64 row = blockIdx.y;
  if (h >= n_heads) return;
  float rate = softplus_f32(add_rn(alpha[row * alpha_stride + h], dt[h]));
  float written = sigmoid_f32(b[row * b_stride + h]);
  decay[row * decay_stride + h] = exp_f32(mul_rn(a[h], rate));
  beta[row * beta_stride + h] = written;
}
