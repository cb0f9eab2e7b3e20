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

xla::ffi::Future cpu_forward(xla::ffi::ThreadPool pool, xla::ffi::RemainingArgs operands,
                             xla::ffi::RemainingRets results, AttentionAttrs attrs) {
  CallReader reader(operands, results, attrs);
  SequenceInputs inputs = {};
  const ForwardParams params = reader.read_forward(&inputs);
  const launch::Workspace slots = reader.read_workspace(
      launch::cpu_forward_slot_floats(params.attention.H, params.attention.Hv));
  if (reader.failed()) return completed(reader.error());
  return start(pool, launch::prepare_forward(params, inputs, reader.take_tables(), slots,
                                             pool.num_threads()));
}

xla::ffi::Future cpu_backward(xla::ffi::ThreadPool pool, xla::ffi::RemainingArgs operands,
                              xla::ffi::RemainingRets results, AttentionAttrs attrs) {
  CallReader reader(operands, results, attrs);
  SequenceInputs inputs = {};
  const BackwardParams params = reader.read_backward(&inputs);
  const launch::Workspace slots = reader.read_workspace(
      launch::cpu_backward_slot_floats(params.attention.H, params.attention.Hv));
  if (reader.failed()) return completed(reader.error());
  return start(pool, launch::prepare_backward(params, inputs, reader.take_tables(), slots,
                                              pool.num_threads()));
}

}  // namespace
}  // namespace jaxflash::ffi

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxflash_cpu_forward_v1, jaxflash::ffi::cpu_forward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jaxflash::ffi::AttentionAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxflash_cpu_backward_v1, jaxflash::ffi::cpu_backward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jaxflash::ffi::AttentionAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
