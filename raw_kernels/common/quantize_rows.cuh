// Either layout of int8 rows behind one name, for kernels that quantise what they have computed.
#pragma once
#include "quantize256.cuh"
#include "quantize32.cuh"

#ifndef LAYOUT
#error "LAYOUT: 32 (q32) or 256 (q256)"
#endif
static_assert(LAYOUT == 32 || LAYOUT == 256, "LAYOUT is 32 or 256");
#if LAYOUT == 32
#define SCRATCH Fragment *__restrict__ codes, float *__restrict__ d, int *__restrict__ start, \
                float *__restrict__ sum
#define quantize_span(v, token, span, units) \
  quantize_span32(v, token, span, units, codes, d, start, sum)
#else
#define SCRATCH Fragment *__restrict__ codes, float *__restrict__ d, u16 *__restrict__ exponents, \
                Fragment *__restrict__ sums
#define quantize_span(v, token, span, units) \
  quantize_span256(v, token, span, units, codes, d, exponents, sums)
#endif
