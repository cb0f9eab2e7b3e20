// mbarrier: barriers in shared memory that count arrivals of threads and bytes of asynchronous
// copies.
//
// A barrier goes through phases of parity 0, 1, 0, ...; a phase ends when all expected arrivals and
// all announced bytes have come. Waiting for parity 1 on a fresh barrier returns at once.
#pragma once

#include <cstdint>

#include "ptx/shared_memory.cuh"

namespace jaxflash::ptx {

// mbarrier.init (PTX ISA 7.0, sm_80): `arrivals` end a phase. One thread; other threads and the
// copy engine may use the barrier after mbarrier_init_fence and a barrier of the CTA or cluster.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// fence.mbarrier_init.release.cluster (PTX ISA 8.0, sm_90): orders the calling thread's inits
// before its next barrier of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive (PTX ISA 7.0, sm_80), release at CTA scope: what the thread read or wrote before
// is done for whoever waits. Any thread.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// The same on that barrier of CTA `cta` of the cluster (PTX ISA 8.0, sm_90).
// NOTE: without .release.cluster, which costs a MEMBAR of the whole GPU each time; it publishes no
// memory to the other CTA, which is enough to give back a buffer that only wgmma has read.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier)),
      "r"(cta)
      : "memory");
}

// mbarrier.arrive.expect_tx (PTX ISA 8.0, sm_90): arrives and announces `bytes` that copies will
// bring to this phase. Any thread.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// mbarrier.try_wait.parity (PTX ISA 7.8, sm_90), acquire at CTA scope: returns when the phase of
// this parity is over. Any thread; the warp need not be converged.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred is_over;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 is_over, [%0], %1;\n"
      "@is_over bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace jaxflash::ptx
