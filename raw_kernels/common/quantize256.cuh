// Int8 rows for formats of 256 values; per 256: top = max |x|, d = top / finest; with one plane an
// exponent e per 32: 3, 2, 1 or 0 as the run's own largest magnitude exceeds top / 2, / 4, / 8;
// q = rint(x * ((finest / top) * 2^-e)); finest is 127 * 2^3, or 32512 with two planes.
#pragma once
#include "quantize.cuh"

// A warp stores one token's values 256 * unit ..; v are the lane's eight of them.
__device__ __forceinline__ void quantize_span256(const float (&v)[8], int token, int unit, int units,
                                                 Fragment* codes, float* d, u16* exponents,
                                                 Fragment* sums) {
  int lane = threadIdx.x & 31;
  int run_bits = largest_bits(lane_top(v), 4);
  float run_top = __int_as_float(run_bits);
  float top = __int_as_float(largest_bits(run_bits, 32)), scale, step;
  scale_of(top, PLANES == 2 ? LIMIT : 1016.0f, scale, step);
  int e = 0;
  if (PLANES == 1) {
    if (run_top > mul_rn(top, 0.5f)) {
      e = 3, step = mul_rn(step, 0.125f);
    } else if (run_top > mul_rn(top, 0.25f)) {
      e = 2, step = mul_rn(step, 0.25f);
    } else if (run_top > mul_rn(top, 0.125f)) {
      e = 1, step = mul_rn(step, 0.5f);
    }
  }
  Codes c = quantize_eight(v, step);
  i64 at = static_cast<i64>(token / TOKENS) * units + unit;
  token %= TOKENS;
  store_codes(codes + (at * 8 + (lane >> 2)) * TOKEN_TILES * 32, token, c);

  // two lanes hold a run of 16; lanes 0 .. 3 collect four runs each
  int run[2] = {c.low * (1 << e), c.high};
  Fragment bytes = {};
#pragma unroll
  for (int p = 0; p < PLANES; p++) {
    run[p] += __shfl_xor_sync(~0u, run[p], 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int s = __shfl_sync(~0u, run[p], 8 * (lane & 3) + 2 * i), high = (s + 128) >> 8;
      bytes.words[2 * p] |= static_cast<u32>((s - 256 * high) & 255) << (8 * i);
      bytes.words[2 * p + 1] |= static_cast<u32>(high & 255) << (8 * i);
    }
  }
  u32 packed = static_cast<u32>(e) << (2 * (lane >> 2));
#pragma unroll
  for (int flip = 4; flip < 32; flip *= 2) packed |= __shfl_xor_sync(~0u, packed, flip);
  if (lane < 4) sums[(at * TOKEN_TILES + (token >> 3)) * 32 + (token & 7) * 4 + lane] = bytes;
  if (lane == 0) {
    d[at * TOKENS + token] = scale;
    exponents[at * TOKENS + token] = static_cast<u16>(packed);
  }
}
