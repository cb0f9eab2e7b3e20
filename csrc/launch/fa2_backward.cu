// The backward pass of fa2: the run-time choice of an instance, and the parts of the workspace.
#include <cuda_runtime.h>

#include "kernels/fa2_sm80/backward_run.cuh"
#include "launch/fa2.h"

namespace jaxflash {

// One translation unit each (csrc/kernels/fa2_sm80/instantiate_backward.cu.in).
#define JF_DECLARE(Config, Element, kFeatures)                                          \
  extern template cudaError_t                                                           \
  fa2_sm80::run_backward<fa2_sm80::Config, Element, fa2_sm80::Features::kFeatures>(     \
      const BackwardParams&, const SequenceInputs&, const fa2_sm80::BackwardWorkspace&, \
      cudaStream_t);
#define JF_DECLARE_ALL(Config)                \
  JF_DECLARE(Config, __nv_bfloat16, kPlain)   \
  JF_DECLARE(Config, __nv_bfloat16, kGeneral) \
  JF_DECLARE(Config, __half, kPlain)          \
  JF_DECLARE(Config, __half, kGeneral)
JF_DECLARE_ALL(BackwardConfig64)
JF_DECLARE_ALL(BackwardConfig128)
JF_DECLARE_ALL(BackwardConfig256)
JF_DECLARE_ALL(BackwardConfig256Small)
#undef JF_DECLARE_ALL
#undef JF_DECLARE

}  // namespace jaxflash

namespace jaxflash::launch {
namespace {

using fa2_sm80::BackwardWorkspace;
using fa2_sm80::Features;

struct Call {
  const BackwardParams& params;
  const SequenceInputs& inputs;
  BackwardWorkspace workspace;
  cudaStream_t stream;
};

// Floats of each part of the workspace, in the order in which they lie.
struct WorkspaceParts {
  int64_t statistics, dq, dbias;
};

WorkspaceParts workspace_parts(int64_t query_tiles, int64_t head_dim, int64_t dbias_elements,
                               bool is_deterministic) {
  constexpr int64_t kStatistics = sizeof(fa2_sm80::RowStatistics) / sizeof(float);
  const int64_t sums = is_deterministic ? 0 : fa2_sm80::kBackwardBlockQ * head_dim;
  return {query_tiles * kStatistics, query_tiles * sums, dbias_elements};
}

int64_t query_slots(int64_t T, int64_t num_sequences, bool is_packed) {
  return device::tiles_per_batch(T, num_sequences, is_packed, fa2_sm80::kBackwardBlockQ);
}

template <class Config, class Element>
cudaError_t run_features(const Call& call) {
  return fa2_sm80::features_needed(call.params.attention) == Features::kPlain
             ? fa2_sm80::run_backward<Config, Element, Features::kPlain>(
                   call.params, call.inputs, call.workspace, call.stream)
             : fa2_sm80::run_backward<Config, Element, Features::kGeneral>(
                   call.params, call.inputs, call.workspace, call.stream);
}

template <class Element>
cudaError_t run_head_dim(const Call& call, int64_t head_dim) {
  if (head_dim == 64) return run_features<fa2_sm80::BackwardConfig64, Element>(call);
  if (head_dim == 128) return run_features<fa2_sm80::BackwardConfig128, Element>(call);
  int device = 0, shared_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  return shared_bytes >= fa2_sm80::BackwardConfig256::kSharedBytes
             ? run_features<fa2_sm80::BackwardConfig256, Element>(call)
             : run_features<fa2_sm80::BackwardConfig256Small, Element>(call);
}

// Where the gradient of the bias is summed, cleared.
cudaError_t clear_bias_sums(const BiasGradient& dbias, float* sums, cudaStream_t stream) {
  const int64_t count = dbias.num_batches * dbias.num_heads * dbias.num_rows * dbias.num_columns;
  return cudaMemsetAsync(sums, 0, count * sizeof(float), stream);
}

}  // namespace

int64_t fa2_backward_workspace_floats(const WorkspaceSizes& sizes) {
  const int64_t slots = query_slots(sizes.T, sizes.num_sequences, sizes.num_sequences >= 0);
  const WorkspaceParts parts =
      workspace_parts(sizes.B * sizes.N * slots, fa2_sm80::padded_head_dim(sizes.H, sizes.Hv),
                      sizes.dbias_elements, sizes.is_deterministic);
  return parts.statistics + parts.dq + parts.dbias;
}

cudaError_t fa2_backward(const BackwardParams& params, const SequenceInputs& inputs,
                         float* workspace, bool is_deterministic, cudaStream_t stream) {
  const AttentionParams& attention = params.attention;
  const int64_t head_dim = fa2_sm80::padded_head_dim(attention.H, attention.Hv);
  const int64_t slots =
      query_slots(attention.T, inputs.num_sequences, inputs.query_offsets.data != nullptr);
  const WorkspaceParts parts =
      workspace_parts(attention.B * attention.N * slots, head_dim, 0, is_deterministic);
  Call call = {params, inputs, {}, stream};
  call.workspace.slots = static_cast<int>(slots);
  call.workspace.statistics = reinterpret_cast<fa2_sm80::RowStatistics*>(workspace);
  call.workspace.dq = is_deterministic ? nullptr : workspace + parts.statistics;
  if (params.dbias.data != nullptr) {
    call.workspace.dbias = attention.bias.dtype == DataType::kFloat32
                               ? static_cast<float*>(params.dbias.data)
                               : workspace + parts.statistics + parts.dq;
    const cudaError_t error = clear_bias_sums(params.dbias, call.workspace.dbias, stream);
    if (error != cudaSuccess) return error;
  }
  return attention.dtype == DataType::kBFloat16 ? run_head_dim<__nv_bfloat16>(call, head_dim)
                                                : run_head_dim<__half>(call, head_dim);
}

}  // namespace jaxflash::launch
