// Hand-over of global memory between CTAs: a counter that one raises and another waits for.
#pragma once

#include <cstdint>

namespace jaxflash::ptx {

// ld.acquire.gpu (PTX ISA 6.0, sm_70): later reads and writes of the calling thread come after
// everything that was released before the value it sees. Any thread.
__device__ __forceinline__ int load_acquire(const int* source) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

// red.release.gpu.add (PTX ISA 6.0, sm_70): adds after all earlier reads and writes of the calling
// thread are done. Any thread.
__device__ __forceinline__ void add_release(int* destination, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(destination), "r"(value)
               : "memory");
}

// fence.proxy.async.global (PTX ISA 8.0, sm_90): orders the calling thread's bulk copies and
// reductions against its other accesses to global memory, in both directions.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace jaxflash::ptx
