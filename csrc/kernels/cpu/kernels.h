// What the CPU kernels offer to the launch layer: one table of functions per instruction set.
//
// instantiate.cc is compiled once per set, each time into a namespace of its own, because a
// function shared between two of them could be linked in the copy the running CPU cannot execute.
#pragma once

#include <cstdint>

#include "params.h"

namespace jaxflash::cpu {

struct Kernels {
  const char* isa;
  // Each runs one task to its end on the calling thread; slot is scratch of the matching
  // *_slot_floats size. Tasks of one call are independent and write disjoint outputs.
  void (*forward_task)(const ForwardParams& params, int64_t task, float* slot);
  void (*backward_query_task)(const BackwardParams& params, int64_t task, float* slot);
  void (*backward_kv_task)(const BackwardParams& params, int64_t task, float* slot);
  void (*backward_bias_task)(const BackwardParams& params, int64_t task, float* slot);
};

extern const Kernels kKernelsBaseline;
#if defined(JAXFLASH_X86_64_LEVELS)
extern const Kernels kKernelsX86V3;
extern const Kernels kKernelsX86V4;
#endif

}  // namespace jaxflash::cpu
