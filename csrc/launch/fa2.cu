#include "kernels/fa2_sm80/run.cuh"
#include "launch/fa2.h"

namespace jaxflash {

// One translation unit each (csrc/kernels/fa2_sm80/instantiate.cu.in).
#define JF_DECLARE(Element, kHeadDim)                                                              \
  extern template cudaError_t                                                                      \
  fa2_sm80::run_forward<fa2_sm80::ForwardConfig<Element, kHeadDim, fa2_sm80::Features::kPlain>>(   \
      const ForwardParams&, const SequenceInputs&, cudaStream_t);                                  \
  extern template cudaError_t                                                                      \
  fa2_sm80::run_forward<fa2_sm80::ForwardConfig<Element, kHeadDim, fa2_sm80::Features::kGeneral>>( \
      const ForwardParams&, const SequenceInputs&, cudaStream_t);
JF_DECLARE(__nv_bfloat16, 64)
JF_DECLARE(__nv_bfloat16, 128)
JF_DECLARE(__nv_bfloat16, 256)
JF_DECLARE(__half, 64)
JF_DECLARE(__half, 128)
JF_DECLARE(__half, 256)
#undef JF_DECLARE

}  // namespace jaxflash

namespace jaxflash::launch {
namespace {

using fa2_sm80::Features;

template <class Element, int kHeadDim>
cudaError_t run_features(const ForwardParams& params, const SequenceInputs& inputs,
                         cudaStream_t stream) {
  if (fa2_sm80::features_needed(params.attention) == Features::kPlain) {
    return fa2_sm80::run_forward<fa2_sm80::ForwardConfig<Element, kHeadDim, Features::kPlain>>(
        params, inputs, stream);
  }
  return fa2_sm80::run_forward<fa2_sm80::ForwardConfig<Element, kHeadDim, Features::kGeneral>>(
      params, inputs, stream);
}

template <class Element>
cudaError_t run_head_dim(const ForwardParams& params, const SequenceInputs& inputs,
                         cudaStream_t stream) {
  switch (fa2_sm80::padded_head_dim(params.attention.H, params.attention.Hv)) {
    case 64:
      return run_features<Element, 64>(params, inputs, stream);
    case 128:
      return run_features<Element, 128>(params, inputs, stream);
    default:
      return run_features<Element, 256>(params, inputs, stream);
  }
}

}  // namespace

const char* fa2_refusal(const AttentionParams& params) {
  if (params.dtype == DataType::kFloat32) return "fa2 takes float16 and bfloat16";
  if (fa2_sm80::padded_head_dim(params.H, params.Hv) == 0) return "fa2 takes head dims up to 256";
  if (params.T >= device::kFar || params.S >= device::kFar) return "fa2 takes T and S below 2^30";
  return nullptr;
}

int64_t fa2_forward_workspace_floats(const WorkspaceSizes& /*sizes*/) { return 0; }

cudaError_t fa2_forward(const ForwardParams& params, const SequenceInputs& inputs,
                        float* /*workspace*/, cudaStream_t stream) {
  return params.attention.dtype == DataType::kBFloat16
             ? run_head_dim<__nv_bfloat16>(params, inputs, stream)
             : run_head_dim<__half>(params, inputs, stream);
}

}  // namespace jaxflash::launch
