#include "ffi/checks.h"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

namespace jaxflash::ffi {
namespace {

using Names = std::vector<std::string_view>;

// The order of the operands and results of every handler; jaxflash/_backends/ffi.py has the same.
const Names kForwardOperands = {"q",
                                "k",
                                "v",
                                "bias",
                                "mask",
                                "block_mask",
                                "query_lengths",
                                "kv_lengths",
                                "query_segment_ids",
                                "kv_segment_ids",
                                "query_offsets",
                                "kv_offsets",
                                "sinks",
                                "dropout_batch",
                                "dropout_heads"};
const Names kForwardResults = {"out", "lse", "lse_low", "workspace"};
const Names kBackwardOperands = {"q",
                                 "k",
                                 "v",
                                 "bias",
                                 "mask",
                                 "block_mask",
                                 "query_lengths",
                                 "kv_lengths",
                                 "query_segment_ids",
                                 "kv_segment_ids",
                                 "query_offsets",
                                 "kv_offsets",
                                 "dropout_batch",
                                 "dropout_heads",
                                 "out",
                                 "lse",
                                 "lse_low",
                                 "dout",
                                 "dlse"};
const Names kBackwardResults = {"dq", "dk", "dv", "dbias", "delta", "workspace"};

DataType data_type(Element element) {
  if (element == Element::BF16) return DataType::kBFloat16;
  return element == Element::F16 ? DataType::kFloat16 : DataType::kFloat32;
}

std::string shape_text(const std::vector<int64_t>& dims) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < dims.size(); ++i) text << (i == 0 ? "" : ", ") << dims[i];
  text << "]";
  return text.str();
}

std::vector<int64_t> dims_of(Buffer buffer) {
  const auto dims = buffer.dimensions();
  return {dims.begin(), dims.end()};
}

int64_t product(const std::vector<int64_t>& dims) {
  return std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>());
}

// Offsets of every flattened entry of full_dims in an array of dims (1 = broadcast) whose entries
// are entry_size elements apart.
std::vector<int64_t> offsets_of(const std::vector<int64_t>& full_dims,
                                const std::vector<int64_t>& dims, int64_t entry_size) {
  std::vector<int64_t> offsets = {0};
  std::vector<int64_t> strides(dims.size());
  int64_t stride = entry_size;
  for (size_t i = dims.size(); i-- > 0;) {
    strides[i] = dims[i] == 1 ? 0 : stride;
    stride *= dims[i];
  }
  for (size_t i = 0; i < full_dims.size(); ++i) {
    std::vector<int64_t> longer;
    longer.reserve(offsets.size() * full_dims[i]);
    for (const int64_t offset : offsets) {
      for (int64_t index = 0; index < full_dims[i]; ++index) {
        longer.push_back(offset + index * strides[i]);
      }
    }
    offsets = std::move(longer);
  }
  return offsets;
}

}  // namespace

std::string describe(Buffer buffer) {
  std::ostringstream text;
  text << buffer.element_type() << shape_text(dims_of(buffer));
  return text.str();
}

Buffer NamedBuffers::at(std::string_view name) const {
  return buffers[std::find(names->begin(), names->end(), name) - names->begin()];
}

void CallReader::name_buffers(const Names& operands, const Names& results) {
  operands_.names = &operands;
  results_.names = &results;
  require(given_operands_.size() == operands.size() && given_results_.size() == results.size(),
          "takes " + std::to_string(operands.size()) + " operands and " +
              std::to_string(results.size()) + " results, got " +
              std::to_string(given_operands_.size()) + " and " +
              std::to_string(given_results_.size()));
  for (size_t i = 0; i < operands.size() && !failed(); ++i) {
    const auto buffer = given_operands_.get<Buffer>(i);
    require(buffer.has_value(), std::string(operands[i]) + " is no buffer");
    if (!failed()) operands_.buffers.push_back(*buffer);
  }
  for (size_t i = 0; i < results.size() && !failed(); ++i) {
    auto buffer = given_results_.get<Buffer>(i);
    require(buffer.has_value(), std::string(results[i]) + " is no buffer");
    if (!failed()) results_.buffers.push_back(**buffer);
  }
}

void CallReader::require(bool is_met, const std::string& message) {
  if (!is_met && error_.empty()) error_ = message;
}

