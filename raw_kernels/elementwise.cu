// Computes: out = f(x, y) or f(x, number), every element alone: copy x; add x + y; add_bias x + y
//   by column; scale x * number; softcap number * tanh(x / number); swiglu silu(x) * y; geglu
//   gelu_tanh(x) * y; sigmoid_gate x * sigmoid(y).
// Shapes/dtypes: out, x, y (M, N) f32, rows their stride in elements apart; out may be x or y;
//   add_bias: y (N,), y_stride 0. y is null where it is not used.
// Launch: grid (ceil(N / 256), M), block 256.
// Defines: none.
// Accumulates in: nothing; one rounding for each written operation.
// Reads/writes: M N 4 for each input and the output.
// Twin: ops.cpu.copy, add, add_bias, scale, softcap, swiglu, geglu, sigmoid_gate.
// Source: own; special functions in common/special.cuh.
#include "common/special.cuh"
#include "common/types.cuh"

// One element: its inputs and its place, null past the last column.
struct Element {
  float x, y;
  float* to;
};

#define ARGUMENTS                                                                              \
  float *out, i64 out_stride, const float *x, i64 x_stride, const float *y, i64 y_stride, int n, \
      float number
#define ELEMENT element(out, out_stride, x, x_stride, y, y_stride, n)

__device__ __forceinline__ Element element(float* out, i64 out_stride, const float* x, i64 x_stride,
                                           const float* y, i64 y_stride, int n) {
  int i = blockIdx.x * 256 + threadIdx.x;
  i64 row = blockIdx.y;
  if (i >= n) return {0.0f, 0.0f, nullptr};
  return {x[row * x_stride + i], y ? y[row * y_stride + i] : 0.0f, out + row * out_stride + i};
}

extern "C" __global__ void __launch_bounds__(256) copy_rows(ARGUMENTS) {
  Element e = ELEMENT;
  if (e.to) *e.to = e.x;
}

extern "C" __global__ void __launch_bounds__(256) add_rows(ARGUMENTS) {
  Element e = ELEMENT;
  if (e.to) *e.to = add_rn(e.x, e.y);
}

extern "C" __global__ void __launch_bounds__(256) add_bias_rows(ARGUMENTS) {
  Element e = ELEMENT;
  if (e.to) *e.to = add_rn(e.x, e.y);
}

extern "C" __global__ void __launch_bounds__(256) scale_rows(ARGUMENTS) {
  Element e = ELEMENT;
  if (e.to) *e.to = mul_rn(e.x, number);
}

extern "C" __global__ void __launch_bounds__(256) softcap_rows(ARGUMENTS) {
  Element e = ELEMENT;
  if (e.to) *e.to = softcap_f32(e.x, number);
}

extern "C" __global__ void __launch_bounds__(256) swiglu_rows(ARGUMENTS) {
  Element e = ELEMENT;
  if (e.to) *e.to = mul_rn(silu_f32(e.x), e.y);
}

extern "C" __global__ void __launch_bounds__(256) geglu_rows(ARGUMENTS) {
  Element e = ELEMENT;
  if (e.to) *e.to = mul_rn(gelu_tanh_f32(e.x), e.y);
}

extern "C" __global__ void __launch_bounds__(256) sigmoid_gate_rows(ARGUMENTS) {
  Element e = ELEMENT;
  if (e.to) *e.to = mul_rn(e.x, sigmoid_f32(e.y));
}
