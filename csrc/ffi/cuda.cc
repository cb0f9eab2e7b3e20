// CUDA handlers: decode, check, fill the parameters, launch on XLA's stream.
//
// A handler neither waits nor allocates, so that XLA may record it into a command buffer.
#include <cuda_runtime_api.h>

#include <string>

#include "ffi/attrs.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "launch/fa2.h"
#include "xla/ffi/api/ffi.h"

namespace jaxflash::ffi {
namespace {

using Result = xla::ffi::Result<Buffer>;

xla::ffi::Error launched(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return xla::ffi::Error::Success();
  return xla::ffi::Error::Internal(std::string("jaxflash: ") + what +
                                   " failed to launch: " + cudaGetErrorName(error) + " (" +
                                   cudaGetErrorString(error) + ")");
}

// What the host tables of the CPU can express and the kernels' strides cannot.
void check_limits(const AttentionParams& params, OperandReader* reader) {
  if (reader->failed()) return;
  reader->require(reader->num_batch_dims() <= kMaxBatchDims,
                  "fa2 takes up to 4 batch dims; reshape them into fewer");
  const char* refusal = launch::fa2_refusal(params);
  reader->require(refusal == nullptr, refusal == nullptr ? "" : refusal);
}

xla::ffi::Error fa2_forward(cudaStream_t stream, Buffer q, Buffer k, Buffer v, Buffer bias,
                            Buffer mask, Buffer block_mask, Buffer query_lengths, Buffer kv_lengths,
                            Buffer query_segment_ids, Buffer kv_segment_ids, Buffer query_offsets,
                            Buffer kv_offsets, Buffer sinks, Buffer dropout_batch,
                            Buffer dropout_heads, Result out, Result lse, Result lse_low,
                            Result /*workspace*/, AttentionAttrs attrs) {
  OperandReader reader;
  ForwardParams params = {};
  SequenceInputs inputs = {};
  AttentionParams& attention = params.attention;
  reader.read_common({q, k, v, bias, mask, block_mask, query_lengths, kv_lengths, query_segment_ids,
                      kv_segment_ids, query_offsets, kv_offsets, dropout_batch, dropout_heads},
                     attrs, &attention, &inputs);
  check_limits(attention, &reader);
  if (reader.failed()) return reader.error();
  const int64_t T = attention.T, N = attention.N, Hv = attention.Hv;
  params.sinks = reader.read("sinks", sinks, {Element::F32}, {N}, false);
  params.out = reader.read_full("out", *out, q.element_type(), {T, N, Hv});
  params.lse = static_cast<float*>(reader.read_full("lse", *lse, Element::F32, {T, N}));
  params.lse_low = static_cast<float*>(reader.read_full("lse_low", *lse_low, Element::F32, {T, N}));
  if (reader.failed()) return reader.error();
  return launched(launch::fa2_forward(params, inputs, stream), "fa2 forward");
}

xla::ffi::Error fa2_backward(cudaStream_t stream, Buffer q, Buffer k, Buffer v, Buffer bias,
                             Buffer mask, Buffer block_mask, Buffer query_lengths,
                             Buffer kv_lengths, Buffer query_segment_ids, Buffer kv_segment_ids,
                             Buffer query_offsets, Buffer kv_offsets, Buffer dropout_batch,
                             Buffer dropout_heads, Buffer out, Buffer lse, Buffer lse_low,
                             Buffer dout, Buffer dlse, Result dq, Result dk, Result dv,
                             Result dbias, Result delta, Result workspace, AttentionAttrs attrs) {
  OperandReader reader;
  BackwardParams params = {};
  SequenceInputs inputs = {};
  AttentionParams& attention = params.attention;
  reader.read_common({q, k, v, bias, mask, block_mask, query_lengths, kv_lengths, query_segment_ids,
                      kv_segment_ids, query_offsets, kv_offsets, dropout_batch, dropout_heads},
                     attrs, &attention, &inputs);
  check_limits(attention, &reader);
  if (reader.failed()) return reader.error();
  const int64_t T = attention.T, S = attention.S, N = attention.N, K = attention.K;
  const int64_t H = attention.H, Hv = attention.Hv;
  const Element element = q.element_type();
  params.out = reader.read_full("out", out, element, {T, N, Hv});
  params.lse = static_cast<float*>(reader.read_full("lse", lse, Element::F32, {T, N}));
  params.lse_low = static_cast<float*>(reader.read_full("lse_low", lse_low, Element::F32, {T, N}));
  if (dlse.element_count() > 0) {
    params.dlse = static_cast<float*>(reader.read_full("dlse", dlse, Element::F32, {T, N}));
  }
  params.dout = reader.read_full("dout", dout, element, {T, N, Hv});
  params.dq = reader.read_full("dq", *dq, element, {T, N, H});
  params.dk = reader.read_full("dk", *dk, element, {S, K, H});
  params.dv = reader.read_full("dv", *dv, element, {S, K, Hv});
  params.delta = static_cast<float*>(reader.read_full("delta", *delta, Element::F32, {T, N}));
  params.dbias = reader.read_bias_gradient(*dbias, bias, attention);
  const int64_t num_sequences = inputs.query_offsets.data == nullptr ? -1 : inputs.num_sequences;
  const bool is_summed_in_place = dbias->element_type() == Element::F32;
  const int64_t dbias_elements = is_summed_in_place ? 0 : dbias->element_count();
  const int64_t floats = launch::fa2_backward_workspace_floats(
      attention.B, T, N, H, Hv, num_sequences, dbias_elements, attrs.is_deterministic);
  const launch::Workspace scratch = reader.read_workspace(*workspace, floats);
  if (reader.failed()) return reader.error();
  return launched(
      launch::fa2_backward(params, inputs, scratch.data, attrs.is_deterministic, stream),
      "fa2 backward");
}

}  // namespace
}  // namespace jaxflash::ffi

