// exp and its relatives, step by step as cudflash/ops/cpu/special.py has them: the same bits.
// Only IEEE operations, fma, bit moves and comparisons; no branch. Errors and ranges: special.py.
#pragma once
#include "numerics.cuh"

// Coefficients are special.py's floats, written exactly (hexadecimal).
__device__ __forceinline__ float exp_f32(float x) {
  const float round = 0x1.8p+23f;                      // leaves the integer in the low bits
  float t = fma_rn(x, 0x1.715476p+0f, round);
  float n = sub_rn(t, round);
  float r = fma_rn(n, -0x1.62e430p-1f, x);
  r = fma_rn(n, 0x1.05c610p-29f, r);
  float q = 0x1.6d43b4p-10f;
  q = fma_rn(q, r, 0x1.120be8p-7f);
  q = fma_rn(q, r, 0x1.5554e8p-5f);
  q = fma_rn(q, r, 0x1.5554dcp-3f);
  q = fma_rn(q, r, 0.5f);
  float p = add_rn(fma_rn(mul_rn(r, r), q, r), 1.0f);
  float y = __uint_as_float(__float_as_uint(p) + (__float_as_uint(t) << 23));
  y = x < -87.0f ? 0.0f : y;
  y = 0x1.62e42ep+6f < x ? infinity() : y;
  return x != x ? quiet_nan() : y;
}

__device__ __forceinline__ float sigmoid_f32(float x) {
  return div_rn(1.0f, add_rn(1.0f, exp_f32(-x)));
}

__device__ __forceinline__ float silu_f32(float x) {
  return div_rn(x, add_rn(1.0f, exp_f32(-x)));
}

__device__ __forceinline__ float tanh_f32(float x) {
  float a = fabsf(x), z = mul_rn(x, x);
  float p = -0x1.901808p-8f;
  p = fma_rn(p, z, 0x1.581fa8p-6f);
  p = fma_rn(p, z, -0x1.b928e0p-5f);
  p = fma_rn(p, z, 0x1.110e2ep-3f);
  p = fma_rn(p, z, -0x1.555552p-2f);
  float small = fma_rn(mul_rn(a, z), p, a);
  float e = exp_f32(add_rn(a, a));
  float large = sub_rn(1.0f, div_rn(2.0f, add_rn(e, 1.0f)));
  float y = a < 0.625f ? small : large;
  return __uint_as_float(__float_as_uint(y) | (__float_as_uint(x) & 0x80000000u));
}

__device__ __forceinline__ float softplus_f32(float x) {
  float t = exp_f32(-fabsf(x));
  float s = div_rn(t, add_rn(2.0f, t)), z = mul_rn(s, s);
  float p = 0x1.131faap-2f;
  p = fma_rn(p, z, 0x1.211da0p-2f);
  p = fma_rn(p, z, 0x1.99adb6p-2f);
  p = fma_rn(p, z, 0x1.55554cp-1f);
  float log1p = fma_rn(mul_rn(s, z), p, add_rn(s, s));
  return add_rn(0.0f < x ? x : 0.0f, log1p);
}

__device__ __forceinline__ float gelu_tanh_f32(float x) {
  float inner = fma_rn(mul_rn(x, x), 0x1.6e4e26p-5f, 1.0f);
  float doubled = mul_rn(mul_rn(x, 0x1.988454p+0f), inner);
  return div_rn(x, add_rn(1.0f, exp_f32(-doubled)));
}

__device__ __forceinline__ float softcap_f32(float x, float cap) {
  return mul_rn(cap, tanh_f32(div_rn(x, cap)));
}
