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
#define JF_DECLARE_HALF(Config, kFeatures)     \
  JF_DECLARE(Config, __nv_bfloat16, kFeatures) \
  JF_DECLARE(Config, __half, kFeatures)
#define JF_DECLARE_FLOAT(Config)    \
  JF_DECLARE(Config, float, kPlain) \
  JF_DECLARE(Config, float, kGeneral)
JF_DECLARE_HALF(BackwardConfig64, kPlain)
JF_DECLARE_HALF(BackwardConfig64, kGeneral)
JF_DECLARE_HALF(BackwardConfig128, kPlain)
JF_DECLARE_HALF(BackwardConfig128, kGeneral)
JF_DECLARE_HALF(BackwardRolesConfig128, kPlain)
JF_DECLARE_HALF(BackwardConfig256, kGeneral)
JF_DECLARE_HALF(BackwardRolesConfig256, kPlain)
JF_DECLARE_HALF(BackwardConfig256Small, kPlain)
JF_DECLARE_HALF(BackwardConfig256Small, kGeneral)
JF_DECLARE_FLOAT(BackwardConfigFloat64)
JF_DECLARE_FLOAT(BackwardConfigFloat128)
JF_DECLARE_FLOAT(BackwardConfigFloat256)
JF_DECLARE_FLOAT(BackwardConfigFloat256Small)
#undef JF_DECLARE_FLOAT
#undef JF_DECLARE_HALF
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
  if (is_deterministic) {
    return {query_tiles * kStatistics, 0, fa2_sm80::bias_part_floats(dbias_elements)};
  }
  return {query_tiles * kStatistics, query_tiles * fa2_sm80::kBackwardBlockQ * head_dim,
          dbias_elements};
}

int64_t query_slots(int64_t T, int64_t num_sequences, bool is_packed) {
  return device::tiles_per_batch(T, num_sequences, is_packed, fa2_sm80::kBackwardBlockQ);
}

template <class Config, class Element, Features kFeatures>
cudaError_t run(const Call& call) {
  return fa2_sm80::run_backward<Config, Element, kFeatures>(call.params, call.inputs,
                                                            call.workspace, call.stream);
}

// The config of each head dim; a Large one is taken where a CTA may have the shared memory it
// wants, which compute capability 8.0 does not give.
template <class Element, Features kFeatures>
struct Configs {
  using Of64 = fa2_sm80::BackwardConfig64;
  using Of128 = fa2_sm80::BackwardConfig128;
  using Of128Large = fa2_sm80::BackwardConfig128;
  using Of256 = fa2_sm80::BackwardConfig256Small;
  using Of256Large = fa2_sm80::BackwardConfig256;
};
template <class Element>
struct Configs<Element, Features::kPlain> {
  using Of64 = fa2_sm80::BackwardConfig64;
  using Of128 = fa2_sm80::BackwardConfig128;
  using Of128Large = fa2_sm80::BackwardRolesConfig128;
  using Of256 = fa2_sm80::BackwardConfig256Small;
  using Of256Large = fa2_sm80::BackwardRolesConfig256;
};
struct FloatConfigs {
  using Of64 = fa2_sm80::BackwardConfigFloat64;
  using Of128 = fa2_sm80::BackwardConfigFloat128;
  using Of128Large = fa2_sm80::BackwardConfigFloat128;
  using Of256 = fa2_sm80::BackwardConfigFloat256Small;
  using Of256Large = fa2_sm80::BackwardConfigFloat256;
};
template <>
struct Configs<float, Features::kPlain> : FloatConfigs {};
template <>
struct Configs<float, Features::kGeneral> : FloatConfigs {};

template <class Config, class LargeConfig, class Element, Features kFeatures>
cudaError_t run_largest(const Call& call, int shared_bytes) {
  return shared_bytes >= LargeConfig::kSharedBytes ? run<LargeConfig, Element, kFeatures>(call)
                                                   : run<Config, Element, kFeatures>(call);
}

template <class Element, Features kFeatures>
cudaError_t run_head_dim(const Call& call, int64_t head_dim) {
  using Of = Configs<Element, kFeatures>;
  if (head_dim == 64) return run<typename Of::Of64, Element, kFeatures>(call);
  int device = 0, shared_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  return head_dim == 128
             ? run_largest<typename Of::Of128, typename Of::Of128Large, Element, kFeatures>(
                   call, shared_bytes)
             : run_largest<typename Of::Of256, typename Of::Of256Large, Element, kFeatures>(
                   call, shared_bytes);
}

template <class Element>
cudaError_t run_features(const Call& call, int64_t head_dim) {
  return fa2_sm80::features_needed(call.params.attention) == Features::kPlain
             ? run_head_dim<Element, Features::kPlain>(call, head_dim)
             : run_head_dim<Element, Features::kGeneral>(call, head_dim);
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
  if (params.dbias.data != nullptr && is_deterministic) {
    call.workspace.dbias_parts = workspace + parts.statistics + parts.dq;
  } else if (params.dbias.data != nullptr) {
    call.workspace.dbias = attention.bias.dtype == DataType::kFloat32
                               ? static_cast<float*>(params.dbias.data)
                               : workspace + parts.statistics + parts.dq;
    const cudaError_t error = clear_bias_sums(params.dbias, call.workspace.dbias, stream);
    if (error != cudaSuccess) return error;
  }
  switch (attention.dtype) {
    case DataType::kBFloat16:
      return run_features<__nv_bfloat16>(call, head_dim);
    case DataType::kFloat16:
      return run_features<__half>(call, head_dim);
    default:
      return run_features<float>(call, head_dim);
  }
}

}  // namespace jaxflash::launch
