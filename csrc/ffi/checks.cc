#include "ffi/checks.h"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

namespace jaxflash::ffi {
namespace {

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

void OperandReader::require(bool is_met, const std::string& message) {
  if (!is_met && error_.empty()) error_ = message;
}

xla::ffi::Error OperandReader::error() const {
  return xla::ffi::Error::InvalidArgument("jaxflash: " + error_ +
                                          " (the Python side should have refused this)");
}

void OperandReader::read_sizes(const CommonOperands& operands, AttentionParams* params) {
  const auto q = dims_of(operands.q), k = dims_of(operands.k), v = dims_of(operands.v);
  require(q.size() >= 3, "q must be [*batch, T, N, H], got " + describe(operands.q));
  if (failed()) return;
  batch_dims_.assign(q.begin(), q.end() - 3);
  const size_t b = batch_dims_.size();
  const bool shapes_agree = k.size() == b + 3 && v.size() == b + 3 &&
                            std::equal(batch_dims_.begin(), batch_dims_.end(), k.begin()) &&
                            std::equal(k.begin(), k.end() - 1, v.begin()) && k[b + 2] == q[b + 2];
  const std::string seen =
      describe(operands.q) + ", " + describe(operands.k) + ", " + describe(operands.v);
  require(shapes_agree,
          "k must be [*batch, S, K, H] and v [*batch, S, K, Hv]; q, k, v are " + seen);
  const Element element = operands.q.element_type();
  require(element == Element::F32 || element == Element::BF16 || element == Element::F16,
          "q must be float32, bfloat16 or float16; q, k, v are " + seen);
  require(operands.k.element_type() == element && operands.v.element_type() == element,
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
  params->q = operands.q.untyped_data();
  params->k = operands.k.untyped_data();
  params->v = operands.v.untyped_data();
  params->dtype = data_type(element);
}

void OperandReader::read_offsets(const CommonOperands& operands, const AttentionParams& params,
                                 SequenceInputs* inputs) {
  const auto dims = dims_of(operands.query_offsets);
  const int64_t points = dims.empty() ? 0 : dims.back();
  inputs->query_offsets =
      read("query_offsets", operands.query_offsets, {Element::S32}, {points}, false);
  inputs->kv_offsets = read("kv_offsets", operands.kv_offsets, {Element::S32}, {points}, false);
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

void OperandReader::read_common(const CommonOperands& operands, const AttentionAttrs& attrs,
                                AttentionParams* params, SequenceInputs* inputs) {
  read_sizes(operands, params);
  if (failed()) return;
  const int64_t T = params->T, S = params->S, N = params->N;
  params->softmax_scale = attrs.softmax_scale;
  params->logits_soft_cap = attrs.logits_soft_cap;
  params->window_left = attrs.window_left;
  params->window_right = attrs.window_right;
  params->bias =
      read("bias", operands.bias, {Element::F32, Element::BF16, Element::F16}, {N, T, S}, true);
  params->mask = read("mask", operands.mask, {Element::PRED}, {N, T, S}, true);

  const int64_t block_q = attrs.mask_block_q, block_kv = attrs.mask_block_kv;
  const bool has_blocks = block_q > 0 && block_kv > 0;
  require(has_blocks || operands.block_mask.element_count() == 0,
          "block_mask needs positive mask_block_q and mask_block_kv");
  params->mask_block_q = has_blocks ? block_q : 1;
  params->mask_block_kv = has_blocks ? block_kv : 1;
  const int64_t blocks_q = T == 0 ? 0 : (T - 1) / params->mask_block_q + 1;
  const int64_t blocks_kv = S == 0 ? 0 : (S - 1) / params->mask_block_kv + 1;
  params->block_mask =
      read("block_mask", operands.block_mask, {Element::PRED}, {N, blocks_q, blocks_kv}, true);

  inputs->query_lengths = read("query_lengths", operands.query_lengths, {Element::S32}, {}, false);
  inputs->kv_lengths = read("kv_lengths", operands.kv_lengths, {Element::S32}, {}, false);
  params->query_segment_ids =
      read("query_segment_ids", operands.query_segment_ids, {Element::S32}, {T}, false);
  params->kv_segment_ids =
      read("kv_segment_ids", operands.kv_segment_ids, {Element::S32}, {S}, false);
  // Either array may be empty because its sequence is; then no pair exists.
  require(
      T == 0 || S == 0 || params->B == 0 ||
          (params->query_segment_ids.data == nullptr) == (params->kv_segment_ids.data == nullptr),
      "query_segment_ids and kv_segment_ids must come together");
  inputs->is_bottom_right = attrs.is_bottom_right;
  read_offsets(operands, *params, inputs);

  params->dropout_threshold = attrs.dropout_threshold;
  params->dropout_scale = attrs.dropout_scale;
  params->dropout_batch = read("dropout_batch", operands.dropout_batch, {Element::U32}, {3}, false);
  params->dropout_heads = read("dropout_heads", operands.dropout_heads, {Element::U32}, {N}, false);
  const bool has_dropout_operands =
      params->dropout_batch.data != nullptr && params->dropout_heads.data != nullptr;
  require(attrs.dropout_threshold <= 0 || has_dropout_operands || params->B == 0 || N == 0,
          "dropout needs dropout_batch and dropout_heads");
}

BroadcastArray OperandReader::read(const char* name, Buffer buffer,
                                   std::initializer_list<Element> elements,
                                   std::initializer_list<int64_t> trailing, bool is_broadcastable) {
  BroadcastArray array = {};
  if (buffer.element_count() == 0 || failed()) return array;
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

void* OperandReader::read_full(const char* name, Buffer buffer, Element element,
                               std::initializer_list<int64_t> trailing) {
  std::vector<int64_t> expected = batch_dims_;
  expected.insert(expected.end(), trailing.begin(), trailing.end());
  require(buffer.element_type() == element && dims_of(buffer) == expected,
          std::string(name) + " must be " + shape_text(expected) + ", got " + describe(buffer));
  return buffer.untyped_data();
}

launch::Workspace OperandReader::read_workspace(Buffer buffer, int64_t floats_needed) {
  const auto dims = dims_of(buffer);
  const bool is_right = buffer.element_type() == Element::F32 && dims.size() == 2 && dims[0] >= 1 &&
                        dims[1] >= floats_needed;
  require(is_right, "workspace must be [num_slots >= 1, >= " + std::to_string(floats_needed) +
                        "] float32, got " + describe(buffer));
  if (failed()) return {};
  return {static_cast<float*>(buffer.untyped_data()), dims[0], dims[1]};
}

BiasGradient OperandReader::read_bias_gradient(Buffer dbias, Buffer bias,
                                               const AttentionParams& params) {
  BiasGradient gradient = {};
  if (dbias.element_count() == 0 || failed()) return gradient;
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

}  // namespace jaxflash::ffi
