#include "kernels/fa3_sm90/instances.h"
#include "kernels/fa3_sm90/run.cuh"
#include "launch/fa3.h"

namespace jaxflash {

// One translation unit each (csrc/kernels/fa3_sm90/instantiate.cu.in).
#define JF_DECLARE(Element, kHeadDim, kHeadDimV, kFeatures)                                  \
  extern template cudaError_t fa3_sm90::run_forward<                                         \
      fa3_sm90::ForwardConfig<Element, kHeadDim, kHeadDimV, fa3_sm90::Features::kFeatures>>( \
      const ForwardParams&, const SequenceInputs&, int*, cudaStream_t);
#define JF_DECLARE_HEAD_DIMS(kHeadDim, kHeadDimV)          \
  JF_DECLARE(__nv_bfloat16, kHeadDim, kHeadDimV, kPlain)   \
  JF_DECLARE(__nv_bfloat16, kHeadDim, kHeadDimV, kGeneral) \
  JF_DECLARE(__half, kHeadDim, kHeadDimV, kPlain)          \
  JF_DECLARE(__half, kHeadDim, kHeadDimV, kGeneral)
JF_DECLARE_HEAD_DIMS(64, 64)
JF_DECLARE_HEAD_DIMS(96, 96)
JF_DECLARE_HEAD_DIMS(128, 128)
JF_DECLARE_HEAD_DIMS(192, 128)
JF_DECLARE_HEAD_DIMS(192, 192)
JF_DECLARE_HEAD_DIMS(256, 256)
#undef JF_DECLARE_HEAD_DIMS
#undef JF_DECLARE

}  // namespace jaxflash

namespace jaxflash::launch {
namespace {

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
  if (params.H > 256 || params.Hv > 256) return "fa3 takes head dims up to 256";
  if (params.H % 8 != 0 || params.Hv % 8 != 0) return "fa3 takes head dims that are multiples of 8";
  if (params.T >= device::kFar || params.S >= device::kFar) return "fa3 takes T and S below 2^30";
  if (!(params.softmax_scale > 0.0f)) return "fa3 takes a scale above 0";
  if (params.bias.data != nullptr) return "fa3 takes no bias";
  if (params.mask.data != nullptr) return "fa3 takes no mask";
  // The kernels have what it takes, but on a GPU some such calls have not ended
  // (docs/kernels/fa3_sm90.md).
  if (inputs.query_offsets.data != nullptr) return "fa3 takes no packed sequences";
  if (params.dropout_threshold > 0) return "fa3 takes no dropout";
  if (compute_capability() != 90) return "fa3 needs compute capability 9.0";
  return nullptr;
}

// The counter of drawn tiles (fa3_sm90::Schedule).
int64_t fa3_forward_workspace_floats(const WorkspaceSizes& /*sizes*/) { return 1; }

cudaError_t fa3_forward(const ForwardParams& params, const SequenceInputs& inputs, float* workspace,
                        cudaStream_t stream) {
  return fa3_sm90::with_instance(params.attention, inputs, [&](auto instance) {
    using Instance = decltype(instance);
    using Config = fa3_sm90::ForwardConfig<typename Instance::Element, Instance::kHeadDim,
                                           Instance::kHeadDimV, Instance::kFeatures>;
    return fa3_sm90::run_forward<Config>(params, inputs, reinterpret_cast<int*>(workspace), stream);
  });
}

}  // namespace jaxflash::launch
