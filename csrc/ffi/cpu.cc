// CPU handlers: decode, check, fill the parameters, hand the job to XLA's thread pool.
//
// A handler never blocks: workers drain the job on the pool and the last one completes the future,
// until which XLA keeps every buffer alive. Small jobs run on the calling thread.
#include "launch/cpu.h"

#include "ffi/attrs.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jaxflash::ffi {
namespace {

using Result = xla::ffi::Result<Buffer>;

xla::ffi::Future completed(const xla::ffi::Error& error) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  if (error.success()) {
    promise.SetAvailable();
  } else {
    promise.SetError(error);
  }
  return future;
}

xla::ffi::Future start(xla::ffi::ThreadPool pool, std::shared_ptr<launch::Job> job) {
  const int64_t num_workers = job->num_workers();
  if (num_workers <= 1) {
    job->work(0);
    return completed(xla::ffi::Error::Success());
  }
  xla::ffi::CountDownPromise running(num_workers);
  xla::ffi::Future future(running);
  for (int64_t slot = 0; slot < num_workers; ++slot) {
    pool.Schedule([job, running, slot]() mutable {
      job->work(slot);
      running.CountDown();
    });
  }
  return future;
}

xla::ffi::Future cpu_forward(xla::ffi::ThreadPool pool, Buffer q, Buffer k, Buffer v, Buffer bias,
                             Buffer mask, Buffer block_mask, Buffer query_lengths,
                             Buffer kv_lengths, Buffer query_segment_ids, Buffer kv_segment_ids,
                             Buffer query_offsets, Buffer kv_offsets, Buffer sinks,
                             Buffer dropout_batch, Buffer dropout_heads, Result out, Result lse,
                             Result lse_low, Result workspace, AttentionAttrs attrs) {
  OperandReader reader;
  ForwardParams params = {};
  SequenceInputs inputs = {};
  AttentionParams& attention = params.attention;
  reader.read_common({q, k, v, bias, mask, block_mask, query_lengths, kv_lengths, query_segment_ids,
                      kv_segment_ids, query_offsets, kv_offsets, dropout_batch, dropout_heads},
                     attrs, &attention, &inputs);
  if (reader.failed()) return completed(reader.error());
  const int64_t T = attention.T, N = attention.N, H = attention.H, Hv = attention.Hv;
  params.sinks = reader.read("sinks", sinks, {Element::F32}, {N}, false);
  params.out = reader.read_full("out", *out, q.element_type(), {T, N, Hv});
  params.lse = static_cast<float*>(reader.read_full("lse", *lse, Element::F32, {T, N}));
  params.lse_low = static_cast<float*>(reader.read_full("lse_low", *lse_low, Element::F32, {T, N}));
  const launch::Workspace slots =
      reader.read_workspace(*workspace, launch::cpu_forward_slot_floats(H, Hv));
  if (reader.failed()) return completed(reader.error());
  return start(pool, launch::prepare_forward(params, inputs, reader.take_tables(), slots,
                                             pool.num_threads()));
}

xla::ffi::Future cpu_backward(xla::ffi::ThreadPool pool, Buffer q, Buffer k, Buffer v, Buffer bias,
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
  if (reader.failed()) return completed(reader.error());
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
  const launch::Workspace slots =
      reader.read_workspace(*workspace, launch::cpu_backward_slot_floats(H, Hv));
  if (reader.failed()) return completed(reader.error());
  return start(pool, launch::prepare_backward(params, inputs, reader.take_tables(), slots,
                                              pool.num_threads()));
}

}  // namespace
}  // namespace jaxflash::ffi

using jaxflash::ffi::Buffer;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxflash_cpu_forward_v1, jaxflash::ffi::cpu_forward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxflash_cpu_backward_v1, jaxflash::ffi::cpu_backward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
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
