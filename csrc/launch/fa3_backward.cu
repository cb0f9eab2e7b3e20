// The backward pass of fa3: the run-time choice of an instance.
#include <cuda_runtime.h>

#include "kernels/fa3_sm90/backward_run.cuh"
#include "kernels/fa3_sm90/instances.h"
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
JF_DECLARE_ALL(BackwardConfig96)
JF_DECLARE_ALL(BackwardConfig128)
JF_DECLARE_ALL(BackwardConfig192x128)
JF_DECLARE_ALL(BackwardConfig192)
JF_DECLARE_ALL(BackwardConfig256)
#undef JF_DECLARE_ALL
#undef JF_DECLARE

}  // namespace jaxflash

namespace jaxflash::launch {

using fa3_sm90::BackwardConfigFor, fa3_sm90::Features;

int64_t fa3_backward_workspace_floats(const WorkspaceSizes& sizes) {
  return fa3_sm90::with_head_dims(sizes.H, sizes.Hv, [&](auto dims) {
    // The layout is the same for all elements and features.
    using Config = BackwardConfigFor<__half, decltype(dims), Features::kPlain>;
    return fa3_sm90::backward_workspace_floats(fa3_sm90::workspace_sizes<Config>(
        sizes.B, sizes.T, sizes.S, sizes.N, sizes.num_sequences, sizes.num_sequences >= 0));
  });
}

cudaError_t fa3_backward(const BackwardParams& params, const SequenceInputs& inputs,
                         float* workspace, bool is_deterministic, cudaStream_t stream) {
  return fa3_sm90::with_instance(params.attention, inputs, [&](auto instance) {
    using Instance = decltype(instance);
    using Config = BackwardConfigFor<typename Instance::Element, Instance, Instance::kFeatures>;
    return fa3_sm90::run_backward<Config>(params, inputs, workspace, is_deterministic, stream);
  });
}

}  // namespace jaxflash::launch
