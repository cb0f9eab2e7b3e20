// The FFI handlers this library offers, for module.cc to export.
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* jaxflash_cpu_forward_v1(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* jaxflash_cpu_backward_v1(XLA_FFI_CallFrame* call_frame);
}
