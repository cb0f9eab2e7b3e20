// Launches one instance of the forward; everything about the launch derives from Config.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/fa2_sm80/forward.cuh"

namespace jaxflash::fa2_sm80 {

template <class Config>
cudaError_t run_forward(const ForwardParams& params, const SequenceInputs& inputs,
                        cudaStream_t stream) {
  const AttentionParams& attention = params.attention;
  const bool is_packed = inputs.query_offsets.data != nullptr;
  const int64_t num_tiles =
      device::tiles_per_batch(attention.T, inputs.num_sequences, is_packed, Config::kBlockQ);
  const int64_t num_blocks = num_tiles * attention.N * attention.B;
  if (num_blocks == 0) return cudaSuccess;
  if (num_blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  constexpr int kSharedBytes = sizeof(typename Config::SharedStorage);
  const cudaError_t error = cudaFuncSetAttribute(
      forward_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  forward_kernel<Config>
      <<<static_cast<unsigned>(num_blocks), Config::kNumThreads, kSharedBytes, stream>>>(
          params, inputs, static_cast<int>(num_tiles));
  return cudaGetLastError();
}

}  // namespace jaxflash::fa2_sm80
