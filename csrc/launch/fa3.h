// Runs FlashAttention-3 on a Hopper GPU: the run-time choice of an instance, and the launch.
//
// Nothing here waits for the device or allocates; everything goes onto the stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "launch/workspace.h"
#include "params.h"

namespace jaxflash::launch {

// Why these arguments cannot run, or nullptr.
const char* fa3_refusal(const AttentionParams& params, const SequenceInputs& inputs);

// workspace: [fa3_..._workspace_floats(sizes)], need not be initialised.
cudaError_t fa3_forward(const ForwardParams& params, const SequenceInputs& inputs, float* workspace,
                        cudaStream_t stream);
cudaError_t fa3_backward(const BackwardParams& params, const SequenceInputs& inputs,
                         float* workspace, bool is_deterministic, cudaStream_t stream);

int64_t fa3_forward_workspace_floats(const WorkspaceSizes& sizes);
int64_t fa3_backward_workspace_floats(const WorkspaceSizes& sizes);

}  // namespace jaxflash::launch
