// cp.async: copies from global to shared memory that bypass the registers.
#pragma once

#include <cstdint>

namespace jaxflash::ptx {

// cp.async.cg.shared.global with src-size (PTX ISA 7.0, sm_80): 16 bytes through L2 only.
// Zeros are written where is_valid is false, and the source is then not read. Both addresses are
// 16-byte aligned. The copy is visible to the calling thread after cp_async_wait, to others after
// a barrier that follows it. Any thread may call it.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source,
                                            bool is_valid) {
  const int source_bytes = is_valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(source_bytes)
               : "memory");
}

// cp.async.commit_group (PTX ISA 7.0): closes the calling thread's group of copies.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group (PTX ISA 7.0): waits until at most kPending of the calling thread's youngest
// groups are unfinished. Other threads' copies need a barrier after it.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jaxflash::ptx
