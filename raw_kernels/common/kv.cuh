// Element type of the key and value caches.
#pragma once
#include "numerics.cuh"
#include "ptx.cuh"
#include "types.cuh"

#ifndef KV_BITS
#error "KV_BITS: 16 (f16) or 32 (f32)"
#endif
static_assert(KV_BITS == 16 || KV_BITS == 32, "KV_BITS is 16 or 32");

#if KV_BITS == 16
typedef u16 Kv;
__device__ __forceinline__ Kv kv_from(float x) { return float_to_half(x); }
// Eight neighbours, 16-byte aligned.
__device__ __forceinline__ void load_kv8(const Kv* from, float (&out)[8]) {
  uint4 v = *reinterpret_cast<const uint4*>(from);
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    out[i] = half_to_float(static_cast<u16>(words[i / 2] >> (16 * (i & 1))));
  }
}
#else
typedef float Kv;
__device__ __forceinline__ Kv kv_from(float x) { return x; }
__device__ __forceinline__ void load_kv8(const Kv* from, float (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    float4 v = *reinterpret_cast<const float4*>(from + i);
    out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
  }
}
#endif