using jaxflash::ffi::Buffer;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxflash_fa2_forward_v1, jaxflash::ffi::fa2_forward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Buffer>()  // q
                                  .Arg<Buffer>()  // k
                                  .Arg<Buffer>()  // v
                                  .Arg<Buffer>()  // bias
                                  .Arg<Buffer>()  // mask
                                  .Arg<Buffer>()  // block_mask
                                  .Arg<Buffer>()  // query_lengths
                                  .Arg<Buffer>()  // kv_lengths
                                  .Arg<Buffer>()  // query_segment_ids
                                  .Arg<Buffer>()  // kv_segment_ids
                                  .Arg<Buffer>()  // query_offsets
                                  .Arg<Buffer>()  // kv_offsets
                                  .Arg<Buffer>()  // sinks
                                  .Arg<Buffer>()  // dropout_batch
                                  .Arg<Buffer>()  // dropout_heads
                                  .Ret<Buffer>()  // out
                                  .Ret<Buffer>()  // lse
                                  .Ret<Buffer>()  // lse_low
                                  .Ret<Buffer>()  // workspace
                                  .Attrs<jaxflash::ffi::AttentionAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxflash_fa2_backward_v1, jaxflash::ffi::fa2_backward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Buffer>()  // q
                                  .Arg<Buffer>()  // k
                                  .Arg<Buffer>()  // v
                                  .Arg<Buffer>()  // bias
                                  .Arg<Buffer>()  // mask
                                  .Arg<Buffer>()  // block_mask
                                  .Arg<Buffer>()  // query_lengths
                                  .Arg<Buffer>()  // kv_lengths
                                  .Arg<Buffer>()  // query_segment_ids
                                  .Arg<Buffer>()  // kv_segment_ids
                                  .Arg<Buffer>()  // query_offsets
                                  .Arg<Buffer>()  // kv_offsets
                                  .Arg<Buffer>()  // dropout_batch
                                  .Arg<Buffer>()  // dropout_heads
                                  .Arg<Buffer>()  // out
                                  .Arg<Buffer>()  // lse
                                  .Arg<Buffer>()  // lse_low
                                  .Arg<Buffer>()  // dout
                                  .Arg<Buffer>()  // dlse
                                  .Ret<Buffer>()  // dq
                                  .Ret<Buffer>()  // dk
                                  .Ret<Buffer>()  // dv
                                  .Ret<Buffer>()  // dbias
                                  .Ret<Buffer>()  // delta
                                  .Ret<Buffer>()  // workspace
                                  .Attrs<jaxflash::ffi::AttentionAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
