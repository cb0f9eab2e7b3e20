// Attributes of the FFI targets: static scalars, the same for forward and backward. Python casts
// to exactly these types in one place, jaxflash/_backends/ffi.py.
#pragma once

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace jaxflash::ffi {

struct AttentionAttrs {
  float softmax_scale;
  float logits_soft_cap;  // 0 = none
  int64_t window_left;    // -1 = unbounded
  int64_t window_right;   // -1 = unbounded; causal is 0
  bool is_bottom_right;
  int32_t dropout_threshold;  // of 65536; 0 = no dropout
  float dropout_scale;
  int64_t mask_block_q;  // 0 = no block mask
  int64_t mask_block_kv;
  bool is_deterministic;  // bitwise repeatable gradients; the CPU's always are
};

}  // namespace jaxflash::ffi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxflash::ffi::AttentionAttrs,
                                      xla::ffi::StructMember<float>("softmax_scale"),
                                      xla::ffi::StructMember<float>("logits_soft_cap"),
                                      xla::ffi::StructMember<int64_t>("window_left"),
                                      xla::ffi::StructMember<int64_t>("window_right"),
                                      xla::ffi::StructMember<bool>("is_bottom_right"),
                                      xla::ffi::StructMember<int32_t>("dropout_threshold"),
                                      xla::ffi::StructMember<float>("dropout_scale"),
                                      xla::ffi::StructMember<int64_t>("mask_block_q"),
                                      xla::ffi::StructMember<int64_t>("mask_block_kv"),
                                      xla::ffi::StructMember<bool>("is_deterministic"));
