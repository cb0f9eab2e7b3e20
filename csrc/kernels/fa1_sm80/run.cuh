// Launches one instance of the forward; everything about the launch derives from Config.
#pragma once

#include <cuda_runtime.h>

#include "base/launch_kernel.cuh"
#include "kernels/fa1_sm80/forward.cuh"

namespace jaxflash::fa1_sm80 {

// CTAs that share the rows of a head: the fewest that keep the card within 5 % of as busy as it can
// be kept, counted in waves of `slots` CTAs, of which there should be min_waves. groups: of row
// tiles that stay together, of which a CTA may have at most max_groups.
inline int choose_splits(int64_t heads, int64_t groups, int64_t max_groups, int64_t slots,
                         int64_t min_waves) {
  constexpr int kMaxSplits = 128;
  const int fewest = static_cast<int>(ceil_div(groups, max_groups));
  if (fewest > kMaxSplits) return fewest;
  const int most = static_cast<int>(groups < kMaxSplits ? groups : kMaxSplits);
  const auto busy = [&](int splits) {
    const int64_t ctas = heads * splits;
    return static_cast<double>(ctas) / static_cast<double>(ceil_div(ctas, slots) * slots);
  };
  double best = 0.0;
  for (int splits = 1; splits <= most; ++splits) best = busy(splits) > best ? busy(splits) : best;
  for (int splits = fewest; splits < most; ++splits) {
    if (busy(splits) >= 0.95 * best && heads * splits >= min_waves * slots) return splits;
  }
  return most;
}

inline cudaError_t multiprocessor_count(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

template <class Config>
cudaError_t run_forward(const ForwardParams& params, const SequenceInputs& inputs,
                        ForwardWorkspace workspace, cudaStream_t stream) {
  const AttentionParams& attention = params.attention;
  const int64_t heads = attention.B * attention.N;
  if (heads == 0 || attention.T == 0) return cudaSuccess;
  int multiprocessors = 0;
  const cudaError_t error = multiprocessor_count(&multiprocessors);
  if (error != cudaSuccess) return error;
  // With a block mask CTAs have unequal work, which several waves even out, and the rows of a mask
  // block stay together, so that a CTA meets few column blocks.
  const bool has_blocks = attention.block_mask.data != nullptr;
  while (has_blocks && Config::kBlockQ << workspace.log2_group < 128) ++workspace.log2_group;
  workspace.splits =
      choose_splits(heads, ceil_div(attention.T, Config::kBlockQ << workspace.log2_group),
                    Config::kMaxTiles >> workspace.log2_group,
                    multiprocessors * Config::kMinBlocksPerSM, has_blocks ? 4 : 0);
  return launch_kernel(forward_kernel<Config>, heads * workspace.splits, Config::kNumThreads,
                       Config::kSharedBytes, stream, params, inputs, workspace);
}

}  // namespace jaxflash::fa1_sm80
