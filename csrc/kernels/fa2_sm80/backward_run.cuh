// Launches the kernels of one backward call; everything about a launch derives from the Config.
#pragma once

#include <cuda_runtime.h>

#include "kernels/fa2_sm80/backward_kv.cuh"
#include "kernels/fa2_sm80/backward_prepare.cuh"
#include "kernels/fa2_sm80/backward_query.cuh"
#include "kernels/fa2_sm80/config.h"

namespace jaxflash::fa2_sm80 {

template <class Kernel, class... Arguments>
cudaError_t launch_kernel(Kernel kernel, int64_t ctas, int threads, int shared_bytes,
                          cudaStream_t stream, const Arguments&... arguments) {
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(ctas), threads, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

template <class Element>
cudaError_t convert_bias_as(const float* sums, void* dbias, int64_t count, cudaStream_t stream) {
  constexpr int64_t kMaxCtas = 4096;
  const int64_t ctas = (count + kPrepareThreads - 1) / kPrepareThreads;
  return launch_kernel(backward_bias_kernel<Element>, ctas < kMaxCtas ? ctas : kMaxCtas,
                       kPrepareThreads, 0, stream, sums, static_cast<Element*>(dbias), count);
}

// Rounds the sums of the bias gradient, unless they were formed in its own array.
inline cudaError_t convert_bias(const BackwardParams& params, const BackwardWorkspace& workspace,
                                cudaStream_t stream) {
  const BiasGradient& dbias = params.dbias;
  if (workspace.dbias == nullptr || workspace.dbias == dbias.data) return cudaSuccess;
  const int64_t count = dbias.num_batches * dbias.num_heads * dbias.num_rows * dbias.num_columns;
  return params.attention.bias.dtype == DataType::kBFloat16
             ? convert_bias_as<__nv_bfloat16>(workspace.dbias, dbias.data, count, stream)
             : convert_bias_as<__half>(workspace.dbias, dbias.data, count, stream);
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
  error = launch_kernel(backward_kv_kernel<Config, Element, kIsGeneral>,
                        attention.B * attention.K * tiles, Config::kThreads, Config::kSharedBytes,
                        stream, params, inputs, workspace, static_cast<int>(tiles));
  if (error != cudaSuccess) return error;
  if (workspace.dq != nullptr) {
    error = launch_kernel(backward_convert_kernel<Element, Config::kHeadDim>, query_ctas,
                          kPrepareThreads, 0, stream, params, inputs, workspace);
  } else {
    using QueryConfig = BackwardQueryConfig<Config::kHeadDim>;
    error = launch_kernel(backward_query_kernel<QueryConfig, Element, kIsGeneral>, query_ctas,
                          QueryConfig::kThreads, QueryConfig::kSharedBytes, stream, params, inputs,
                          workspace);
  }
  return error != cudaSuccess ? error : convert_bias(params, workspace, stream);
}

}  // namespace jaxflash::fa2_sm80
