// Launches the kernels of one backward call; everything about a launch derives from the Config.
#pragma once

#include <cuda_runtime.h>

#include "base/launch_kernel.cuh"
#include "kernels/fa1_sm80/backward.cuh"
#include "kernels/fa1_sm80/run.cuh"

namespace jaxflash::fa1_sm80 {

// Whether one CTA should own all column blocks of a KV head: where that keeps the card about as
// busy as a CTA for each block, it saves the atomics.
inline bool keeps_busy(int64_t heads, int64_t num_blocks, int64_t slots) {
  const auto busy = [&](int64_t ctas) {
    return static_cast<double>(ctas) / static_cast<double>(ceil_div(ctas, slots) * slots);
  };
  return busy(heads) >= 0.9 * busy(heads * num_blocks);
}

template <class Config>
cudaError_t run_backward(const BackwardParams& params, const SequenceInputs& inputs,
                         const BackwardWorkspace& workspace, bool is_deterministic,
                         cudaStream_t stream) {
  using Element = typename Config::Element;
  constexpr int kHeadDim = Config::kHeadDim;
  const AttentionParams& attention = params.attention;
  const int64_t units = attention.B * attention.N * (workspace.padded_rows / kRowUnit);
  cudaError_t error = launch_kernel(backward_prepare_kernel<Element, kHeadDim>, units, kPassThreads,
                                    0, stream, params, inputs, workspace);
  if (error != cudaSuccess) return error;
  int multiprocessors = 0;
  error = multiprocessor_count(&multiprocessors);
  if (error != cudaSuccess) return error;
  const int64_t heads = attention.B * attention.K;
  const int64_t num_blocks = ceil_div(attention.S, Config::kBlockKV);
  const bool is_alone = is_deterministic || num_blocks < 2 ||
                        keeps_busy(heads, num_blocks, multiprocessors * Config::kMinBlocksPerSM);
  const int64_t shares = is_alone ? 1 : num_blocks;
  error = launch_kernel(backward_kernel<Config>, num_blocks == 0 ? 0 : heads * shares,
                        Config::kNumThreads, Config::kSharedBytes, stream, params, inputs,
                        workspace, static_cast<int>(num_blocks), static_cast<int>(shares));
  if (error != cudaSuccess) return error;
  return launch_kernel(backward_convert_kernel<Element, kHeadDim>, units, kPassThreads, 0, stream,
                       params, inputs, workspace);
}

}  // namespace jaxflash::fa1_sm80
