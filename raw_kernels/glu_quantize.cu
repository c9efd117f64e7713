// Computes: the int8 rows of silu(gate) * up (swiglu_quantize), gelu_tanh(gate) * up
//   (geglu_quantize) or sigmoid(gate) * x (sigmoid_gate_quantize); the product itself is not stored.
// Shapes/dtypes: gate, up or x (M, K) f32, rows their stride in elements apart, 16-byte aligned; the
//   scratch as quantize_q32 and quantize_q256 have it.
// Launch: grid (ceil(K / 1024), ceil(M / TOKENS) * TOKENS), block 128. K a multiple of LAYOUT.
// Defines: LAYOUT 32 | 256, PLANES 1 | 2, TOKEN_TILES 1 | 2 | 4.
// Accumulates in: as the op without quantisation, then as the quantisation alone: the bits of one after the
//   other.
// Reads/writes: M K 8 read; the int8 rows written.
// Twin: ops.cpu.swiglu_quantize, geglu_quantize, sigmoid_gate_quantize (docs/NUMERICS.md, 2 and 4).
// Source: own order.
#include "common/quantize_rows.cuh"
#include "common/special.cuh"

// Eight products of a lane; zeros where there is no token or no value.
template <float (*ACTIVATE)(float)>
__device__ __forceinline__ void products(const float* gate, const float* up, bool exists,
                                         float (&v)[8]) {
  float u[8];
  load_eight(gate, exists, v);
  load_eight(up, exists, u);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = exists ? mul_rn(ACTIVATE(v[i]), u[i]) : 0.0f;
}

#define QUANTIZE(activate)                                                                     \
  int span = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, token = blockIdx.y; \
  if (span * 256 >= k) return; /* whole warps leave */                                         \
  int at = 256 * span + 8 * lane;                                                              \
  float v[8];                                                                                  \
  products<activate>(gate + token * gate_stride + at, up + token * up_stride + at,             \
                     token < m && at < k, v);                                                  \
  quantize_span(v, token, span, k / LAYOUT)

extern "C" __global__ void __launch_bounds__(128)
swiglu_quantize(SCRATCH, const float* __restrict__ gate, i64 gate_stride,
                const float* __restrict__ up, i64 up_stride, int m, int k) {
  QUANTIZE(silu_f32);
}

extern "C" __global__ void __launch_bounds__(128)
geglu_quantize(SCRATCH, const float* __restrict__ gate, i64 gate_stride,
               const float* __restrict__ up, i64 up_stride, int m, int k) {
  QUANTIZE(gelu_tanh_f32);
}

extern "C" __global__ void __launch_bounds__(128)
sigmoid_gate_quantize(SCRATCH, const float* __restrict__ gate, i64 gate_stride,
                      const float* __restrict__ up, i64 up_stride, int m, int k) {
  QUANTIZE(sigmoid_f32);
}
