// Computes: out[r, c] = silu(sum over j of weight[j, c] * x[r + j - T + 1, c]), T taps; rows before
//   row 0 are those of the state, which is carried on as the plan says.
// Shapes/dtypes: out, x (M, C) f32 in different memory, rows their stride in elements apart; weight
//   (T, C), history (n, T - 1, C), tape (B, C) f32; plan (8,) i32 from recurrent_open.
// Launch: grid ceil(C / 128), block 128; with 0 rows (out, x and weight null) the state is
//   copied.
// Defines: TAPS 2 .. 16.
// Accumulates in: float32: the oldest product rounded, then fma in order of rows.
// Reads/writes: M C 8; 2 (T - 1) C 4 of the state; M C 4 of the tape for a small block.
// Twin: ops.cpu.short_conv.
// Source: own; the convolution of the gated delta net, Yang et al., arXiv 2412.06464.
#include "common/recurrent.cuh"
#include "common/special.cuh"

#ifndef TAPS
#error "TAPS: rows that a result sees"
#endif
#define BEFORE (TAPS - 1)

extern "C" __global__ void __launch_bounds__(128, 4)
short_conv(float* __restrict__ out, i64 out_stride, const float* __restrict__ x, i64 x_stride,
           const float* __restrict__ weight, float* history, float* tape,
           const int* __restrict__ plan, int n_rows, int width) {
  int c = blockIdx.x * 128 + threadIdx.x, n_tape = plan[N_TAPE];
  if (c >= width) return;
  if (!plan[SOUND]) {
    for (int r = 0; r < n_rows; r++) out[r * out_stride + c] = quiet_nan();
    return;
  }
  const float* from = history + static_cast<i64>(plan[SOURCE]) * BEFORE * width + c;
  float* to = history + static_cast<i64>(plan[TARGET]) * BEFORE * width + c;
  bool keep = plan[KEEP_TAPE], zero = plan[AT_ZERO];
  float w[TAPS], window[TAPS];                         // the last rows; window[BEFORE] is row r
#pragma unroll
  for (int j = 0; j < TAPS; j++) w[j] = n_rows ? weight[static_cast<i64>(j) * width + c] : 0.0f;
#pragma unroll
  for (int j = 0; j < BEFORE; j++) {
    int old = n_tape + j;
    if (old >= BEFORE) {
      window[j] = tape[static_cast<i64>(old - BEFORE) * width + c];
    } else {
      window[j] = zero ? 0.0f : from[static_cast<i64>(old) * width];
    }
  }
  if (keep) {                                          // every thread has its own column: no hazard
#pragma unroll
    for (int j = 0; j < BEFORE; j++) to[static_cast<i64>(j) * width] = window[j];
  }
  for (int r = 0; r < n_rows; r++) {
    window[BEFORE] = x[r * x_stride + c];
    float acc = mul_rn(w[0], window[0]);
#pragma unroll
    for (int j = 1; j < TAPS; j++) acc = fma_rn(w[j], window[j], acc);
    out[r * out_stride + c] = silu_f32(acc);
    if (keep) tape[static_cast<i64>(r) * width + c] = window[BEFORE];
#pragma unroll
    for (int j = 0; j < BEFORE; j++) window[j] = window[j + 1];
  }
  if (keep) return;
#pragma unroll
  for (int j = 0; j < BEFORE; j++) to[static_cast<i64>(j) * width] = window[j];
}
