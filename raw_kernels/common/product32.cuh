// 32 values of 32 weight rows times TOKENS tokens; order: docs/NUMERICS.md, 3.
#pragma once
#include "activations.cuh"
#include "formats32.cuh"
#include "slices.cuh"

#if !defined(FORMAT) || !defined(ROW_GROUPS)
#error "FORMAT: name of the format; ROW_GROUPS: warps beside, 32 rows each"
#endif
#define ROWS (32 * ROW_GROUPS)

// Integer sums of 16 rows and 8 tokens, all planes.
__device__ __forceinline__ void unit_sums(const u32 (&a)[4], const Fragment& x, int2 start,
                                          int (&s)[4]) {
  const int zero[4] = {0, 0, 0, 0};
  int first[4] = {0, 0, 0, 0};
  if (FORMAT::kStartShift >= 0) {
    const int by = 1 << (FORMAT::kStartShift < 0 ? 0 : FORMAT::kStartShift);
    first[0] = first[2] = start.x * by, first[1] = first[3] = start.y * by;
  }
  mma_m16n8k32_s8(s, a, {x.words[0], x.words[1]}, first);
  if (PLANES == 1) return;
  int high[4];
  mma_m16n8k32_s8(high, a, {x.words[2 * PLANES - 2], x.words[2 * PLANES - 1]}, zero);
#pragma unroll
  for (int e = 0; e < 4; e++) s[e] += 256 * high[e];
}

// One unit into the accumulators; codes, d, start and sum are the lane's.
__device__ __forceinline__ void add_unit(const u8* tile, const Fragment* codes, const float* d,
                                         const int* start, const float* sum,
                                         float (&acc)[2][TOKEN_TILES][4]) {
  u32 a[2][4];
  float dw[4], mw[4];
  FORMAT::load(tile, threadIdx.x & 31, a, dw, mw);
#pragma unroll
  for (int j = 0; j < TOKEN_TILES; j++) {
    Fragment x = load_fragment(codes + j * 32);
    float2 xd = __ldg(reinterpret_cast<const float2*>(d + 8 * j));
    int2 begin = {0, 0};
    float2 xs = {0.0f, 0.0f};
    if (FORMAT::kStartShift >= 0) begin = __ldg(reinterpret_cast<const int2*>(start + 8 * j));
    if (FORMAT::kHasMin) xs = __ldg(reinterpret_cast<const float2*>(sum + 8 * j));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int s[4];
      unit_sums(a[i], x, begin, s);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& to = acc[i][j][e];
        int row = 2 * i + (e >> 1);
        to = fma_rn(from_int(s[e]), mul_rn(dw[row], e & 1 ? xd.y : xd.x), to);
        if (FORMAT::kHasMin) to = fma_rn(mw[row], e & 1 ? xs.y : xs.x, to);
      }
    }
  }
}
