// The FFI handlers this library offers, for module.cc to export.
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* jaxflash_cpu_forward_v1(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* jaxflash_cpu_backward_v1(XLA_FFI_CallFrame* call_frame);
#if defined(JAXFLASH_HAS_CUDA)
XLA_FFI_Error* jaxflash_fa1_forward_v1(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* jaxflash_fa1_backward_v1(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* jaxflash_fa2_forward_v1(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* jaxflash_fa2_backward_v1(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* jaxflash_fa3_forward_v1(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* jaxflash_fa3_backward_v1(XLA_FFI_CallFrame* call_frame);
#endif
}
