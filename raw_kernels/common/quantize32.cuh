// Int8 rows for formats of 32 values; per 32: top = max |x|, d = top / limit, q = rint(x * (limit /
// top)), start = -8 * sum(q), sum = d * f32(sum(q)).
#pragma once
#include "quantize.cuh"

// A warp stores one token's values 256 * span ..; v are the lane's eight of them.
__device__ __forceinline__ void quantize_span32(const float (&v)[8], int token, int span, int units,
                                                Fragment* codes, float* d, int* start, float* sum) {
  int lane = threadIdx.x & 31, unit = span * 8 + (lane >> 2);
  float scale, inverse;
  scale_of(__int_as_float(largest_bits(lane_top(v), 4)), LIMIT, scale, inverse);
  Codes c = quantize_eight(v, inverse);
  int total = c.low + 256 * c.high;
  total += __shfl_xor_sync(~0u, total, 1);
  total += __shfl_xor_sync(~0u, total, 2);
  if (unit >= units) return;
  i64 at = static_cast<i64>(token / TOKENS) * units + unit;
  token %= TOKENS;
  store_codes(codes + at * TOKEN_TILES * 32, token, c);
  if ((lane & 3) == 0) {
    at = at * TOKENS + token;
    d[at] = scale;
    start[at] = -8 * total;
    sum[at] = mul_rn(scale, from_int(total));
  }
}
