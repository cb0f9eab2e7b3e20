// CUDA handlers: decode, check, launch on XLA's stream. The same for every GPU implementation.
//
// A handler neither waits nor allocates, so that XLA may record it into a command buffer.
#include <cuda_runtime_api.h>

#include <string>

#include "ffi/attrs.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "launch/fa1.h"
#include "launch/fa2.h"
#include "launch/fa3.h"
#include "xla/ffi/api/ffi.h"

namespace jaxflash::ffi {
namespace {

struct Fa1 {
  static constexpr const char* kName = "fa1";
  static constexpr bool kTakesSinks = false;
  static constexpr auto refusal = launch::fa1_refusal;
  static constexpr auto forward = launch::fa1_forward;
  static constexpr auto backward = launch::fa1_backward;
  static constexpr auto forward_workspace_floats = launch::fa1_forward_workspace_floats;
  static constexpr auto backward_workspace_floats = launch::fa1_backward_workspace_floats;
};

struct Fa2 {
  static constexpr const char* kName = "fa2";
  static constexpr bool kTakesSinks = true;
  static const char* refusal(const AttentionParams& params, const SequenceInputs&) {
    return launch::fa2_refusal(params);
  }
  static constexpr auto forward = launch::fa2_forward;
  static constexpr auto backward = launch::fa2_backward;
  static constexpr auto forward_workspace_floats = launch::fa2_forward_workspace_floats;
  static constexpr auto backward_workspace_floats = launch::fa2_backward_workspace_floats;
};

struct Fa3 {
  static constexpr const char* kName = "fa3";
  static constexpr bool kTakesSinks = true;
  static constexpr auto refusal = launch::fa3_refusal;
  static constexpr auto forward = launch::fa3_forward;
  static constexpr auto backward = launch::fa3_backward;
  static constexpr auto forward_workspace_floats = launch::fa3_forward_workspace_floats;
  static constexpr auto backward_workspace_floats = launch::fa3_backward_workspace_floats;
};

xla::ffi::Error launched(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return xla::ffi::Error::Success();
  return xla::ffi::Error::Internal("jaxflash: " + what +
                                   " failed to launch: " + cudaGetErrorName(error) + " (" +
                                   cudaGetErrorString(error) + ")");
}

// What the host tables of the CPU can express and the kernels' strides cannot.
template <class Kernels>
void check_limits(const AttentionParams& params, const SequenceInputs& inputs, CallReader* reader) {
  if (reader->failed()) return;
  reader->require(
      reader->num_batch_dims() <= kMaxBatchDims,
      std::string(Kernels::kName) + " takes up to 4 batch dims; reshape them into fewer");
  const char* refusal = Kernels::refusal(params, inputs);
  reader->require(refusal == nullptr, refusal == nullptr ? "" : refusal);
}

launch::WorkspaceSizes sizes_of(const AttentionParams& params, const SequenceInputs& inputs) {
  launch::WorkspaceSizes sizes = {};
  sizes.B = params.B;
  sizes.T = params.T;
  sizes.S = params.S;
  sizes.N = params.N;
  sizes.K = params.K;
  sizes.H = params.H;
  sizes.Hv = params.Hv;
  sizes.num_sequences = inputs.query_offsets.data == nullptr ? -1 : inputs.num_sequences;
  return sizes;
}

template <class Kernels>
xla::ffi::Error run_forward(cudaStream_t stream, xla::ffi::RemainingArgs operands,
                            xla::ffi::RemainingRets results, AttentionAttrs attrs) {
  CallReader reader(operands, results, attrs);
  SequenceInputs inputs = {};
  const ForwardParams params = reader.read_forward(&inputs);
  check_limits<Kernels>(params.attention, inputs, &reader);
  if (reader.failed()) return reader.error();
  const launch::Workspace scratch =
      reader.read_workspace(Kernels::forward_workspace_floats(sizes_of(params.attention, inputs)));
  if (reader.failed()) return reader.error();
  return launched(Kernels::forward(params, inputs, scratch.data, stream),
                  std::string(Kernels::kName) + " forward");
}

template <class Kernels>
xla::ffi::Error run_backward(cudaStream_t stream, xla::ffi::RemainingArgs operands,
                             xla::ffi::RemainingRets results, AttentionAttrs attrs) {
  CallReader reader(operands, results, attrs);
  SequenceInputs inputs = {};
  const BackwardParams params = reader.read_backward(&inputs);
  check_limits<Kernels>(params.attention, inputs, &reader);
  if (reader.failed()) return reader.error();
  launch::WorkspaceSizes sizes = sizes_of(params.attention, inputs);
  const BiasGradient& dbias = params.dbias;
  const bool is_summed_in_place =
      params.attention.bias.dtype == DataType::kFloat32 && !attrs.is_deterministic;
  if (dbias.data != nullptr && !is_summed_in_place) {
    sizes.dbias_elements = dbias.num_batches * dbias.num_heads * dbias.num_rows * dbias.num_columns;
  }
  sizes.is_deterministic = attrs.is_deterministic;
  const launch::Workspace scratch =
      reader.read_workspace(Kernels::backward_workspace_floats(sizes));
  if (reader.failed()) return reader.error();
  return launched(Kernels::backward(params, inputs, scratch.data, attrs.is_deterministic, stream),
                  std::string(Kernels::kName) + " backward");
}

}  // namespace
}  // namespace jaxflash::ffi

#define JF_CUDA_HANDLER(name, function)                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,                                    \
                                xla::ffi::Ffi::Bind()                              \
                                    .Ctx<xla::ffi::PlatformStream<cudaStream_t>>() \
                                    .RemainingArgs()                               \
                                    .RemainingRets()                               \
                                    .Attrs<jaxflash::ffi::AttentionAttrs>(),       \
                                {xla::ffi::Traits::kCmdBufferCompatible})

JF_CUDA_HANDLER(jaxflash_fa1_forward_v1, jaxflash::ffi::run_forward<jaxflash::ffi::Fa1>);
JF_CUDA_HANDLER(jaxflash_fa1_backward_v1, jaxflash::ffi::run_backward<jaxflash::ffi::Fa1>);
JF_CUDA_HANDLER(jaxflash_fa2_forward_v1, jaxflash::ffi::run_forward<jaxflash::ffi::Fa2>);
JF_CUDA_HANDLER(jaxflash_fa2_backward_v1, jaxflash::ffi::run_backward<jaxflash::ffi::Fa2>);
JF_CUDA_HANDLER(jaxflash_fa3_forward_v1, jaxflash::ffi::run_forward<jaxflash::ffi::Fa3>);
JF_CUDA_HANDLER(jaxflash_fa3_backward_v1, jaxflash::ffi::run_backward<jaxflash::ffi::Fa3>);
