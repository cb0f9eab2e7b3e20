// cp.reduce.async.bulk: sums a run of shared memory into global memory, performed in L2.
#pragma once

#include <cstdint>

#include "ptx/shared_memory.cuh"

namespace jaxflash::ptx {

// cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 (PTX ISA 8.0, sm_90): adds `bytes`, a
// multiple of 16, each float atomic for itself. Completion as for TMA stores (ptx/tma.cuh). One
// thread; what threads wrote to `source` must be behind fence_async_proxy in each and a barrier.
__device__ __forceinline__ void bulk_reduce_add(float* destination, const void* source, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   destination),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
}

}  // namespace jaxflash::ptx
