// TMA: bulk copies between global and shared memory, by tensor map (cp.async.bulk.tensor) and
// plain.
//
// One thread issues a copy of a whole box. Loads count their bytes on an mbarrier: the full box,
// zeros filled in outside the tensor included. Stores belong to bulk groups of the issuing thread
// and skip what lies outside. Coordinates run from the innermost dim outwards.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/shared_memory.cuh"

namespace jaxflash::ptx {

// cp.async.bulk.tensor.4d.shared::cluster.global (PTX ISA 8.0, sm_90). `barrier` must expect the
// box's bytes; its waiters see them. One thread.
__device__ __forceinline__ void tma_load(void* destination, const CUtensorMap* map,
                                         uint64_t* barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same with .multicast::cluster: reads once, writes to the same place in every CTA of `ctas`
// (one bit each) and counts on the same barrier of each. One thread of one CTA.
__device__ __forceinline__ void tma_load_multicast(void* destination, const CUtensorMap* map,
                                                   uint64_t* barrier, int c0, int c1, int c2,
                                                   int c3, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(
          shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(ctas)
      : "memory");
}

// cp.async.bulk.tensor.4d.global.shared::cta.bulk_group (PTX ISA 8.0, sm_90). What threads wrote to
// `source` must be behind fence_async_proxy in each and a barrier. One thread.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* source, int c0,
                                          int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(shared_address(source)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// cp.async.bulk.shared::cluster.global (PTX ISA 8.0, sm_90): `bytes`, a multiple of 16, without a
// map; both addresses 16-byte aligned. One thread.
__device__ __forceinline__ void bulk_load(void* destination, const void* source, int bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(destination)),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// cp.async.bulk.shared::cluster.shared::cta (PTX ISA 8.0, sm_90): `bytes`, a multiple of 16, to
// `destination` in CTA `cta` of the cluster, counted on its `barrier`. What threads wrote to
// `source` must be behind fence_async_proxy in each and a barrier. One thread.
__device__ __forceinline__ void bulk_copy_to_cta(void* destination, const void* source, int bytes,
                                                 uint64_t* barrier, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %4;\n"
      "mapa.shared::cluster.u32 remote_barrier, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [remote], [%1], %2, "
      "[remote_barrier];\n}" ::"r"(shared_address(destination)),
      "r"(shared_address(source)), "r"(bytes), "r"(shared_address(barrier)), "r"(cta)
      : "memory");
}

// cp.async.bulk.commit_group (PTX ISA 8.0, sm_90): closes the calling thread's group of stores and
// reductions.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// cp.async.bulk.wait_group.read (PTX ISA 8.0, sm_90): waits until at most kPending of the calling
// thread's youngest groups still have to read their source; it may then be overwritten.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// cp.async.bulk.wait_group: the same until their writes are done as well.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// fence.proxy.async.shared::cta (PTX ISA 8.0, sm_90): the calling thread's accesses to shared
// memory come before those of wgmma and of the copy engine that a following barrier orders after
// it.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace jaxflash::ptx
