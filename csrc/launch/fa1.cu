#include "kernels/fa1_sm80/run.cuh"
#include "launch/fa1.h"

namespace jaxflash {

// One translation unit each (csrc/kernels/fa1_sm80/instantiate.cu.in).
#define JF_DECLARE(Element, kHeadDim, kColumns, kFeatures)                                  \
  extern template cudaError_t fa1_sm80::run_forward<                                        \
      fa1_sm80::ForwardConfig<Element, kHeadDim, kColumns, fa1_sm80::Features::kFeatures>>( \
      const ForwardParams&, const SequenceInputs&, fa1_sm80::ForwardWorkspace, cudaStream_t);
#define JF_DECLARE_ALL(Element)          \
  JF_DECLARE(Element, 64, 256, kPlain)   \
  JF_DECLARE(Element, 64, 128, kPlain)   \
  JF_DECLARE(Element, 64, 128, kGeneral) \
  JF_DECLARE(Element, 128, 128, kPlain)  \
  JF_DECLARE(Element, 128, 128, kGeneral)
JF_DECLARE_ALL(__nv_bfloat16)
JF_DECLARE_ALL(__half)
#undef JF_DECLARE_ALL
#undef JF_DECLARE

}  // namespace jaxflash

namespace jaxflash::launch {
namespace {

using fa1_sm80::Features;

struct Call {
  const ForwardParams& params;
  const SequenceInputs& inputs;
  fa1_sm80::ForwardWorkspace workspace;
  cudaStream_t stream;
};

template <class Element, int kHeadDim, int kColumns, Features kFeatures>
cudaError_t run(const Call& call) {
  return fa1_sm80::run_forward<fa1_sm80::ForwardConfig<Element, kHeadDim, kColumns, kFeatures>>(
      call.params, call.inputs, call.workspace, call.stream);
}

// A block of columns should not hold two blocks of the block mask: one of them may be zero.
bool takes_wide_blocks(const AttentionParams& params) {
  return params.block_mask.data == nullptr || params.mask_block_kv % 256 == 0;
}

template <class Element>
cudaError_t run_features(const Call& call, int64_t head_dim) {
  const AttentionParams& attention = call.params.attention;
  const bool is_general = fa1_sm80::features_needed(attention) == Features::kGeneral;
  if (head_dim == 128) {
    return is_general ? run<Element, 128, 128, Features::kGeneral>(call)
                      : run<Element, 128, 128, Features::kPlain>(call);
  }
  if (is_general) return run<Element, 64, 128, Features::kGeneral>(call);
  return takes_wide_blocks(attention) ? run<Element, 64, 256, Features::kPlain>(call)
                                      : run<Element, 64, 128, Features::kPlain>(call);
}

int64_t padded_rows(int64_t T) {
  return fa1_sm80::ceil_div(T, fa1_sm80::kRowUnit) * fa1_sm80::kRowUnit;
}

// Floats of m and l of all rows.
int64_t state_floats(int64_t B, int64_t T, int64_t N) {
  constexpr int64_t kState = sizeof(fa1_sm80::RowState) / sizeof(float);
  return B * N * padded_rows(T) * kState;
}

}  // namespace

const char* fa1_refusal(const AttentionParams& params, const SequenceInputs& inputs) {
  if (params.dtype == DataType::kFloat32) return "fa1 takes float16 and bfloat16";
  if (fa1_sm80::padded_head_dim(params.H, params.Hv) == 0) return "fa1 takes head dims up to 128";
  if (params.bias.data != nullptr) return "fa1 takes no bias";
  if (params.logits_soft_cap > 0.0f) return "fa1 takes no logits_soft_cap";
  if (inputs.query_offsets.data != nullptr) return "fa1 takes no packed sequences";
  // RowTiles counts the tiles of a head in words of 32 bits.
  constexpr int64_t kFar = int64_t{1} << 23;
  if (params.T >= kFar || params.S >= kFar) return "fa1 takes T and S below 2^23";
  return nullptr;
}

int64_t fa1_forward_workspace_floats(const WorkspaceSizes& sizes) {
  // The only column block of a row writes out at once.
  constexpr int64_t kFewestColumns = 128;
  const int64_t head_dim =
      sizes.S <= kFewestColumns ? 0 : fa1_sm80::padded_head_dim(sizes.H, sizes.Hv);
  return state_floats(sizes.B, sizes.T, sizes.N) +
         sizes.B * sizes.N * padded_rows(sizes.T) * head_dim;
}

cudaError_t fa1_forward(const ForwardParams& params, const SequenceInputs& inputs, float* workspace,
                        cudaStream_t stream) {
  const AttentionParams& attention = params.attention;
  Call call = {params, inputs, {}, stream};
  call.workspace.rows = reinterpret_cast<fa1_sm80::RowState*>(workspace);
  call.workspace.output = workspace + state_floats(attention.B, attention.T, attention.N);
  call.workspace.padded_rows = padded_rows(attention.T);
  const int64_t head_dim = fa1_sm80::padded_head_dim(attention.H, attention.Hv);
  return attention.dtype == DataType::kBFloat16 ? run_features<__nv_bfloat16>(call, head_dim)
                                                : run_features<__half>(call, head_dim);
}

}  // namespace jaxflash::launch
