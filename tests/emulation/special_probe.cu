// Applies each special function of common/special.cuh to n floats, one thread each.
#include "common/special.cuh"

extern "C" __global__ void probe_exp(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = exp_f32(x[i]);
}
extern "C" __global__ void probe_sigmoid(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = sigmoid_f32(x[i]);
}
extern "C" __global__ void probe_silu(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = silu_f32(x[i]);
}
extern "C" __global__ void probe_tanh(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = tanh_f32(x[i]);
}
extern "C" __global__ void probe_softplus(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = softplus_f32(x[i]);
}
extern "C" __global__ void probe_gelu_tanh(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = gelu_tanh_f32(x[i]);
}
