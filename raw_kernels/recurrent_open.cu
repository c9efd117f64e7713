// Computes: where a pass reads and writes the recurrent state, and what it will leave: the plan of
//   the pass, and the control block that passes share.
// Shapes/dtypes: i32. plan (8,): sound, source slot, target slot, tape rows to apply, tape half to
//   read, tape half to write, whether the rows go to the tape, whether the source is zero; control
//   (8 + n,): current slot, slot, position and rows of the tape, tape half last written, 3 unused,
//   the position of every slot, -1 for none; at: at[0] is the position of the first row.
// Launch: grid 1, block 1. n_rows 0: a copy from slot `source` (-1: found) into slot `target`.
// Defines: none.
// Accumulates in: nothing.
// Reads/writes: a few words.
// Twin: ops.cpu.recurrent_open.
// Source: own.
#include "common/recurrent.cuh"

// Tape rows between a slot's state and `position`; -1 if they do not lead there.
__device__ __forceinline__ int tape_rows_to(const int* control, int slot, int position) {
  int base = control[BASES + slot];
  if (position == 0) return 0;                         // zeros, whatever the slot holds
  if (base < 0 || base > position) return -1;
  if (base == position) return 0;
  bool fits = slot == control[TAPE_SLOT] && base == control[TAPE_BASE] &&
              position - base <= control[TAPE_ROWS];
  return fits ? position - base : -1;
}

extern "C" __global__ void __launch_bounds__(1)
recurrent_open(int* __restrict__ plan, int* __restrict__ control, const int* __restrict__ at,
               int n_rows, int block_rows, int source, int target) {
  int position = *at;
  bool restore = source >= 0;
  if (!restore) source = control[CURRENT];
  int n_tape = tape_rows_to(control, source, position);
  if (n_tape < 0 && !restore) source = 1 - source, n_tape = tape_rows_to(control, source, position);
  for (int i = 0; i < PLAN_WORDS; i++) plan[i] = 0;
  if (position < 0 || n_tape < 0 || source == target) return;
  if (position == 0) control[BASES + source] = 0;
  plan[SOUND] = 1, plan[SOURCE] = source, plan[N_TAPE] = n_tape;
  plan[AT_ZERO] = control[BASES + source] == 0;
  int parity = control[PARITY];
  plan[READ] = parity;
  if (n_rows > block_rows) {                           // its last state goes to the other slot
    target = 1 - source;
    control[CURRENT] = target, control[BASES + target] = position + n_rows;
    control[TAPE_ROWS] = max(min(position - control[TAPE_BASE], control[TAPE_ROWS]), 0);
  } else if (n_rows > 0) {                             // its first one stays, its rows go to the tape
    target = source;
    plan[WRITE] = 1 - parity, plan[KEEP_TAPE] = 1;
    control[PARITY] = 1 - parity, control[CURRENT] = source;
    control[TAPE_SLOT] = source, control[TAPE_BASE] = position, control[TAPE_ROWS] = n_rows;
    control[BASES + source] = position;
    if (control[BASES + 1 - source] > position) control[BASES + 1 - source] = -1;
  } else {
    control[BASES + target] = position;
    if (restore) {
      control[CURRENT] = target, control[BASES + 1 - target] = -1, control[TAPE_ROWS] = 0;
    }
  }
  plan[TARGET] = target;
}
