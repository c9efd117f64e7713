// The float operations of docs/NUMERICS.md: each rounds once, nearest even, and is never contracted
// (an intrinsic is not, whatever -fmad says). Subnormals are flushed: -ftz=true.
#pragma once

__device__ __forceinline__ float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float add_rn(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub_rn(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float div_rn(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float sqrt_rn(float a) { return __fsqrt_rn(a); }
__device__ __forceinline__ float from_int(int a) { return __int2float_rn(a); }
__device__ __forceinline__ float bf16_to_float(unsigned bits) {
  return __uint_as_float(bits << 16);
}
__device__ __forceinline__ float quiet_nan() { return __uint_as_float(0x7fc00000u); }
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
// x > y ? x : y. A NaN in x gives y, on both sides; fmaxf would order zeros and NaNs its own way.
__device__ __forceinline__ float larger(float x, float y) { return x > y ? x : y; }
// Signed byte `i` of a word.
__device__ __forceinline__ int signed_byte(unsigned word, int i) {
  return static_cast<signed char>(word >> (8 * i));
}

// Values of four non-linear codes (low 16 bits of `codes`) as bytes; ggml's kvalues_iq4nl.
__device__ __forceinline__ unsigned iq4_values(unsigned codes) {
  unsigned low = __byte_perm(0xbfad9881u, 0xf6eaddcfu, codes & 0x7777u);
  unsigned high = __byte_perm(0x26190d01u, 0x71594535u, codes & 0x7777u);
  return __byte_perm(low, high, 0x3210u | (codes & 0x8888u) >> 1);
}
