// Steps of activation quantisation that both layouts share. A warp takes 256 values of one token,
// a lane 8 neighbours of them; four lanes hold a run of 32.
#pragma once
#include "activations.cuh"
#include "numerics.cuh"

#define LIMIT (PLANES == 2 ? 32512.0f : 127.0f)

// Largest magnitude over groups of `lanes` lanes, as bits: a NaN beats infinity.
__device__ __forceinline__ int largest_bits(int top, int lanes) {
#pragma unroll
  for (int flip = 1; flip < lanes; flip *= 2) top = max(top, __shfl_xor_sync(~0u, top, flip));
  return top;
}

__device__ __forceinline__ int lane_top(const float (&v)[8]) {
  int top = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) top = max(top, __float_as_int(v[i]) & 0x7fffffff);
  return top;
}

// Scale and its inverse; an inverse of 0 makes all codes 0, a scale of NaN makes the result NaN.
__device__ __forceinline__ void scale_of(float top, float finest, float& d, float& inverse) {
  d = 0.0f, inverse = 0.0f;
  if (top < 1e-30f) return;
  d = quiet_nan();
  if (!(top < infinity())) return;
  d = div_rn(top, finest), inverse = div_rn(finest, top);
}

// Values 8 * lane .. of one token's span; zeros where there is no token or no value.
__device__ __forceinline__ void load_eight(const float* x, bool exists, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    float4 part = exists ? __ldg(reinterpret_cast<const float4*>(x + i))
                         : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    v[i] = part.x, v[i + 1] = part.y, v[i + 2] = part.z, v[i + 3] = part.w;
  }
}

// Codes of 8 values as two words a plane, and their sums: low (or only) plane, high plane.
struct Codes {
  u32 words[2][PLANES];
  int low, high;
};

__device__ __forceinline__ Codes quantize_eight(const float (&v)[8], float step) {
  Codes c = {};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    // 0 * infinity must not become a code: a group without a finite scale has none
    int q = step > 0.0f ? __float2int_rn(mul_rn(v[i], step)) : 0;
    int high = PLANES == 2 ? (q + 128) >> 8 : 0, low = q - 256 * high;
    c.words[i >> 2][0] |= static_cast<u32>(low & 255) << (8 * (i & 3));
    if (PLANES == 2) c.words[i >> 2][PLANES - 1] |= static_cast<u32>(high & 255) << (8 * (i & 3));
    c.low += low, c.high += high;
  }
  return c;
}

// Store the lane's eight codes at their place in the fragments of the run of 32.
__device__ __forceinline__ void store_codes(Fragment* run, int token, const Codes& c) {
  int quarter = threadIdx.x & 3;
  Fragment* to = run + (token >> 3) * 32 + (token & 7) * 4 + 2 * (quarter & 1);
#pragma unroll
  for (int w = 0; w < 2; w++) {
#pragma unroll
    for (int p = 0; p < PLANES; p++) to[w].words[2 * p + (quarter >> 1)] = c.words[w][p];
  }
}
