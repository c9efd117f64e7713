// What the checker needs to know about the runtime.
#pragma once
#include "device.h"

namespace emulation {

// Offset of an address in the block's shared memory (static, then dynamic); false elsewhere.
bool find_shared(const void* address, size_t* offset);
size_t shared_bytes();
// Whether an address belongs to a thread's stack or to the runtime itself.
bool is_private(const void* address);
// Record a fault; the launch stops before the next thread runs and reports the first one.
void note(const char* text);
// Set by the checker; absent in fast builds.
void check_block_begin() __attribute__((weak));

}  // namespace emulation
