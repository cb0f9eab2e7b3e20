// bar: barriers of some warps of a CTA.
#pragma once

namespace jaxflash::ptx {

// barrier.cta.arrive (PTX ISA 7.8, sm_70): does not wait. What the calling threads wrote to shared
// memory before is visible to those that pass the same barrier with named_barrier_sync. Whole warps
// call it; index 0 is __syncthreads; `threads` counts arriving and waiting threads alike.
__device__ __forceinline__ void named_barrier_arrive(int index, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

// barrier.cta.sync (PTX ISA 7.8, sm_70): waits until `threads` threads have arrived. Whole warps.
__device__ __forceinline__ void named_barrier_sync(int index, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

}  // namespace jaxflash::ptx
