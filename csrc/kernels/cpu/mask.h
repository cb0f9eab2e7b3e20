// What one head's queries see: window, lengths, segment ids, block mask, boolean mask and bias.
//
// classify() decides per tile whether anything is visible and whether everything is; only tiles
// between the two pay for fill_adjust(), which turns all of it into one additive term.
// Rows and columns are counted inside the sequence, in 64 bits.
#pragma once

#include "kernels/cpu/tile.h"

namespace jaxflash::cpu::JF_CPU_ISA {

// Queries [row_begin, row_end) x keys [column_begin, column_end), cut to the sequence's lengths.
struct Box {
  int64_t row_begin, row_end, column_begin, column_end;
};

// One broadcastable [T, S] plane; data is nullptr when the operand is absent.
struct Plane {
  const void* data;
  DataType dtype;  // bias only
  int64_t row_stride, column_stride;
};

struct Visibility {
  int64_t query_len, kv_len;
  // Row t keeps keys t + window_low .. t + window_high.
  int64_t window_low, window_high;
  Plane bias, mask, block_mask;
  int64_t mask_block_q, mask_block_kv;
  const int32_t* query_ids;  // [T], nullptr = no segments
  const int32_t* kv_ids;     // [S]
};

inline const void* batch_data(const BroadcastArray& array, int64_t batch, int64_t bytes) {
  if (array.data == nullptr) return nullptr;
  return static_cast<const char*>(array.data) + array.batch_offset[batch] * bytes;
}

inline Plane head_plane(const BroadcastArray& array, int64_t batch, int64_t head, int64_t bytes) {
  const void* data = batch_data(array, batch, bytes);
  if (data != nullptr) data = static_cast<const char*>(data) + head * array.head_stride * bytes;
  return {data, array.dtype, array.row_stride, array.column_stride};
}

inline Visibility make_visibility(const AttentionParams& params, const Sequence& sequence,
                                  int64_t head) {
  constexpr int64_t kFar = int64_t{1} << 60;  // beyond any index, far from overflow
  const int64_t batch = sequence.batch, offset = sequence.diagonal_offset;
  Visibility see;
  see.query_len = sequence.query_len;
  see.kv_len = sequence.kv_len;
  see.window_low = params.window_left < 0 ? -kFar : offset - params.window_left;
  see.window_high = params.window_right < 0 ? kFar : offset + params.window_right;
  see.bias = head_plane(params.bias, batch, head, element_bytes(params.bias.dtype));
  see.mask = head_plane(params.mask, batch, head, 1);
  see.block_mask = head_plane(params.block_mask, batch, head, 1);
  see.mask_block_q = params.mask_block_q;
  see.mask_block_kv = params.mask_block_kv;
  see.query_ids = static_cast<const int32_t*>(batch_data(params.query_segment_ids, batch, 4));
  see.kv_ids = static_cast<const int32_t*>(batch_data(params.kv_segment_ids, batch, 4));
  return see;
}

inline int64_t clamp(int64_t value, int64_t low, int64_t high) {
  value = value < low ? low : value;
  return value > high ? high : value;
}

// The streamed rows [begin, end) that the window lets owned rows [owned_begin, owned_end) meet.
template <Owned kOwned>
inline void stream_range(const Visibility& see, int64_t owned_begin, int64_t owned_end,
                         int64_t* begin, int64_t* end) {
  if (kOwned == Owned::kQueries) {
    *begin = clamp(owned_begin + see.window_low, 0, see.kv_len);
    *end = clamp(owned_end + see.window_high, 0, see.kv_len);
  } else {
    *begin = clamp(owned_begin - see.window_high, 0, see.query_len);
    *end = clamp(owned_end - see.window_low, 0, see.query_len);
  }
}

enum class Tile { kHidden, kPartial, kFull };

inline Tile classify_segments(const Visibility& see, const Box& box) {
  int32_t query_min = INT32_MAX, query_max = INT32_MIN, kv_min = INT32_MAX, kv_max = INT32_MIN;
  for (int64_t row = box.row_begin; row < box.row_end; ++row) {
    const int32_t id = see.query_ids[row];
    query_min = id < query_min ? id : query_min;
    query_max = id > query_max ? id : query_max;
  }
  for (int64_t column = box.column_begin; column < box.column_end; ++column) {
    const int32_t id = see.kv_ids[column];
    kv_min = id < kv_min ? id : kv_min;
    kv_max = id > kv_max ? id : kv_max;
  }
  if (query_max < 0 || kv_max < 0 || query_max < kv_min || kv_max < query_min) return Tile::kHidden;
  const bool is_uniform = query_min == query_max && kv_min == kv_max && query_min == kv_min;
  return is_uniform ? Tile::kFull : Tile::kPartial;
}

inline bool block_is_kept(const Visibility& see, int64_t block_row, int64_t block_column) {
  const uint8_t* blocks = static_cast<const uint8_t*>(see.block_mask.data);
  return blocks[block_row * see.block_mask.row_stride +
                block_column * see.block_mask.column_stride] != 0;
}

inline Tile classify_blocks(const Visibility& see, const Box& box) {
  bool any = false, all = true;
  for (int64_t r = box.row_begin / see.mask_block_q; r * see.mask_block_q < box.row_end; ++r) {
    for (int64_t c = box.column_begin / see.mask_block_kv; c * see.mask_block_kv < box.column_end;
         ++c) {
      const bool is_kept = block_is_kept(see, r, c);
      any |= is_kept;
      all &= is_kept;
    }
  }
  return all ? Tile::kFull : any ? Tile::kPartial : Tile::kHidden;
}

inline Tile classify(const Visibility& see, const Box& box) {
  if (box.row_begin >= box.row_end || box.column_begin >= box.column_end) return Tile::kHidden;
  const int64_t last_row = box.row_end - 1, last_column = box.column_end - 1;
  if (last_column < box.row_begin + see.window_low) return Tile::kHidden;
  if (box.column_begin > last_row + see.window_high) return Tile::kHidden;
  const bool is_inside_window = box.column_begin >= last_row + see.window_low &&
                                last_column <= box.row_begin + see.window_high;
  bool is_full = is_inside_window && see.bias.data == nullptr && see.mask.data == nullptr;
  if (see.query_ids != nullptr) {
    const Tile segments = classify_segments(see, box);
    if (segments == Tile::kHidden) return Tile::kHidden;
    is_full &= segments == Tile::kFull;
  }
  if (see.block_mask.data != nullptr) {
    const Tile blocks = classify_blocks(see, box);
    if (blocks == Tile::kHidden) return Tile::kHidden;
    is_full &= blocks == Tile::kFull;
  }
  return is_full ? Tile::kFull : Tile::kPartial;
}

// values[c] = bias of (row, column_begin + c), -inf where the boolean mask is false.
inline void read_bias_and_mask(const Visibility& see, int64_t row, int64_t column_begin,
                               int64_t count, float* values) {
  if (see.bias.data == nullptr) {
    for (int64_t c = 0; c < count; ++c) values[c] = 0.0f;
  } else {
    const bool is_broadcast = see.bias.column_stride == 0;
    const int64_t offset = row * see.bias.row_stride + (is_broadcast ? 0 : column_begin);
    row_to_float(element_address(see.bias.data, see.bias.dtype, offset), see.bias.dtype,
                 is_broadcast ? 1 : count, values);
    for (int64_t c = 1; is_broadcast && c < count; ++c) values[c] = values[0];
  }
  if (see.mask.data == nullptr) return;
  const bool is_broadcast = see.mask.column_stride == 0;
  const uint8_t* mask = static_cast<const uint8_t*>(see.mask.data) + row * see.mask.row_stride +
                        (is_broadcast ? 0 : column_begin);
  if (!is_broadcast) {
    for (int64_t c = 0; c < count; ++c) values[c] = mask[c] != 0 ? values[c] : -kInfinity;
  } else if (mask[0] == 0) {
    for (int64_t c = 0; c < count; ++c) values[c] = -kInfinity;
  }
}

// Bias and boolean mask of the whole box as adjust[stream][lane].
template <Owned kOwned>
inline void fill_bias_and_mask(const Visibility& see, const Box& box, float* adjust) {
  const int64_t rows = box.row_end - box.row_begin, columns = box.column_end - box.column_begin;
  const bool depends_on_row = (see.bias.data != nullptr && see.bias.row_stride != 0) ||
                              (see.mask.data != nullptr && see.mask.row_stride != 0);
  if (see.bias.data == nullptr && see.mask.data == nullptr) {
    const int64_t stream = kOwned == Owned::kQueries ? columns : rows;
    __builtin_memset(adjust, 0, stream * kPanelLanes * sizeof(float));
  } else if (kOwned == Owned::kKeys) {
    for (int64_t r = 0; r < rows; ++r) {
      read_bias_and_mask(see, box.row_begin + r, box.column_begin, columns,
                         adjust + r * kPanelLanes);
    }
  } else if (!depends_on_row) {
    float values[kStreamRows];
    read_bias_and_mask(see, box.row_begin, box.column_begin, columns, values);
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t v = 0; v < kPanelVectors; ++v) {
        store(adjust + c * kPanelLanes + v * kLanes, splat(values[c]));
      }
    }
  } else {
    alignas(64) float plane[kTileFloats];
    for (int64_t r = 0; r < rows; ++r) {
      read_bias_and_mask(see, box.row_begin + r, box.column_begin, columns,
                         plane + r * kPanelLanes);
    }
    transpose(plane, rows, columns, adjust);
  }
}

