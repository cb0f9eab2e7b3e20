// Reads the buffers of one call into params.h records and remembers the first thing that is wrong.
//
// Every implementation's handlers take the same operands and results in the same order, which
// checks.cc lists. Python validates what users pass; a message from here means that the two sides
// disagree.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/attrs.h"
#include "launch/cpu.h"
#include "params.h"
#include "xla/ffi/api/ffi.h"

namespace jaxflash::ffi {

using Buffer = xla::ffi::AnyBuffer;
using Element = xla::ffi::DataType;

// Buffers by name, in the order in which XLA passes them.
struct NamedBuffers {
  const std::vector<std::string_view>* names;
  std::vector<Buffer> buffers;

  Buffer at(std::string_view name) const;
};

class CallReader {
 public:
  CallReader(const xla::ffi::RemainingArgs& operands, const xla::ffi::RemainingRets& results,
             const AttentionAttrs& attrs)
      : attrs_(attrs), given_operands_(operands), given_results_(results) {}

  // The whole call but its workspace.
  ForwardParams read_forward(SequenceInputs* inputs);
  BackwardParams read_backward(SequenceInputs* inputs);

  launch::Workspace read_workspace(int64_t floats_needed);

  void require(bool is_met, const std::string& message);
  size_t num_batch_dims() const { return batch_dims_.size(); }
  bool failed() const { return !error_.empty(); }
  xla::ffi::Error error() const;
  launch::OffsetTables take_tables() { return std::move(tables_); }

 private:
  void name_buffers(const std::vector<std::string_view>& operands,
                    const std::vector<std::string_view>& results);

  // What both directions have; afterwards the other reads are relative to q's dims.
  void read_common(AttentionParams* params, SequenceInputs* inputs);
  void read_sizes(AttentionParams* params);
  void read_offsets(const AttentionParams& params, SequenceInputs* inputs);

  // An optional operand of shape [*batch, *trailing], each batch dim q's or 1. The trailing dims
  // may be 1 too if is_broadcastable. No elements = absent.
  BroadcastArray read(std::string_view name, std::initializer_list<Element> elements,
                      std::initializer_list<int64_t> trailing, bool is_broadcastable);

  // An operand or result that is a full array of shape [*batch, *trailing].
  void* read_operand(std::string_view name, Element element,
                     std::initializer_list<int64_t> trailing) {
    return failed() ? nullptr : read_full(name, operands_.at(name), element, trailing);
  }
  void* read_result(std::string_view name, Element element,
                    std::initializer_list<int64_t> trailing) {
    return failed() ? nullptr : read_full(name, results_.at(name), element, trailing);
  }
  void* read_full(std::string_view name, Buffer buffer, Element element,
                  std::initializer_list<int64_t> trailing);

  // Groups batch entries by the bias entry they read; dbias has bias's shape.
  BiasGradient read_bias_gradient(const AttentionParams& params);

  AttentionAttrs attrs_;
  xla::ffi::RemainingArgs given_operands_;
  xla::ffi::RemainingRets given_results_;
  NamedBuffers operands_, results_;
  std::vector<int64_t> batch_dims_;
  launch::OffsetTables tables_;
  std::string error_;
};

// "f32[2,128,8,64]"-like description for messages.
std::string describe(Buffer buffer);

}  // namespace jaxflash::ffi
