// Words of the plan of a pass over a recurrent state, and of its control block (recurrent_open.cu).
#pragma once
#include "types.cuh"

#define PLAN_WORDS 8
enum PlanWord { SOUND, SOURCE, TARGET, N_TAPE, READ, WRITE, KEEP_TAPE, AT_ZERO };
enum ControlWord { CURRENT, TAPE_SLOT, TAPE_BASE, TAPE_ROWS, PARITY, BASES = 8 };