// One entry per lane; a lane sees the streamed rows first..last with an equal id.
struct LaneLimits {
  alignas(64) int32_t first[kPanelLanes];
  alignas(64) int32_t last[kPanelLanes];
  alignas(64) int32_t id[kPanelLanes];
};

template <Owned kOwned>
inline void fill_lane_limits(const Visibility& see, const Box& box, LaneLimits* limits) {
  const bool owns_queries = kOwned == Owned::kQueries;
  const int64_t lane_begin = owns_queries ? box.row_begin : box.column_begin;
  const int64_t lanes = (owns_queries ? box.row_end : box.column_end) - lane_begin;
  const int64_t stream_begin = owns_queries ? box.column_begin : box.row_begin;
  const int64_t low = owns_queries ? see.window_low : -see.window_high;
  const int64_t high = owns_queries ? see.window_high : -see.window_low;
  const int32_t* ids = owns_queries ? see.query_ids : see.kv_ids;
  for (int64_t lane = 0; lane < kPanelLanes; ++lane) {
    const int64_t position = lane_begin + lane - stream_begin;
    limits->first[lane] = static_cast<int32_t>(clamp(position + low, 0, kStreamRows));
    limits->last[lane] =
        lane < lanes ? static_cast<int32_t>(clamp(position + high, -1, kStreamRows)) : -1;
    const int32_t id = ids != nullptr && lane < lanes ? ids[lane_begin + lane] : 0;
    limits->id[lane] = id < 0 ? -1 : id;
  }
}

