// Scratch of int8 activation rows, in the order in which the tensor cores read it.
//
// Tokens are taken 8 * TOKEN_TILES at a time (a group); the scratch of a group is contiguous in
// every array. Of 32 values and 8 tokens, lane 4 g + t of a warp finds the B fragment of token g:
// values 4 t .. 4 t + 3 and 16 + 4 t .. 16 + 4 t + 3; with two planes, x = 256 * high + low, the
// low words and then the high words. Tokens past the last one are zeros.
#pragma once
#include "types.cuh"

#ifndef PLANES
#error "PLANES: 1 (int8) or 2 (int8x2)"
#endif
#ifndef TOKEN_TILES
#error "TOKEN_TILES: 1, 2 or 4 (8, 16 or 32 tokens a pass)"
#endif
static_assert(PLANES == 1 || PLANES == 2, "PLANES is 1 or 2");
static_assert(TOKEN_TILES == 1 || TOKEN_TILES == 2 || TOKEN_TILES == 4, "1, 2 or 4");
#define TOKENS (8 * TOKEN_TILES)

struct __align__(8 * PLANES) Fragment {
  u32 words[2 * PLANES];
};

__device__ __forceinline__ Fragment load_fragment(const Fragment* from) {
  Fragment f;
#if PLANES == 1
  uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
  f.words[0] = v.x, f.words[1] = v.y;
#else
  uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
  f.words[0] = v.x, f.words[1] = v.y, f.words[2] = v.z, f.words[3] = v.w;
#endif
  return f;
}