xla::ffi::Error CallReader::error() const {
  return xla::ffi::Error::InvalidArgument("jaxflash: " + error_ +
                                          " (the Python side should have refused this)");
}

void CallReader::read_sizes(AttentionParams* params) {
  const Buffer q_buffer = operands_.at("q"), k_buffer = operands_.at("k");
  const Buffer v_buffer = operands_.at("v");
  const auto q = dims_of(q_buffer), k = dims_of(k_buffer), v = dims_of(v_buffer);
  require(q.size() >= 3, "q must be [*batch, T, N, H], got " + describe(q_buffer));
  if (failed()) return;
  batch_dims_.assign(q.begin(), q.end() - 3);
  const size_t b = batch_dims_.size();
  const bool shapes_agree = k.size() == b + 3 && v.size() == b + 3 &&
                            std::equal(batch_dims_.begin(), batch_dims_.end(), k.begin()) &&
                            std::equal(k.begin(), k.end() - 1, v.begin()) && k[b + 2] == q[b + 2];
  const std::string seen =
      describe(q_buffer) + ", " + describe(k_buffer) + ", " + describe(v_buffer);
  require(shapes_agree,
          "k must be [*batch, S, K, H] and v [*batch, S, K, Hv]; q, k, v are " + seen);
  const Element element = q_buffer.element_type();
  require(element == Element::F32 || element == Element::BF16 || element == Element::F16,
          "q must be float32, bfloat16 or float16; q, k, v are " + seen);
  require(k_buffer.element_type() == element && v_buffer.element_type() == element,
          "q, k, v must have one dtype, got " + seen);
  if (failed()) return;
  params->B = product(batch_dims_);
  std::fill_n(params->batch_dims, kMaxBatchDims, 1);
  if (b <= kMaxBatchDims) {
    std::copy(batch_dims_.begin(), batch_dims_.end(), params->batch_dims + kMaxBatchDims - b);
  }
  params->T = q[b];
  params->N = q[b + 1];
  params->H = q[b + 2];
  params->S = k[b];
  params->K = k[b + 1];
  params->Hv = v[b + 2];
  require(params->K > 0 ? params->N % params->K == 0 : params->N == 0,
          "N must be a multiple of K; q, k, v are " + seen);
  if (failed()) return;
  params->group_size = params->K > 0 ? params->N / params->K : 1;
  params->q = q_buffer.untyped_data();
  params->k = k_buffer.untyped_data();
  params->v = v_buffer.untyped_data();
  params->dtype = data_type(element);
}

void CallReader::read_offsets(const AttentionParams& params, SequenceInputs* inputs) {
  const auto dims = dims_of(operands_.at("query_offsets"));
  const int64_t points = dims.empty() ? 0 : dims.back();
  inputs->query_offsets = read("query_offsets", {Element::S32}, {points}, false);
  inputs->kv_offsets = read("kv_offsets", {Element::S32}, {points}, false);
  inputs->num_sequences = points - 1;
  const bool is_packed = inputs->query_offsets.data != nullptr;
  require(is_packed == (inputs->kv_offsets.data != nullptr),
          "query_offsets and kv_offsets must come together");
  if (!is_packed) return;
  const bool is_plain = params.bias.data == nullptr && params.mask.data == nullptr &&
                        params.block_mask.data == nullptr &&
                        params.query_segment_ids.data == nullptr &&
                        params.kv_segment_ids.data == nullptr &&
                        inputs->query_lengths.data == nullptr && inputs->kv_lengths.data == nullptr;
  require(is_plain, "packed sequences take no bias, mask, block mask, lengths or segment ids");
}

