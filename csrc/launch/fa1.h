// Runs FlashAttention-1 on a GPU: the run-time choice of an instance, and the launch.
//
// Nothing here waits for the device or allocates; everything goes onto the stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "launch/workspace.h"
#include "params.h"

namespace jaxflash::launch {

// Why this call cannot run, or nullptr. dtype is float16 or bfloat16.
const char* fa1_refusal(const AttentionParams& params, const SequenceInputs& inputs);

// Floats of scratch, which need not be initialised.
int64_t fa1_forward_workspace_floats(const WorkspaceSizes& sizes);
int64_t fa1_backward_workspace_floats(const WorkspaceSizes& sizes);

// workspace: as many floats as the functions above say.
cudaError_t fa1_forward(const ForwardParams& params, const SequenceInputs& inputs, float* workspace,
                        cudaStream_t stream);

cudaError_t fa1_backward(const BackwardParams& params, const SequenceInputs& inputs,
                         float* workspace, bool is_deterministic, cudaStream_t stream);

}  // namespace jaxflash::launch
