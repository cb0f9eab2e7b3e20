#include "kernels/fa3_sm90/run.cuh"
#include "launch/fa3.h"

namespace jaxflash {

// One translation unit each (csrc/kernels/fa3_sm90/instantiate.cu.in).
#define JF_DECLARE(Element, kHeadDim)                                                            \
  extern template cudaError_t fa3_sm90::run_forward<fa3_sm90::ForwardConfig<Element, kHeadDim>>( \
      const ForwardParams&, const SequenceInputs&, int*, cudaStream_t);
JF_DECLARE(__nv_bfloat16, 64)
JF_DECLARE(__nv_bfloat16, 128)
JF_DECLARE(__half, 64)
JF_DECLARE(__half, 128)
#undef JF_DECLARE

}  // namespace jaxflash

namespace jaxflash::launch {
namespace {

template <class Element>
cudaError_t run_head_dim(const ForwardParams& params, const SequenceInputs& inputs, int* drawn,
                         cudaStream_t stream) {
  using fa3_sm90::ForwardConfig;
  return fa3_sm90::padded_head_dim(params.attention.H, params.attention.Hv) == 64
             ? fa3_sm90::run_forward<ForwardConfig<Element, 64>>(params, inputs, drawn, stream)
             : fa3_sm90::run_forward<ForwardConfig<Element, 128>>(params, inputs, drawn, stream);
}

// Compute capability of the current device, major * 10 + minor; 0 where it cannot be asked.
int compute_capability() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return 0;
  }
  return 10 * major + minor;
}

}  // namespace

const char* fa3_refusal(const AttentionParams& params, const SequenceInputs& inputs) {
  if (params.dtype == DataType::kFloat32) return "fa3 takes float16 and bfloat16";
  if (fa3_sm90::padded_head_dim(params.H, params.Hv) == 0) return "fa3 takes head dims up to 128";
  if (params.H % 8 != 0 || params.Hv % 8 != 0) return "fa3 takes head dims that are multiples of 8";
  if (params.T >= device::kFar || params.S >= device::kFar) return "fa3 takes T and S below 2^30";
  if (!(params.softmax_scale > 0.0f)) return "fa3 takes a scale above 0";
  if (params.bias.data != nullptr) return "fa3 takes no bias";
  if (params.mask.data != nullptr) return "fa3 takes no mask";
  if (params.block_mask.data != nullptr) return "fa3 takes no block mask";
  if (params.query_segment_ids.data != nullptr) return "fa3 takes no segment ids";
  if (params.logits_soft_cap > 0.0f) return "fa3 takes no logits_soft_cap";
  if (params.dropout_threshold > 0) return "fa3 takes no dropout";
  if (inputs.query_offsets.data != nullptr) return "fa3 takes no packed sequences (cu_seqlens)";
  if (compute_capability() != 90) return "fa3 needs compute capability 9.0";
  return nullptr;
}

// The counter of drawn tiles (fa3_sm90::Schedule).
int64_t fa3_forward_workspace_floats(const WorkspaceSizes& /*sizes*/) { return 1; }

cudaError_t fa3_forward(const ForwardParams& params, const SequenceInputs& inputs, float* workspace,
                        cudaStream_t stream) {
  int* drawn = reinterpret_cast<int*>(workspace);
  return params.attention.dtype == DataType::kBFloat16
             ? run_head_dim<__nv_bfloat16>(params, inputs, drawn, stream)
             : run_head_dim<__half>(params, inputs, drawn, stream);
}

}  // namespace jaxflash::launch
