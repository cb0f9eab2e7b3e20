// Launches the forward for short queries: the chunks, then their merge.
#pragma once

#include <cuda_runtime_api.h>

#include "base/launch_kernel.cuh"
#include "kernels/fa2_sm80/forward_combine.cuh"
#include "kernels/fa2_sm80/forward_split.cuh"

namespace jaxflash::fa2_sm80 {

// Heads can share a tile where they see the same.
inline bool heads_see_the_same(const AttentionParams& params) {
  const auto is_shared = [](const BroadcastArray& array) {
    return array.data == nullptr || array.head_stride == 0;
  };
  return is_shared(params.bias) && is_shared(params.mask) && is_shared(params.block_mask) &&
         params.dropout_threshold == 0;
}

template <class Config>
cudaError_t run_chunks(const ForwardParams& params, const SequenceInputs& inputs,
                       const SplitPlan& plan, cudaStream_t stream) {
  const AttentionParams& attention = params.attention;
  const int64_t tile_rows = attention.T * plan.tile_heads;
  const int64_t row_tiles = (tile_rows + Config::kBlockQ - 1) / Config::kBlockQ;
  const int64_t num_tiles = row_tiles * (attention.N / plan.tile_heads) * attention.B;
  if (num_tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
  constexpr int kSharedBytes = sizeof(typename Config::SharedStorage);
  const cudaError_t error = cudaFuncSetAttribute(
      forward_split_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(num_tiles), plan.num_chunks);
  forward_split_kernel<Config><<<grid, Config::kNumThreads, kSharedBytes, stream>>>(
      params, inputs, plan, static_cast<int>(row_tiles));
  return cudaGetLastError();
}

// workspace: [split_workspace_floats(B * T * N, sizes.num_chunks, kHeadDim)].
template <class Element, int kHeadDim, Features kFeatures>
cudaError_t run_split(const ForwardParams& params, const SequenceInputs& inputs,
                      const SplitSizes& sizes, float* workspace, cudaStream_t stream) {
  const AttentionParams& attention = params.attention;
  const int64_t num_rows = attention.B * attention.T * attention.N;
  if (num_rows == 0) return cudaSuccess;
  if (num_rows > INT32_MAX) return cudaErrorInvalidConfiguration;
  SplitPlan plan;
  plan.chunk_keys = static_cast<int>(sizes.chunk_keys);
  plan.num_chunks = static_cast<int>(sizes.num_chunks);
  plan.tile_heads = heads_see_the_same(attention) ? static_cast<int>(attention.group_size) : 1;
  plan.outputs = workspace;
  plan.partials = reinterpret_cast<RowPartial*>(workspace + num_rows * sizes.num_chunks * kHeadDim);
  cudaError_t error;
  // The general instance is not worth another build: more rows make more tiles.
  if (kFeatures == Features::kPlain && attention.T * plan.tile_heads > 16) {
    error = run_chunks<SplitConfig<Element, kHeadDim, Features::kPlain, 64>>(params, inputs, plan,
                                                                             stream);
  } else {
    error = run_chunks<SplitConfig<Element, kHeadDim, kFeatures, 16>>(params, inputs, plan, stream);
  }
  if (error != cudaSuccess) return error;
  const int threads = 32 * combine_warps(plan.num_chunks);
  return launch_kernel(forward_combine_kernel<Element>, num_rows, threads, 0, stream, params,
                       inputs, plan, kHeadDim, kFeatures == Features::kPlain);
}

}  // namespace jaxflash::fa2_sm80