void CallReader::read_common(AttentionParams* params, SequenceInputs* inputs) {
  read_sizes(params);
  if (failed()) return;
  const int64_t T = params->T, S = params->S, N = params->N;
  params->softmax_scale = attrs_.softmax_scale;
  params->logits_soft_cap = attrs_.logits_soft_cap;
  params->window_left = attrs_.window_left;
  params->window_right = attrs_.window_right;
  params->bias = read("bias", {Element::F32, Element::BF16, Element::F16}, {N, T, S}, true);
  params->mask = read("mask", {Element::PRED}, {N, T, S}, true);

  const int64_t block_q = attrs_.mask_block_q, block_kv = attrs_.mask_block_kv;
  const bool has_blocks = block_q > 0 && block_kv > 0;
  require(has_blocks || operands_.at("block_mask").element_count() == 0,
          "block_mask needs positive mask_block_q and mask_block_kv");
  params->mask_block_q = has_blocks ? block_q : 1;
  params->mask_block_kv = has_blocks ? block_kv : 1;
  const int64_t blocks_q = T == 0 ? 0 : (T - 1) / params->mask_block_q + 1;
  const int64_t blocks_kv = S == 0 ? 0 : (S - 1) / params->mask_block_kv + 1;
  params->block_mask = read("block_mask", {Element::PRED}, {N, blocks_q, blocks_kv}, true);

  inputs->query_lengths = read("query_lengths", {Element::S32}, {}, false);
  inputs->kv_lengths = read("kv_lengths", {Element::S32}, {}, false);
  params->query_segment_ids = read("query_segment_ids", {Element::S32}, {T}, false);
  params->kv_segment_ids = read("kv_segment_ids", {Element::S32}, {S}, false);
  // Either array may be empty because its sequence is; then no pair exists.
  require(
      T == 0 || S == 0 || params->B == 0 ||
          (params->query_segment_ids.data == nullptr) == (params->kv_segment_ids.data == nullptr),
      "query_segment_ids and kv_segment_ids must come together");
  inputs->is_bottom_right = attrs_.is_bottom_right;
  read_offsets(*params, inputs);

  params->dropout_threshold = attrs_.dropout_threshold;
  params->dropout_scale = attrs_.dropout_scale;
  params->dropout_batch = read("dropout_batch", {Element::U32}, {3}, false);
  params->dropout_heads = read("dropout_heads", {Element::U32}, {N}, false);
  const bool has_dropout_operands =
      params->dropout_batch.data != nullptr && params->dropout_heads.data != nullptr;
  require(attrs_.dropout_threshold <= 0 || has_dropout_operands || params->B == 0 || N == 0,
          "dropout needs dropout_batch and dropout_heads");
}

BroadcastArray CallReader::read(std::string_view name, std::initializer_list<Element> elements,
                                std::initializer_list<int64_t> trailing, bool is_broadcastable) {
  BroadcastArray array = {};
  if (failed()) return array;
  const Buffer buffer = operands_.at(name);
  if (buffer.element_count() == 0) return array;
  const auto dims = dims_of(buffer);
  const size_t b = batch_dims_.size();
  std::vector<int64_t> expected = batch_dims_;
  expected.insert(expected.end(), trailing.begin(), trailing.end());
  bool is_right =
      dims.size() == expected.size() &&
      std::find(elements.begin(), elements.end(), buffer.element_type()) != elements.end();
  for (size_t i = 0; is_right && i < dims.size(); ++i) {
    const bool may_be_one = i < b || is_broadcastable;
    is_right = dims[i] == expected[i] || (may_be_one && dims[i] == 1);
  }
  require(is_right, std::string(name) + " must be " + shape_text(expected) +
                        (is_broadcastable ? " (any dim may be 1)" : " (batch dims may be 1)") +
                        ", got " + describe(buffer));
  if (failed()) return array;

  std::vector<int64_t> strides(trailing.size());
  int64_t stride = 1;
  for (size_t i = trailing.size(); i-- > 0;) {
    strides[i] = dims[b + i] == 1 ? 0 : stride;
    stride *= dims[b + i];
  }
  array.data = buffer.untyped_data();
  array.dtype = data_type(buffer.element_type());
  array.batch_offset =
      tables_.add(offsets_of(batch_dims_, {dims.begin(), dims.begin() + b}, stride));
  for (size_t i = b; b <= kMaxBatchDims && i-- > 0;) {
    array.batch_stride[kMaxBatchDims - b + i] = dims[i] == 1 ? 0 : stride;
    stride *= dims[i];
  }
  if (strides.size() == 1) array.head_stride = strides[0];
  if (strides.size() == 3) {
    array.head_stride = strides[0];
    array.row_stride = strides[1];
    array.column_stride = strides[2];
  }
  return array;
}

void* CallReader::read_full(std::string_view name, Buffer buffer, Element element,
                            std::initializer_list<int64_t> trailing) {
  std::vector<int64_t> expected = batch_dims_;
  expected.insert(expected.end(), trailing.begin(), trailing.end());
  require(buffer.element_type() == element && dims_of(buffer) == expected,
          std::string(name) + " must be " + shape_text(expected) + ", got " + describe(buffer));
  return buffer.untyped_data();
}

