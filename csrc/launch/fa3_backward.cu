// The backward pass of fa3: the run-time choice of an instance.
#include <cuda_runtime.h>

#include "kernels/fa3_sm90/backward_run.cuh"
#include "launch/fa3.h"

namespace jaxflash {

// One translation unit each (csrc/kernels/fa3_sm90/instantiate_backward.cu.in).
#define JF_DECLARE(Config)                                              \
  extern template cudaError_t fa3_sm90::run_backward<fa3_sm90::Config>( \
      const BackwardParams&, const SequenceInputs&, float*, bool, cudaStream_t);
JF_DECLARE(BackwardConfig64<__nv_bfloat16>)
JF_DECLARE(BackwardConfig64<__half>)
JF_DECLARE(BackwardConfig128<__nv_bfloat16>)
JF_DECLARE(BackwardConfig128<__half>)
#undef JF_DECLARE

}  // namespace jaxflash

namespace jaxflash::launch {
namespace {

bool is_narrow(int64_t H, int64_t Hv) { return H <= 64 && Hv <= 64; }

template <class Element>
cudaError_t run_element(const BackwardParams& params, const SequenceInputs& inputs,
                        float* workspace, bool is_deterministic, cudaStream_t stream) {
  return is_narrow(params.attention.H, params.attention.Hv)
             ? fa3_sm90::run_backward<fa3_sm90::BackwardConfig64<Element>>(
                   params, inputs, workspace, is_deterministic, stream)
             : fa3_sm90::run_backward<fa3_sm90::BackwardConfig128<Element>>(
                   params, inputs, workspace, is_deterministic, stream);
}

}  // namespace

int64_t fa3_backward_workspace_floats(const WorkspaceSizes& sizes) {
  using Element = __half;  // the layout is the same for both
  return is_narrow(sizes.H, sizes.Hv)
             ? fa3_sm90::workspace_floats<fa3_sm90::BackwardConfig64<Element>>(sizes.B, sizes.T,
                                                                               sizes.N)
             : fa3_sm90::workspace_floats<fa3_sm90::BackwardConfig128<Element>>(sizes.B, sizes.T,
                                                                                sizes.N);
}

cudaError_t fa3_backward(const BackwardParams& params, const SequenceInputs& inputs,
                         float* workspace, bool is_deterministic, cudaStream_t stream) {
  return params.attention.dtype == DataType::kBFloat16
             ? run_element<__nv_bfloat16>(params, inputs, workspace, is_deterministic, stream)
             : run_element<__half>(params, inputs, workspace, is_deterministic, stream);
}

}  // namespace jaxflash::launch
