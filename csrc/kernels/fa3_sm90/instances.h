// Which instance of fa3 runs a call. The same for forward and backward, as in CMakeLists.txt.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/fa3_sm90/features.h"

namespace jaxflash::fa3_sm90 {

// Padded head dims: of queries and keys, and of values and output.
template <int kHeadDim_, int kHeadDimV_>
struct HeadDims {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
};

// Calls `use` with those that hold H and Hv at the least cost.
template <class Use>
auto with_head_dims(int64_t H, int64_t Hv, const Use& use) {
  if (H <= 64 && Hv <= 64) return use(HeadDims<64, 64>());
  if (H <= 96 && Hv <= 96) return use(HeadDims<96, 96>());
  if (H <= 128 && Hv <= 128) return use(HeadDims<128, 128>());
  if (H <= 192 && Hv <= 128) return use(HeadDims<192, 128>());
  if (H <= 192 && Hv <= 192) return use(HeadDims<192, 192>());
  return use(HeadDims<256, 256>());
}

template <class Element_, class Dims, Features kFeatures_>
struct Instance : Dims {
  using Element = Element_;
  static constexpr Features kFeatures = kFeatures_;
};

// Calls `use` with the Instance that runs the call.
template <class Use>
auto with_instance(const AttentionParams& params, const SequenceInputs& inputs, const Use& use) {
  return with_head_dims(params.H, params.Hv, [&](auto dims) {
    using Dims = decltype(dims);
    const bool is_plain = features_needed(params, inputs) == Features::kPlain;
    if (params.dtype == DataType::kBFloat16) {
      return is_plain ? use(Instance<__nv_bfloat16, Dims, Features::kPlain>())
                      : use(Instance<__nv_bfloat16, Dims, Features::kGeneral>());
    }
    return is_plain ? use(Instance<__half, Dims, Features::kPlain>())
                    : use(Instance<__half, Dims, Features::kGeneral>());
  });
}

}  // namespace jaxflash::fa3_sm90
