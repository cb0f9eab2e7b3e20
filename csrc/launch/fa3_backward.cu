// The backward pass of fa3: the run-time choice of an instance.
#include <cuda_runtime.h>

#include "kernels/fa3_sm90/backward_run.cuh"
#include "launch/fa3.h"

namespace jaxflash {

// One translation unit each (csrc/kernels/fa3_sm90/instantiate_backward.cu.in).
#define JF_DECLARE(Config, Element, kFeatures)                                      \
  extern template cudaError_t                                                       \
  fa3_sm90::run_backward<fa3_sm90::Config<Element, fa3_sm90::Features::kFeatures>>( \
      const BackwardParams&, const SequenceInputs&, float*, bool, cudaStream_t);
#define JF_DECLARE_ALL(Config)                \
  JF_DECLARE(Config, __nv_bfloat16, kPlain)   \
  JF_DECLARE(Config, __nv_bfloat16, kGeneral) \
  JF_DECLARE(Config, __half, kPlain)          \
  JF_DECLARE(Config, __half, kGeneral)
JF_DECLARE_ALL(BackwardConfig64)
JF_DECLARE_ALL(BackwardConfig128)
JF_DECLARE_ALL(BackwardConfig192x128)
JF_DECLARE_ALL(BackwardConfig192)
JF_DECLARE_ALL(BackwardConfig256)
#undef JF_DECLARE_ALL
#undef JF_DECLARE

}  // namespace jaxflash

namespace jaxflash::launch {
namespace {

using fa3_sm90::Features;

struct Call {
  const BackwardParams& params;
  const SequenceInputs& inputs;
  float* workspace;
  bool is_deterministic;
  cudaStream_t stream;
};

template <class Config_>
struct Chosen {
  using Config = Config_;
};

// Calls `use` with the instance whose head dims hold H and Hv at the least cost.
template <class Element, Features kFeatures, class Use>
auto with_config(int64_t H, int64_t Hv, const Use& use) {
  if (H <= 64 && Hv <= 64) return use(Chosen<fa3_sm90::BackwardConfig64<Element, kFeatures>>());
  if (H <= 128 && Hv <= 128) return use(Chosen<fa3_sm90::BackwardConfig128<Element, kFeatures>>());
  if (H <= 192 && Hv <= 128)
    return use(Chosen<fa3_sm90::BackwardConfig192x128<Element, kFeatures>>());
  if (H <= 192 && Hv <= 192) return use(Chosen<fa3_sm90::BackwardConfig192<Element, kFeatures>>());
  return use(Chosen<fa3_sm90::BackwardConfig256<Element, kFeatures>>());
}

template <class Element, Features kFeatures>
cudaError_t run_head_dim(const Call& call) {
  const AttentionParams& attention = call.params.attention;
  return with_config<Element, kFeatures>(attention.H, attention.Hv, [&](auto chosen) {
    return fa3_sm90::run_backward<typename decltype(chosen)::Config>(
        call.params, call.inputs, call.workspace, call.is_deterministic, call.stream);
  });
}

template <class Element>
cudaError_t run_features(const Call& call) {
  return fa3_sm90::features_needed(call.params.attention, call.inputs) == Features::kPlain
             ? run_head_dim<Element, Features::kPlain>(call)
             : run_head_dim<Element, Features::kGeneral>(call);
}

}  // namespace

int64_t fa3_backward_workspace_floats(const WorkspaceSizes& sizes) {
  // The layout is the same for all elements and features.
  return with_config<__half, Features::kPlain>(sizes.H, sizes.Hv, [&](auto chosen) {
    return fa3_sm90::backward_workspace_floats(
        fa3_sm90::workspace_sizes<typename decltype(chosen)::Config>(
            sizes.B, sizes.T, sizes.S, sizes.N, sizes.num_sequences, sizes.num_sequences >= 0));
  });
}

cudaError_t fa3_backward(const BackwardParams& params, const SequenceInputs& inputs,
                         float* workspace, bool is_deterministic, cudaStream_t stream) {
  const Call call = {params, inputs, workspace, is_deterministic, stream};
  return params.attention.dtype == DataType::kBFloat16 ? run_features<__nv_bfloat16>(call)
                                                       : run_features<__half>(call);
}

}  // namespace jaxflash::launch
