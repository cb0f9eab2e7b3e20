// Reads FFI buffers into params.h records and remembers the first thing that is wrong with them.
//
// Python validates what users pass; a message from here means that the two sides disagree.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "ffi/attrs.h"
#include "launch/cpu.h"
#include "params.h"
#include "xla/ffi/api/ffi.h"

namespace jaxflash::ffi {

using Buffer = xla::ffi::AnyBuffer;
using Element = xla::ffi::DataType;

// Operands both directions have, in the order in which they are bound.
struct CommonOperands {
  Buffer q, k, v, bias, mask, block_mask, query_lengths, kv_lengths, query_segment_ids,
      kv_segment_ids, query_offsets, kv_offsets, dropout_batch, dropout_heads;
};

class OperandReader {
 public:
  // Fills params and inputs; afterwards the other reads are relative to q's dims.
  void read_common(const CommonOperands& operands, const AttentionAttrs& attrs,
                   AttentionParams* params, SequenceInputs* inputs);

  // An optional operand of shape [*batch, *trailing], each batch dim q's or 1. The trailing dims
  // may be 1 too if is_broadcastable. No elements = absent.
  BroadcastArray read(const char* name, Buffer buffer, std::initializer_list<Element> elements,
                      std::initializer_list<int64_t> trailing, bool is_broadcastable);

  // A full array of shape [*batch, *trailing].
  void* read_full(const char* name, Buffer buffer, Element element,
                  std::initializer_list<int64_t> trailing);

  launch::Workspace read_workspace(Buffer buffer, int64_t floats_needed);

  // Groups batch entries by the bias entry they read; dbias has bias's shape.
  BiasGradient read_bias_gradient(Buffer dbias, Buffer bias, const AttentionParams& params);

  void require(bool is_met, const std::string& message);
  size_t num_batch_dims() const { return batch_dims_.size(); }
  bool failed() const { return !error_.empty(); }
  xla::ffi::Error error() const;
  launch::OffsetTables take_tables() { return std::move(tables_); }

 private:
  void read_sizes(const CommonOperands& operands, AttentionParams* params);
  void read_offsets(const CommonOperands& operands, const AttentionParams& params,
                    SequenceInputs* inputs);

  std::vector<int64_t> batch_dims_;
  launch::OffsetTables tables_;
  std::string error_;
};

// "f32[2,128,8,64]"-like description for messages.
std::string describe(Buffer buffer);

}  // namespace jaxflash::ffi