launch::Workspace CallReader::read_workspace(int64_t floats_needed) {
  if (failed()) return {};
  const Buffer buffer = results_.at("workspace");
  const auto dims = dims_of(buffer);
  const bool is_right = buffer.element_type() == Element::F32 && dims.size() == 2 && dims[0] >= 1 &&
                        dims[1] >= floats_needed;
  require(is_right, "workspace must be [num_slots >= 1, >= " + std::to_string(floats_needed) +
                        "] float32, got " + describe(buffer));
  if (failed()) return {};
  return {static_cast<float*>(buffer.untyped_data()), dims[0], dims[1]};
}

BiasGradient CallReader::read_bias_gradient(const AttentionParams& params) {
  BiasGradient gradient = {};
  if (failed()) return gradient;
  const Buffer dbias = results_.at("dbias"), bias = operands_.at("bias");
  if (dbias.element_count() == 0) return gradient;
  const auto dims = dims_of(dbias);
  require(dims == dims_of(bias) && dbias.element_type() == bias.element_type(),
          "dbias must be like bias " + describe(bias) + ", got " + describe(dbias));
  if (failed()) return gradient;
  const size_t b = batch_dims_.size();
  gradient.data = dbias.untyped_data();
  gradient.num_heads = dims[b];
  gradient.num_rows = dims[b + 1];
  gradient.num_columns = dims[b + 2];
  const std::vector<int64_t> bias_batch_dims(dims.begin(), dims.begin() + b);
  gradient.num_batches = product(bias_batch_dims);
  const std::vector<int64_t> entry_of = offsets_of(batch_dims_, bias_batch_dims, 1);
  std::vector<int64_t> members(params.B), first_member(gradient.num_batches + 1, 0);
  std::iota(members.begin(), members.end(), 0);
  std::stable_sort(members.begin(), members.end(),
                   [&](int64_t a, int64_t c) { return entry_of[a] < entry_of[c]; });
  for (const int64_t entry : entry_of) ++first_member[entry + 1];
  std::partial_sum(first_member.begin(), first_member.end(), first_member.begin());
  gradient.first_member = tables_.add(std::move(first_member));
  gradient.members = tables_.add(std::move(members));
  return gradient;
}

ForwardParams CallReader::read_forward(SequenceInputs* inputs) {
  ForwardParams params = {};
  name_buffers(kForwardOperands, kForwardResults);
  if (failed()) return params;
  read_common(&params.attention, inputs);
  const int64_t T = params.attention.T, N = params.attention.N, Hv = params.attention.Hv;
  params.sinks = read("sinks", {Element::F32}, {N}, false);
  params.out = read_result("out", operands_.at("q").element_type(), {T, N, Hv});
  params.lse = static_cast<float*>(read_result("lse", Element::F32, {T, N}));
  params.lse_low = static_cast<float*>(read_result("lse_low", Element::F32, {T, N}));
  return params;
}

BackwardParams CallReader::read_backward(SequenceInputs* inputs) {
  BackwardParams params = {};
  name_buffers(kBackwardOperands, kBackwardResults);
  if (failed()) return params;
  const AttentionParams& attention = params.attention;
  read_common(&params.attention, inputs);
  const int64_t T = attention.T, S = attention.S, N = attention.N, K = attention.K;
  const int64_t H = attention.H, Hv = attention.Hv;
  const Element element = operands_.at("q").element_type();
  params.out = read_operand("out", element, {T, N, Hv});
  params.lse = static_cast<float*>(read_operand("lse", Element::F32, {T, N}));
  params.lse_low = static_cast<float*>(read_operand("lse_low", Element::F32, {T, N}));
  params.dout = read_operand("dout", element, {T, N, Hv});
  if (operands_.at("dlse").element_count() > 0) {
    params.dlse = static_cast<float*>(read_operand("dlse", Element::F32, {T, N}));
  }
  params.dq = read_result("dq", element, {T, N, H});
  params.dk = read_result("dk", element, {S, K, H});
  params.dv = read_result("dv", element, {S, K, Hv});
  params.delta = static_cast<float*>(read_result("delta", Element::F32, {T, N}));
  params.dbias = read_bias_gradient(attention);
  return params;
}

}  // namespace jaxflash::ffi
