// The backward pass of fa1: the run-time choice of an instance, and the parts of the workspace.
#include "kernels/fa1_sm80/backward_run.cuh"
#include "launch/fa1.h"

namespace jaxflash {

// One translation unit each (csrc/kernels/fa1_sm80/instantiate_backward.cu.in).
#define JF_DECLARE(Element, kHeadDim, kFeatures)                                              \
  extern template cudaError_t fa1_sm80::run_backward<                                         \
      fa1_sm80::BackwardConfig<Element, kHeadDim, fa1_sm80::Features::kFeatures>>(            \
      const BackwardParams&, const SequenceInputs&, const fa1_sm80::BackwardWorkspace&, bool, \
      cudaStream_t);
JF_DECLARE(__nv_bfloat16, 64, kPlain)
JF_DECLARE(__nv_bfloat16, 64, kGeneral)
JF_DECLARE(__nv_bfloat16, 128, kPlain)
JF_DECLARE(__nv_bfloat16, 128, kGeneral)
JF_DECLARE(__half, 64, kPlain)
JF_DECLARE(__half, 64, kGeneral)
JF_DECLARE(__half, 128, kPlain)
JF_DECLARE(__half, 128, kGeneral)
#undef JF_DECLARE

}  // namespace jaxflash

namespace jaxflash::launch {
namespace {

using fa1_sm80::BackwardConfig;
using fa1_sm80::Features;

struct Call {
  const BackwardParams& params;
  const SequenceInputs& inputs;
  fa1_sm80::BackwardWorkspace workspace;
  bool is_deterministic;
  cudaStream_t stream;
};

template <class Config>
cudaError_t run(const Call& call) {
  return fa1_sm80::run_backward<Config>(call.params, call.inputs, call.workspace,
                                        call.is_deterministic, call.stream);
}

template <class Element, int kHeadDim>
cudaError_t run_features(const Call& call) {
  return fa1_sm80::features_needed(call.params.attention) == Features::kPlain
             ? run<BackwardConfig<Element, kHeadDim, Features::kPlain>>(call)
             : run<BackwardConfig<Element, kHeadDim, Features::kGeneral>>(call);
}

template <class Element>
cudaError_t run_head_dim(const Call& call, int64_t head_dim) {
  return head_dim == 64 ? run_features<Element, 64>(call) : run_features<Element, 128>(call);
}

// Query rows of all heads, each head's in whole kRowUnits.
int64_t all_rows(int64_t B, int64_t T, int64_t N) {
  return B * N * fa1_sm80::ceil_div(T, fa1_sm80::kRowUnit) * fa1_sm80::kRowUnit;
}

constexpr int64_t kStatistics = sizeof(fa1_sm80::RowStatistics) / sizeof(float);

}  // namespace

int64_t fa1_backward_workspace_floats(const WorkspaceSizes& sizes) {
  return all_rows(sizes.B, sizes.T, sizes.N) *
         (kStatistics + fa1_sm80::padded_head_dim(sizes.H, sizes.Hv));
}

cudaError_t fa1_backward(const BackwardParams& params, const SequenceInputs& inputs,
                         float* workspace, bool is_deterministic, cudaStream_t stream) {
  const AttentionParams& attention = params.attention;
  Call call = {params, inputs, {}, is_deterministic, stream};
  call.workspace.rows = reinterpret_cast<fa1_sm80::RowStatistics*>(workspace);
  call.workspace.dq = workspace + all_rows(attention.B, attention.T, attention.N) * kStatistics;
  call.workspace.padded_rows =
      fa1_sm80::ceil_div(attention.T, fa1_sm80::kRowUnit) * fa1_sm80::kRowUnit;
  const int64_t head_dim = fa1_sm80::padded_head_dim(attention.H, attention.Hv);
  return attention.dtype == DataType::kBFloat16 ? run_head_dim<__nv_bfloat16>(call, head_dim)
                                                : run_head_dim<__half>(call, head_dim);
}

}  // namespace jaxflash::launch
