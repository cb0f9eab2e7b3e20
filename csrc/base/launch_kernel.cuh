// One kernel launch, as every kernel folder does it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxflash {

// Launches `ctas` CTAs along x on the stream; none is no launch. Asks for more shared memory than
// the 48 KiB that every device gives a CTA where it is needed.
template <class Kernel, class... Arguments>
cudaError_t launch_kernel(Kernel kernel, int64_t ctas, int threads, int shared_bytes,
                          cudaStream_t stream, const Arguments&... arguments) {
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(ctas), threads, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace jaxflash
