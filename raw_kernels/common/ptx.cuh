// Every line of inline PTX there is, in wrappers; the emulator has its own under these names.
#pragma once
#ifndef CUDFLASH_EMULATION

// Half-precision bits to float: exact, f16 subnormals included. No cuda_fp16.h needed.
__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Float to half-precision bits, nearest even; f16 subnormals kept, 65,520 and above infinite.
__device__ __forceinline__ unsigned short float_to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

#if __CUDA_ARCH__ >= 800

// D = A B + C with A 16 x 32, B 32 x 8, int8 in and int32 out. Lane l = 4 g + t holds of A: rows
// g, g + 8 at k = 4 t .. 4 t + 3 (a[0], a[1]) and at k + 16 (a[2], a[3]); of B: column g at these
// k (b[0], b[1]); of C and D: row g, columns 2 t and 2 t + 1, then row g + 8.
__device__ __forceinline__ void mma_m16n8k32_s8(int (&d)[4], const unsigned (&a)[4],
                                                const unsigned (&b)[2], const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),
        "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// The same with 16 values of k: a[0], a[1] and b hold k = 4 t .. 4 t + 3.
__device__ __forceinline__ void mma_m16n8k16_s8(int (&d)[4], const unsigned (&a)[2], unsigned b,
                                                const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

#else  // sm_75 has the 8-row form only; its lanes hold the same parts, and integer sums are exact

__device__ __forceinline__ void mma_m8n8k16_s8(int& d0, int& d1, unsigned a, unsigned b, int c0,
                                               int c1) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%4, %5};"
      : "=r"(d0), "=r"(d1) : "r"(a), "r"(b), "r"(c0), "r"(c1));
}

__device__ __forceinline__ void mma_m16n8k16_s8(int (&d)[4], const unsigned (&a)[2], unsigned b,
                                                const int (&c)[4]) {
  mma_m8n8k16_s8(d[0], d[1], a[0], b, c[0], c[1]);
  mma_m8n8k16_s8(d[2], d[3], a[1], b, c[2], c[3]);
}

__device__ __forceinline__ void mma_m16n8k32_s8(int (&d)[4], const unsigned (&a)[4],
                                                const unsigned (&b)[2], const int (&c)[4]) {
  int e[4];
  mma_m16n8k16_s8(e, {a[0], a[1]}, b[0], c);
  mma_m16n8k16_s8(d, {a[2], a[3]}, b[1], e);
}

#endif
#endif
