// Launches the kernels of one backward call; everything about a launch derives from the Config.
#pragma once

#include <cuda_runtime.h>

#include "base/launch_kernel.cuh"
#include "kernels/fa3_sm90/backward.cuh"
#include "kernels/fa3_sm90/backward_prepare.cuh"
#include "kernels/fa3_sm90/tensor_map.h"

namespace jaxflash::fa3_sm90 {

inline int64_t tiles_of(int64_t rows, int tile_rows) { return (rows + tile_rows - 1) / tile_rows; }

template <class Config>
int64_t workspace_floats(int64_t B, int64_t T, int64_t N) {
  return backward_workspace_floats(B * N * tiles_of(T, Config::kBlockQ), Config::kBlockQ,
                                   Config::kHeadDim);
}

template <class Config>
cudaError_t make_maps(const BackwardParams& params, BackwardMaps* maps) {
  const AttentionParams& a = params.attention;
  const struct {
    const void* data;
    int64_t rows, heads, features;
    int box_rows;
    CUtensorMap* map;
  } arrays[] = {{a.q, a.T, a.N, a.H, Config::kBlockQ, &maps->q},
                {params.dout, a.T, a.N, a.Hv, Config::kBlockQ, &maps->dout},
                {a.k, a.S, a.K, a.H, Config::kBlockKV, &maps->k},
                {a.v, a.S, a.K, a.Hv, Config::kBlockKV, &maps->v},
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

template <class Config>
cudaError_t run_backward(const BackwardParams& params, const SequenceInputs& inputs,
                         float* workspace_data, bool is_deterministic, cudaStream_t stream) {
  const AttentionParams& attention = params.attention;
  const int64_t tiles = tiles_of(attention.T, Config::kBlockQ);
  const int64_t blocks = tiles_of(attention.S, Config::kBlockKV);
  const int64_t query_ctas = attention.B * attention.N * tiles;
  const BackwardWorkspace workspace = make_backward_workspace(
      workspace_data, query_ctas, Config::kBlockQ, Config::kHeadDim, static_cast<int>(tiles));
  BackwardMaps maps = {};
  cudaError_t error = make_maps<Config>(params, &maps);
  if (error != cudaSuccess) return error;
  error = launch_kernel(backward_prepare_kernel<Config>, query_ctas, kPrepareThreads, 0, stream,
                        params, inputs, workspace);
  if (error != cudaSuccess) return error;
  // A causal query tile meets its last key block first when the blocks start together, so that is
  // the order in which their dq comes without waiting.
  const bool is_reversed = attention.window_right >= 0;
  const auto kernel =
      is_deterministic ? backward_kernel<Config, true> : backward_kernel<Config, false>;
  error = launch_kernel(kernel, attention.B * attention.K * blocks, Config::kThreads,
                        Config::kSharedBytes, stream, maps, params, inputs, workspace,
                        static_cast<int>(blocks), is_reversed);
  if (error != cudaSuccess) return error;
  return launch_kernel(backward_convert_kernel<Config>, query_ctas, kPrepareThreads, 0, stream,
                       params, workspace);
}

}  // namespace jaxflash::fa3_sm90
