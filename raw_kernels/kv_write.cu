// Computes: keys and values of M rows into the slots position % capacity of their caches; f16 is
//   rounded to nearest even, f16 subnormals kept, 65,520 and above infinite; f32 is copied. A
//   negative position is not stored.
// Shapes/dtypes: cache_k (Hkv, capacity / 16, D, 16), cache_v (Hkv, capacity, D) of f16 or f32
//   (16 neighbouring keys lie side by side for every d); k, v (M, Hkv, D) f32, rows k_stride and
//   v_stride elements apart; positions (M,) i32.
// Launch: grid (ceil(Hkv * D / 128), M), block 128.
// Defines: KV_BITS 16 | 32.
// Accumulates in: nothing.
// Reads/writes: M Hkv D 8 read, M Hkv D KV_BITS / 4 written; no other slot is touched.
// Twin: ops.cpu.kv_write (docs/NUMERICS.md, 5).
// Source: own.
#include "common/kv.cuh"

extern "C" __global__ void __launch_bounds__(128)
kv_write(Kv* __restrict__ cache_k, Kv* __restrict__ cache_v, const float* __restrict__ k,
         i64 k_stride, const float* __restrict__ v, i64 v_stride, const int* __restrict__ positions,
         int n_kv_heads, int d, int capacity) {
  int i = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y, position = positions[row];
  if (i >= n_kv_heads * d || position < 0) return;
  i64 head = i / d;
  int at = i % d, slot = position % capacity;
  i64 to_k = ((head * capacity + slot) / 16 * d + at) * 16 + slot % 16;
  cache_k[to_k] = kv_from(k[row * k_stride + i]);
  cache_v[(head * capacity + slot) * d + at] = kv_from(v[row * v_stride + i]);
}
