// What groups of warps do together on Hopper: cluster barriers, and the split of the registers.
#pragma once

#include <cstdint>

namespace jaxflash::ptx {

// setmaxnreg.{inc, dec} (PTX ISA 8.0, sm_90a): registers of each thread from here on. All warps of
// a warpgroup. NOTE: the sum over the warpgroups may not exceed what the launch allotted: 384
// threads start with 168 each, so 504 in all; asking for more waits forever.
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// barrier.cluster.{arrive.release, wait.acquire} (PTX ISA 7.8, sm_90): all threads of all CTAs of
// the cluster. Converged warps.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// %cluster_ctarank (PTX ISA 7.8, sm_90): this CTA's position in its cluster, 0 without one.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

}  // namespace jaxflash::ptx
