#include "kernels/fa2_sm80/run.cuh"
#include "kernels/fa2_sm80/run_split.cuh"
#include "launch/fa2.h"

namespace jaxflash {

// Translation units of their own: csrc/kernels/fa2_sm80/instantiate.cu.in, instantiate_split.cu.in.
#define JF_DECLARE(Element, kHeadDim, kFeatures)                                  \
  extern template cudaError_t fa2_sm80::run_forward<                              \
      fa2_sm80::ForwardConfig<Element, kHeadDim, fa2_sm80::Features::kFeatures>>( \
      const ForwardParams&, const SequenceInputs&, cudaStream_t);
#define JF_DECLARE_SPLIT(Element, kHeadDim, kFeatures)                                  \
  JF_DECLARE(Element, kHeadDim, kFeatures)                                              \
  extern template cudaError_t                                                           \
  fa2_sm80::run_split<Element, kHeadDim, fa2_sm80::Features::kFeatures>(                \
      const ForwardParams&, const SequenceInputs&, const fa2_sm80::SplitSizes&, float*, \
      cudaStream_t);
#define JF_DECLARE_HEAD_DIM(kHeadDim)                 \
  JF_DECLARE_SPLIT(__nv_bfloat16, kHeadDim, kPlain)   \
  JF_DECLARE_SPLIT(__nv_bfloat16, kHeadDim, kGeneral) \
  JF_DECLARE_SPLIT(__half, kHeadDim, kPlain)          \
  JF_DECLARE_SPLIT(__half, kHeadDim, kGeneral)        \
  JF_DECLARE(float, kHeadDim, kPlain)                 \
  JF_DECLARE(float, kHeadDim, kGeneral)
JF_DECLARE_HEAD_DIM(64)
JF_DECLARE_HEAD_DIM(128)
JF_DECLARE_HEAD_DIM(256)
#undef JF_DECLARE_HEAD_DIM
#undef JF_DECLARE_SPLIT
#undef JF_DECLARE

}  // namespace jaxflash

namespace jaxflash::launch {
namespace {

using fa2_sm80::Features;

template <class Element, int kHeadDim, Features kFeatures>
cudaError_t run(const ForwardParams& params, const SequenceInputs& inputs, float* workspace,
                cudaStream_t stream) {
  if constexpr (sizeof(Element) == 2) {
    const AttentionParams& attention = params.attention;
    const fa2_sm80::SplitSizes split =
        fa2_sm80::split_sizes(attention.T, attention.S, attention.group_size, kHeadDim,
                              inputs.query_offsets.data != nullptr);
    if (split.num_chunks > 0) {
      return fa2_sm80::run_split<Element, kHeadDim, kFeatures>(params, inputs, split, workspace,
                                                               stream);
    }
  }
  return fa2_sm80::run_forward<fa2_sm80::ForwardConfig<Element, kHeadDim, kFeatures>>(
      params, inputs, stream);
}

template <class Element, int kHeadDim>
cudaError_t run_features(const ForwardParams& params, const SequenceInputs& inputs,
                         float* workspace, cudaStream_t stream) {
  if (fa2_sm80::features_needed(params.attention) == Features::kPlain) {
    return run<Element, kHeadDim, Features::kPlain>(params, inputs, workspace, stream);
  }
  return run<Element, kHeadDim, Features::kGeneral>(params, inputs, workspace, stream);
}

template <class Element>
cudaError_t run_head_dim(const ForwardParams& params, const SequenceInputs& inputs,
                         float* workspace, cudaStream_t stream) {
  switch (fa2_sm80::padded_head_dim(params.attention.H, params.attention.Hv)) {
    case 64:
      return run_features<Element, 64>(params, inputs, workspace, stream);
    case 128:
      return run_features<Element, 128>(params, inputs, workspace, stream);
    default:
      return run_features<Element, 256>(params, inputs, workspace, stream);
  }
}

}  // namespace

const char* fa2_refusal(const AttentionParams& params) {
  if (fa2_sm80::padded_head_dim(params.H, params.Hv) == 0) return "fa2 takes head dims up to 256";
  if (params.T >= device::kFar || params.S >= device::kFar) return "fa2 takes T and S below 2^30";
  if (params.N * (params.H > params.Hv ? params.H : params.Hv) >= int64_t{1} << 26) {
    return "fa2 takes fewer than 2^26 features a row, all heads together";
  }
  return nullptr;
}

int64_t fa2_forward_workspace_floats(const WorkspaceSizes& sizes) {
  const int64_t head_dim = fa2_sm80::padded_head_dim(sizes.H, sizes.Hv);
  const int64_t group_size = sizes.K > 0 ? sizes.N / sizes.K : 1;
  const fa2_sm80::SplitSizes split =
      fa2_sm80::split_sizes(sizes.T, sizes.S, group_size, head_dim, sizes.num_sequences >= 0);
  return fa2_sm80::split_workspace_floats(sizes.B * sizes.T * sizes.N, split.num_chunks, head_dim);
}

cudaError_t fa2_forward(const ForwardParams& params, const SequenceInputs& inputs, float* workspace,
                        cudaStream_t stream) {
  switch (params.attention.dtype) {
    case DataType::kBFloat16:
      return run_head_dim<__nv_bfloat16>(params, inputs, workspace, stream);
    case DataType::kFloat16:
      return run_head_dim<__half>(params, inputs, workspace, stream);
    default:
      return run_head_dim<float>(params, inputs, workspace, stream);
  }
}

}  // namespace jaxflash::launch
