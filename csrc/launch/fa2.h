// Runs FlashAttention-2 on a GPU: the run-time choice of an instance, and the launch.
//
// Nothing here waits for the device or allocates; everything goes onto the stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"

namespace jaxflash::launch {

// Why these sizes cannot run, or nullptr. dtype is float16 or bfloat16.
const char* fa2_refusal(const AttentionParams& params);

cudaError_t fa2_forward(const ForwardParams& params, const SequenceInputs& inputs,
                        cudaStream_t stream);

// workspace: [fa2_backward_workspace_floats(...)], need not be initialised.
cudaError_t fa2_backward(const BackwardParams& params, const SequenceInputs& inputs,
                         float* workspace, bool is_deterministic, cudaStream_t stream);

// num_sequences is that of a packed batch entry, -1 where nothing is packed. dbias_elements: of a
// bias gradient that is wanted and not float32 (that one is summed in place), else 0.
int64_t fa2_backward_workspace_floats(int64_t B, int64_t T, int64_t N, int64_t H, int64_t Hv,
                                      int64_t num_sequences, int64_t dbias_elements,
                                      bool is_deterministic);

}  // namespace jaxflash::launch
