// Launches the kernels of one backward call; everything about a launch derives from the Config.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "base/launch_kernel.cuh"
#include "kernels/fa3_sm90/backward_prepare.cuh"
#include "kernels/fa3_sm90/backward_wide.cuh"
#include "kernels/fa3_sm90/tensor_map.h"

namespace jaxflash::fa3_sm90 {

// num_sequences: of a packed batch entry.
template <class Config>
BackwardWorkspaceSizes workspace_sizes(int64_t B, int64_t T, int64_t S, int64_t N,
                                       int64_t num_sequences, bool is_packed) {
  return {B,
          N,
          device::tiles_per_batch(T, num_sequences, is_packed, Config::kBlockQ),
          device::tiles_per_batch(S, num_sequences, is_packed, Config::kBlockKV),
          Config::kBlockQ,
          Config::kStoredHeadDim};
}

template <class Config>
cudaError_t make_maps(const BackwardParams& params, BackwardMaps* maps) {
  const AttentionParams& a = params.attention;
  const struct {
    const void* data;
    int64_t rows, heads, features;
    int box_rows;
    CUtensorMap* map;
  } arrays[] = {{a.q, a.T, a.N, a.H, Config::kBoxRowsQ, &maps->q},
                {params.dout, a.T, a.N, a.Hv, Config::kBoxRowsQ, &maps->dout},
                {a.k, a.S, a.K, a.H, Config::TileK::kNumRows, &maps->k},
                {a.v, a.S, a.K, a.Hv, Config::TileK::kNumRows, &maps->v},
                {params.dk, a.S, a.K, a.H, 64, &maps->dk},  // of one consumer
                {params.dv, a.S, a.K, a.Hv, 64, &maps->dv}};
  for (const auto& array : arrays) {
    if (array.rows == 0) continue;  // may have no address, and no kernel reads or writes it
    const cudaError_t error =
        encode_tensor_map({array.data, a.dtype, a.B, array.rows, array.heads, array.features},
                          array.box_rows, array.map);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Sections where blocks differ in length, as a causal mask makes them: as many heads as L2 keeps
// queries, dout and sums of dq of, one query head of each group at a time. The blocks of a short
// head do better next to each other, whose queries they share, unless there are few blocks in all.
// Measured without dq's order, head dims up to 128 (docs/kernels/fa3_sm90_backward.md).
template <class Config>
KeyGrid make_key_grid(const AttentionParams& params, int blocks, bool is_deterministic) {
  constexpr int64_t kSectionBytes = 32 << 20, kManyBlocks = 16, kFewCtas = 2 * 132;
  const int64_t num_heads = params.B * params.K;
  int64_t section_heads = 1;
  const bool is_causal = params.window_right >= 0 && params.window_left < 0;
  const bool is_measured = !Config::kIsWide && !Config::kIsGeneral && !is_deterministic;
  if (is_causal && is_measured && (blocks >= kManyBlocks || num_heads * blocks <= kFewCtas)) {
    const int64_t row_bytes = 2 * (params.H + params.Hv) + 4 * Config::kHeadDim;
    const int64_t head_bytes = std::max<int64_t>(params.T * row_bytes, 1);
    section_heads =
        std::min(std::max<int64_t>(kSectionBytes / head_bytes, 1), std::max<int64_t>(num_heads, 1));
  }
  return {blocks, static_cast<int>(num_heads), static_cast<int>(section_heads)};
}

template <class Config, bool kIsOrdered>
constexpr auto main_kernel() {
  if constexpr (Config::kIsWide) {
    return backward_wide_kernel<Config, kIsOrdered>;
  } else {
    return backward_kernel<Config, kIsOrdered>;
  }
}

// `clusters` of Config::kCluster CTAs each.
template <class Config, class Kernel, class... Arguments>
cudaError_t launch_clusters(Kernel kernel, int64_t clusters, cudaStream_t stream,
                            const Arguments&... arguments) {
  if constexpr (Config::kCluster == 1) {
    return launch_kernel(kernel, clusters, Config::kThreads, Config::kSharedBytes, stream,
                         arguments...);
  } else {
    if (clusters == 0) return cudaSuccess;
    if (clusters > INT32_MAX / Config::kCluster) return cudaErrorInvalidConfiguration;
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes);
    if (error != cudaSuccess) return error;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3(static_cast<unsigned>(clusters * Config::kCluster));
    launch.blockDim = dim3(Config::kThreads);
    launch.dynamicSmemBytes = Config::kSharedBytes;
    launch.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {Config::kCluster, 1, 1};
    launch.attrs = &attribute;
    launch.numAttrs = 1;
    return cudaLaunchKernelEx(&launch, kernel, arguments...);
  }
}

template <class Config>
cudaError_t run_backward(const BackwardParams& params, const SequenceInputs& inputs,
                         float* workspace_data, bool is_deterministic, cudaStream_t stream) {
  const AttentionParams& attention = params.attention;
  const BackwardWorkspaceSizes sizes =
      workspace_sizes<Config>(attention.B, attention.T, attention.S, attention.N,
                              inputs.num_sequences, inputs.query_offsets.data != nullptr);
  const int64_t query_ctas = sizes.entries * sizes.heads * sizes.slots;
  const BackwardWorkspace workspace = make_backward_workspace(workspace_data, sizes);
  BackwardMaps maps = {};
  cudaError_t error = make_maps<Config>(params, &maps);
  if (error != cudaSuccess) return error;
  error = launch_kernel(backward_prepare_kernel<Config>, query_ctas, kPrepareThreads, 0, stream,
                        params, inputs, workspace);
  if (error != cudaSuccess) return error;
  // A causal query tile meets its last key block first when the blocks start together, so that is
  // the order in which their dq comes without waiting.
  const bool is_reversed = attention.window_right >= 0;
  const auto kernel = is_deterministic ? main_kernel<Config, true>() : main_kernel<Config, false>();
  error = launch_clusters<Config>(
      kernel, attention.B * attention.K * sizes.blocks, stream, maps, params, inputs, workspace,
      make_key_grid<Config>(attention, workspace.blocks, is_deterministic), is_reversed);
  if (error != cudaSuccess) return error;
  return launch_kernel(backward_convert_kernel<Config>, query_ctas, kPrepareThreads, 0, stream,
                       params, inputs, workspace);
}

}  // namespace jaxflash::fa3_sm90
