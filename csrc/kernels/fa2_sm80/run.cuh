// Launches one instance of the forward; everything about the launch derives from Config.
#pragma once

#include <cuda_runtime_api.h>

#include "base/launch_kernel.cuh"
#include "kernels/fa2_sm80/forward.cuh"

namespace jaxflash::fa2_sm80 {

template <class Config>
cudaError_t run_forward(const ForwardParams& params, const SequenceInputs& inputs,
                        cudaStream_t stream) {
  const AttentionParams& attention = params.attention;
  const bool is_packed = inputs.query_offsets.data != nullptr;
  const int64_t num_tiles =
      device::tiles_per_batch(attention.T, inputs.num_sequences, is_packed, Config::kBlockQ);
  return launch_kernel(forward_kernel<Config>, num_tiles * attention.N * attention.B,
                       Config::kNumThreads, sizeof(typename Config::SharedStorage), stream, params,
                       inputs, static_cast<int>(num_tiles));
}

}  // namespace jaxflash::fa2_sm80
