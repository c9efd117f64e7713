// Element `e` of a raw block as a float, in ggml's order of operations (ggml-quants.c): products
// d * scale and dmin * min first, each rounded, then the product with the code, then the minimum.
#pragma once
#include "numerics.cuh"
#include "ptx.cuh"
#include "types.cuh"

__device__ __forceinline__ float half_at(const u8* p) {
  return half_to_float(*reinterpret_cast<const u16*>(p));
}
// Low nibbles of 16 bytes, then their high nibbles.
__device__ __forceinline__ int nibble(const u8* qs, int e) {
  return qs[e % 16] >> (4 * (e / 16)) & 15;
}
__device__ __forceinline__ int fifth_bit(const u8* qh, int e) {
  return (qh[e / 8] >> (e % 8) & 1) << 4;
}
// Value of a non-linear code.
__device__ __forceinline__ float iq4_value(int code) {
  return from_int(signed_byte(iq4_values(code), 0));
}
// Codes of two bits: four runs of 32 in each 32 bytes.
__device__ __forceinline__ int two_bits(const u8* qs, int e) {
  return qs[e / 128 * 32 + e % 32] >> (2 * (e % 128 / 32)) & 3;
}
// 6-bit scale and minimum of sub-block j.
__device__ __forceinline__ void scale_min(const u8* s, int j, int& scale, int& min) {
  if (j < 4) {
    scale = s[j] & 63, min = s[j + 4] & 63;
  } else {
    scale = (s[j + 4] & 15) | s[j - 4] >> 6 << 4, min = s[j + 4] >> 4 | s[j] >> 6 << 4;
  }
}
__device__ __forceinline__ float with_min(float d, float dmin, int scale, int min, int code) {
  return sub_rn(mul_rn(mul_rn(d, from_int(scale)), from_int(code)), mul_rn(dmin, from_int(min)));
}

#define EXPANDED(NAME, BLOCK, BYTES)                   \
  struct NAME {                                        \
    static const int kBlock = BLOCK, kBytes = BYTES;   \
    static __device__ float value(const u8* w, int e); \
  };                                                   \
  __device__ __forceinline__ float NAME::value(const u8* w, int e)

EXPANDED(F32, 1, 4) { return *reinterpret_cast<const float*>(w); }
EXPANDED(F16, 1, 2) { return half_at(w); }
EXPANDED(BF16, 1, 2) { return bf16_to_float(*reinterpret_cast<const u16*>(w)); }
EXPANDED(Q4_0, 32, sizeof(block_q4_0)) {
  return mul_rn(from_int(nibble(w + 2, e) - 8), half_at(w));
}
EXPANDED(Q4_1, 32, sizeof(block_q4_1)) {
  return add_rn(mul_rn(from_int(nibble(w + 4, e)), half_at(w)), half_at(w + 2));
}
EXPANDED(Q5_0, 32, sizeof(block_q5_0)) {
  return mul_rn(from_int((nibble(w + 6, e) | fifth_bit(w + 2, e)) - 16), half_at(w));
}
EXPANDED(Q5_1, 32, sizeof(block_q5_1)) {
  int code = nibble(w + 8, e) | fifth_bit(w + 4, e);
  return add_rn(mul_rn(from_int(code), half_at(w)), half_at(w + 2));
}
EXPANDED(Q8_0, 32, sizeof(block_q8_0)) {
  return mul_rn(from_int(static_cast<i8>(w[2 + e])), half_at(w));
}
EXPANDED(IQ4_NL, 32, sizeof(block_iq4_nl)) {
  return mul_rn(half_at(w), iq4_value(nibble(w + 2, e)));
}
EXPANDED(Q2_K, 256, sizeof(block_q2_K)) {
  int scales = w[e / 16];
  return with_min(half_at(w + 80), half_at(w + 82), scales & 15, scales >> 4, two_bits(w + 16, e));
}
EXPANDED(Q3_K, 256, sizeof(block_q3_K)) {
  int g = e / 16, low = w[96 + g % 8] >> (4 * (g / 8)) & 15;
  int high = w[104 + g % 4] >> (2 * (g / 4)) & 3;
  int third = w[e % 32] >> (e / 128 * 4 + e % 128 / 32) & 1;
  float d = mul_rn(half_at(w + 108), from_int((low | high << 4) - 32));
  return mul_rn(d, from_int(two_bits(w + 32, e) - 4 * (1 - third)));
}
EXPANDED(Q4_K, 256, sizeof(block_q4_K)) {
  int scale, min, j = e / 32, code = w[16 + j / 2 * 32 + e % 32] >> (4 * (j % 2)) & 15;
  scale_min(w + 4, j, scale, min);
  return with_min(half_at(w), half_at(w + 2), scale, min, code);
}
EXPANDED(Q5_K, 256, sizeof(block_q5_K)) {
  int scale, min, j = e / 32, code = w[48 + j / 2 * 32 + e % 32] >> (4 * (j % 2)) & 15;
  scale_min(w + 4, j, scale, min);
  code |= (w[16 + e % 32] >> j & 1) << 4;
  return with_min(half_at(w), half_at(w + 2), scale, min, code);
}
EXPANDED(Q6_K, 256, sizeof(block_q6_K)) {
  int h = e / 128, t = e % 128 / 32, i = e % 32;
  int low = w[64 * h + i + 32 * (t & 1)] >> (4 * (t / 2)) & 15;
  int high = w[128 + 32 * h + i] >> (2 * t) & 3;
  float d = mul_rn(half_at(w + 208), from_int(static_cast<i8>(w[192 + e / 16])));
  return mul_rn(d, from_int((low | high << 4) - 32));
}
EXPANDED(IQ4_XS, 256, sizeof(block_iq4_xs)) {
  int j = e / 32, low = w[4 + j / 2] >> (4 * (j % 2)) & 15, highs = w[2] | w[3] << 8;
  float d = mul_rn(half_at(w), from_int((low | (highs >> (2 * j) & 3) << 4) - 32));
  return mul_rn(d, iq4_value(nibble(w + 8 + 16 * j, e % 32)));
}
