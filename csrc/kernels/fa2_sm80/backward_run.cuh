// Launches the kernels of one backward call; everything about a launch derives from the Config.
#pragma once

#include <cuda_runtime.h>

#include "base/launch_kernel.cuh"
#include "kernels/fa2_sm80/backward_bias.cuh"
#include "kernels/fa2_sm80/backward_kv.cuh"
#include "kernels/fa2_sm80/backward_prepare.cuh"
#include "kernels/fa2_sm80/backward_query.cuh"
#include "kernels/fa2_sm80/backward_roles.cuh"
#include "kernels/fa2_sm80/config.h"

namespace jaxflash::fa2_sm80 {

template <class Element>
cudaError_t convert_bias_as(const float* sums, int parts, const BiasGradient& dbias,
                            cudaStream_t stream) {
  const int64_t count = dbias.num_batches * dbias.num_heads * dbias.num_rows * dbias.num_columns;
  constexpr int64_t kMaxCtas = 4096;
  const int64_t ctas = (count + kPrepareThreads - 1) / kPrepareThreads;
  return launch_kernel(backward_bias_kernel<Element>, ctas < kMaxCtas ? ctas : kMaxCtas,
                       kPrepareThreads, 0, stream, sums, static_cast<Element*>(dbias.data), count,
                       parts);
}

// Adds and rounds partial sums of the bias gradient, unless they were formed in its own array.
inline cudaError_t convert_bias(const BackwardParams& params, const float* sums, int parts,
                                cudaStream_t stream) {
  const BiasGradient& dbias = params.dbias;
  if (sums == nullptr || sums == dbias.data) return cudaSuccess;
  switch (params.attention.bias.dtype) {
    case DataType::kFloat32:
      return convert_bias_as<float>(sums, parts, dbias, stream);
    case DataType::kBFloat16:
      return convert_bias_as<__nv_bfloat16>(sums, parts, dbias, stream);
    default:
      return convert_bias_as<__half>(sums, parts, dbias, stream);
  }
}

// The bias gradient without atomics; needs what the prepare kernel left.
template <class Config, class Element>
cudaError_t run_bias_tiles(const BackwardParams& params, const SequenceInputs& inputs,
                           const BackwardWorkspace& workspace, cudaStream_t stream) {
  const BiasPlan plan = plan_bias<Config>(params, workspace.dbias_parts);
  const cudaError_t error = launch_kernel(backward_bias_tile_kernel<Config, Element>,
                                          params.dbias.num_batches * params.dbias.num_heads *
                                              plan.row_tiles * plan.column_tiles * plan.parts,
                                          Config::kThreads, Config::kSharedBytes, stream, params,
                                          inputs, workspace, plan);
  if (error != cudaSuccess || plan.parts == 1) return error;
  return convert_bias(params, workspace.dbias_parts, plan.parts, stream);
}

// Causal tiles differ in length. Two for each CTA that runs at a time (counted on 128
// multiprocessors) are enough to end together; more heads at a time would want more of the L2
// cache.
template <class Config>
KvGrid order_kv_tiles(const AttentionParams& params, int64_t tiles) {
  constexpr int64_t kCtasOfBlock = 256 * Config::kCtasPerSm;
  const bool is_causal = params.window_left < 0 && params.window_right >= 0;
  const int64_t heads = is_causal && tiles > 0 ? kCtasOfBlock / tiles : 1;
  return {static_cast<int>(tiles), static_cast<int>(heads > 1 ? heads : 1)};
}

template <class Config, class Element, Features kFeatures>
cudaError_t run_backward(const BackwardParams& params, const SequenceInputs& inputs,
                         const BackwardWorkspace& workspace, cudaStream_t stream) {
  constexpr bool kIsGeneral = kFeatures == Features::kGeneral;
  const AttentionParams& attention = params.attention;
  const int64_t query_ctas = attention.B * attention.N * workspace.slots;
  cudaError_t error = launch_kernel(backward_prepare_kernel<Element, Config::kHeadDim>, query_ctas,
                                    kPrepareThreads, 0, stream, params, inputs, workspace);
  if (error != cudaSuccess) return error;
  const int64_t tiles = device::tiles_per_batch(
      attention.S, inputs.num_sequences, inputs.query_offsets.data != nullptr, Config::kBlockKV);
  const auto launch_kv = [&](auto kernel) {
    return launch_kernel(kernel, attention.B * attention.K * tiles, Config::kThreads,
                         Config::kSharedBytes, stream, params, inputs, workspace,
                         order_kv_tiles<Config>(attention, tiles));
  };
  if constexpr (Config::kHasRoles) {
    error = launch_kv(backward_roles_kernel<Config, Element>);
  } else {
    error = launch_kv(backward_kv_kernel<Config, Element, kIsGeneral>);
  }
  if (error != cudaSuccess) return error;
  if (workspace.dq != nullptr) {
    error = launch_kernel(backward_convert_kernel<Element, Config::kHeadDim>, query_ctas,
                          kPrepareThreads, 0, stream, params, inputs, workspace);
  } else {
    using QueryConfig = BackwardQueryConfig<typename Config::Stored, Config::kHeadDim>;
    error = launch_kernel(backward_query_kernel<QueryConfig, Element, kIsGeneral>, query_ctas,
                          QueryConfig::kThreads, QueryConfig::kSharedBytes, stream, params, inputs,
                          workspace);
  }
  if (error != cudaSuccess) return error;
  if constexpr (kIsGeneral) {  // a call with a bias runs the general instance
    if (workspace.dbias_parts != nullptr) {
      using BiasConfig = BackwardBiasConfig<typename Config::Stored, Config::kHeadDim>;
      return run_bias_tiles<BiasConfig, Element>(params, inputs, workspace, stream);
    }
  }
  return convert_bias(params, workspace.dbias, 1, stream);
}

}  // namespace jaxflash::fa2_sm80