// hidden[lane] = -1 where the block of (lane, streamed row) is dropped, else 0.
template <Owned kOwned>
inline void fill_hidden_blocks(const Visibility& see, const Box& box, int64_t stream_block,
                               int32_t* hidden) {
  const bool owns_queries = kOwned == Owned::kQueries;
  const int64_t begin = owns_queries ? box.row_begin : box.column_begin;
  const int64_t end = owns_queries ? box.row_end : box.column_end;
  const int64_t block = owns_queries ? see.mask_block_q : see.mask_block_kv;
  for (int64_t i = begin; i < end; ++i) {
    const bool is_kept = owns_queries ? block_is_kept(see, i / block, stream_block)
                                      : block_is_kept(see, stream_block, i / block);
    hidden[i - begin] = is_kept ? 0 : -1;
  }
}

// Fills adjust[stream][lane] with the bias (0 without one), -inf where the element is masked.
// Returns whether anything is visible at all. Lanes outside the box come out masked.
template <Owned kOwned>
inline bool fill_adjust(const Visibility& see, const Box& box, float* adjust) {
  fill_bias_and_mask<kOwned>(see, box, adjust);
  LaneLimits limits;
  fill_lane_limits<kOwned>(see, box, &limits);
  const bool owns_queries = kOwned == Owned::kQueries;
  const int64_t stream_begin = owns_queries ? box.column_begin : box.row_begin;
  const int64_t stream_end = owns_queries ? box.column_end : box.row_end;
  const int32_t* stream_ids = owns_queries ? see.kv_ids : see.query_ids;
  const int64_t stream_block_rows = owns_queries ? see.mask_block_kv : see.mask_block_q;
  alignas(64) int32_t hidden_blocks[kPanelLanes] = {};
  int64_t stream_block = -1;
  IntVector visible = {};
  for (int64_t i = stream_begin; i < stream_end; ++i) {
    const int32_t s = static_cast<int32_t>(i - stream_begin);
    int32_t id = stream_ids != nullptr ? stream_ids[i] : 0;
    if (id < 0) id = -2;  // differs from a padding lane's -1
    if (see.block_mask.data != nullptr && i / stream_block_rows != stream_block) {
      stream_block = i / stream_block_rows;
      fill_hidden_blocks<kOwned>(see, box, stream_block, hidden_blocks);
    }
    for (int64_t v = 0; v < kPanelLanes; v += kLanes) {
      IntVector first, last, lane_id, hidden;
      __builtin_memcpy(&first, limits.first + v, sizeof(first));
      __builtin_memcpy(&last, limits.last + v, sizeof(last));
      __builtin_memcpy(&lane_id, limits.id + v, sizeof(lane_id));
      __builtin_memcpy(&hidden, hidden_blocks + v, sizeof(hidden));
      hidden |= (first > s) | (last < s) | (lane_id != id);
      float* place = adjust + s * kPanelLanes + v;
      const Vector value = hidden ? splat(-kInfinity) : load(place);
      visible |= value != -kInfinity;
      store(place, value);
    }
  }
  int32_t any = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) any |= visible[lane];
  return any != 0;
}

// x + adjust, where -inf in adjust masks and a finite sum never becomes -inf: a bias of the most
// negative finite value on a whole row must leave the mean of v, not NaN.
inline Vector apply_adjust(Vector x, Vector adjust) {
  Vector sum = x + adjust;
  sum = sum < -FLT_MAX ? splat(-FLT_MAX) : sum;
  return adjust == -kInfinity ? splat(-kInfinity) : sum;
}

}  // namespace jaxflash::cpu::JF_CPU_ISA
