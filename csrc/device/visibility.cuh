// What one head's queries see: window, lengths, segment ids, block mask, boolean mask and bias.
//
// Rows and columns are counted inside the sequence. Two levels: per tile, classify() tells hidden
// from partial from full tiles, and every warp of a CTA computes the same answer from the same
// inputs. Per element, is_visible() and adjust_logit() are asked only on partial tiles.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "device/sequence.cuh"

namespace jaxflash::device {

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLn2Low = -1.9046542e-9f;  // ln 2 - kLn2
// Positions stay below this (the host checks T and S), so that row + window_high fits 32 bits.
constexpr int kFar = 1 << 30;

// Queries [row_begin, row_end) x keys [column_begin, column_end).
struct Box {
  int row_begin, row_end, column_begin, column_end;
};

// One broadcastable [T, S] plane; data is nullptr when the operand is absent.
struct Plane {
  const void* data;
  int64_t row_stride, column_stride;
  DataType dtype;  // bias only
};

// The part that every call has: row t of query_len sees keys t + window_low .. t + window_high of
// kv_len.
struct Window {
  int query_len, kv_len;
  int window_low, window_high;
};

// The rest; absent operands are nullptr.
struct Visibility : Window {
  Plane bias, mask, block_mask;
  int mask_block_q, mask_block_kv;
  const int32_t* query_ids;  // [T] of the sequence's batch entry, nullptr = no segments
  const int32_t* kv_ids;     // [S]
};

__device__ __forceinline__ int bound_position(int64_t value) {
  return static_cast<int>(value < -kFar ? -kFar : value > kFar ? kFar : value);
}

__device__ __forceinline__ Window make_window(const AttentionParams& params,
                                              const SequenceTile& place) {
  const int64_t offset = place.diagonal_offset;
  Window see;
  see.query_len = place.query_len;
  see.kv_len = place.kv_len;
  see.window_low = params.window_left < 0 ? -kFar : bound_position(offset - params.window_left);
  see.window_high = params.window_right < 0 ? kFar : bound_position(offset + params.window_right);
  return see;
}

template <class T>
__device__ __forceinline__ const void* head_data(const BroadcastArray& array,
                                                 const AttentionParams& params, int batch,
                                                 int head) {
  const T* data = batch_data<T>(array, params, batch);
  return data == nullptr ? nullptr : data + head * array.head_stride;
}

// The strides; select_head() finds the data.
__device__ __forceinline__ Plane plane_of(const BroadcastArray& array) {
  return {nullptr, array.row_stride, array.column_stride, array.dtype};
}

// Turns to another head of the same sequence.
__device__ __forceinline__ void select_head(const AttentionParams& params, int batch, int head,
                                            Visibility* see) {
  see->bias.data = params.bias.dtype == DataType::kFloat32
                       ? head_data<float>(params.bias, params, batch, head)
                       : head_data<uint16_t>(params.bias, params, batch, head);
  see->mask.data = head_data<uint8_t>(params.mask, params, batch, head);
  see->block_mask.data = head_data<uint8_t>(params.block_mask, params, batch, head);
}

__device__ __forceinline__ Visibility make_visibility(const AttentionParams& params,
                                                      const SequenceTile& place, int head) {
  Visibility see;
  static_cast<Window&>(see) = make_window(params, place);
  see.bias = plane_of(params.bias);
  see.mask = plane_of(params.mask);
  see.block_mask = plane_of(params.block_mask);
  select_head(params, place.batch, head, &see);
  see.mask_block_q = static_cast<int>(params.mask_block_q);
  see.mask_block_kv = static_cast<int>(params.mask_block_kv);
  see.query_ids = batch_data<int32_t>(params.query_segment_ids, params, place.batch);
  see.kv_ids = batch_data<int32_t>(params.kv_segment_ids, params, place.batch);
  return see;
}

// --- Tiles ------------------------------------------------------------------------------------

enum class Tile { kHidden, kPartial, kFull };

// The keys [begin, end) that the window lets rows [row_begin, row_end) meet.
__device__ __forceinline__ void kv_range(const Window& see, int row_begin, int row_end, int* begin,
                                         int* end) {
  *begin = clamp(row_begin + see.window_low, 0, see.kv_len);
  *end = clamp(min(row_end, see.query_len) + see.window_high, 0, see.kv_len);
  if (row_begin >= see.query_len) *end = *begin;
}

// The keys [begin, end) that every row of [row_begin, row_end) below query_len meets; end <= begin
// where there is none.
__device__ __forceinline__ void common_kv_range(const Window& see, int row_begin, int row_end,
                                                int* begin, int* end) {
  *begin = clamp(min(row_end, see.query_len) - 1 + see.window_low, 0, see.kv_len);
  *end = clamp(row_begin + see.window_high + 1, 0, see.kv_len);
}

// The rows [begin, end) that the window lets meet keys [column_begin, column_end).
__device__ __forceinline__ void query_range(const Window& see, int column_begin, int column_end,
                                            int* begin, int* end) {
  *begin = clamp(column_begin - see.window_high, 0, see.query_len);
  *end = clamp(min(column_end, see.kv_len) - see.window_low, 0, see.query_len);
  if (column_begin >= see.kv_len) *end = *begin;
}

// Whether every key of the box is inside the lengths and the window of every row. Rows from
// query_len on do not count where the caller discards them (kSkipsRows).
template <bool kSkipsRows>
__device__ __forceinline__ bool is_inside_window(const Window& see, const Box& box) {
  const int row_end = kSkipsRows ? min(box.row_end, see.query_len) : box.row_end;
  return box.column_end <= see.kv_len && row_end <= see.query_len &&
         box.column_end - 1 <= box.row_begin + see.window_high &&
         box.column_begin >= row_end - 1 + see.window_low;
}

// Whether any row of the box meets any of its keys inside lengths and window.
__device__ __forceinline__ bool meets_window(const Window& see, const Box& box) {
  const int row_end = min(box.row_end, see.query_len);
  const int column_end = min(box.column_end, see.kv_len);
  return box.row_begin < row_end && box.column_begin < column_end &&
         column_end - 1 >= box.row_begin + see.window_low &&
         box.column_begin <= row_end - 1 + see.window_high;
}

// Smallest and largest id of [begin, end); all 32 lanes call it and get the same.
struct IdRange {
  int32_t low, high;
};
__device__ __forceinline__ IdRange id_range(const int32_t* ids, int begin, int end, int lane_idx) {
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int i = begin + lane_idx; i < end; i += 32) {
    low = min(low, ids[i]);
    high = max(high, ids[i]);
  }
  return {__reduce_min_sync(0xFFFFFFFF, low), __reduce_max_sync(0xFFFFFFFF, high)};
}

// The same by one thread, each with its own range.
__device__ __forceinline__ IdRange lane_id_range(const int32_t* ids, int begin, int end) {
  IdRange range = {INT32_MAX, INT32_MIN};
  const auto take = [&](int32_t id) {
    range.low = min(range.low, id);
    range.high = max(range.high, id);
  };
  int i = begin;
  if (reinterpret_cast<uintptr_t>(ids + begin) % sizeof(int4) == 0) {
#pragma unroll 4
    for (; i + 4 <= end; i += 4) {
      const int4 four = *reinterpret_cast<const int4*>(ids + i);
      take(four.x);
      take(four.y);
      take(four.z);
      take(four.w);
    }
  }
#pragma unroll 4
  for (; i < end; ++i) take(ids[i]);
  return range;
}

// What segment ids leave of a box, from those of its queries and of its keys inside the lengths.
__device__ __forceinline__ Tile classify_segments(const IdRange& queries, const IdRange& keys) {
  if (queries.high < 0 || keys.high < 0 || queries.high < keys.low || keys.high < queries.low) {
    return Tile::kHidden;
  }
  const bool is_one =
      queries.low == queries.high && keys.low == keys.high && queries.low == keys.low;
  return is_one ? Tile::kFull : Tile::kPartial;
}

__device__ __forceinline__ bool block_is_kept(const Visibility& see, int block_row,
                                              int block_column) {
  return static_cast<const uint8_t*>(
             see.block_mask.data)[block_row * see.block_mask.row_stride +
                                  block_column * see.block_mask.column_stride] != 0;
}

// What the block mask says of a box; each thread may have its own.
__device__ __forceinline__ Tile classify_blocks(const Visibility& see, const Box& box) {
  if (see.block_mask.data == nullptr) return Tile::kFull;
  if (box.row_begin >= see.query_len || box.column_begin >= see.kv_len) return Tile::kHidden;
  bool any = false, all = true;
  const int row_end = (min(box.row_end, see.query_len) - 1) / see.mask_block_q;
  const int column_end = (min(box.column_end, see.kv_len) - 1) / see.mask_block_kv;
  for (int row = box.row_begin / see.mask_block_q; row <= row_end; ++row) {
    for (int column = box.column_begin / see.mask_block_kv; column <= column_end; ++column) {
      const bool is_kept = block_is_kept(see, row, column);
      any |= is_kept;
      all &= is_kept;
    }
  }
  return all ? Tile::kFull : any ? Tile::kPartial : Tile::kHidden;
}

// Whether anything in the box is visible and whether everything is, where the block mask says
// `blocks` of it. All 32 lanes call it; the answer depends on the box alone, so every warp of a CTA
// may decide for itself.
__device__ __forceinline__ Tile classify(const Visibility& see, const Box& box, Tile blocks,
                                         int lane_idx) {
  if (blocks == Tile::kHidden || !meets_window(see, box)) return Tile::kHidden;
  bool is_full = is_inside_window<false>(see, box) && blocks == Tile::kFull &&
                 see.bias.data == nullptr && see.mask.data == nullptr;
  if (see.query_ids != nullptr) {
    const int row_end = min(box.row_end, see.query_len);
    const int column_end = min(box.column_end, see.kv_len);
    const Tile segments =
        classify_segments(id_range(see.query_ids, box.row_begin, row_end, lane_idx),
                          id_range(see.kv_ids, box.column_begin, column_end, lane_idx));
    if (segments == Tile::kHidden) return Tile::kHidden;
    is_full &= segments == Tile::kFull;
  }
  return is_full ? Tile::kFull : Tile::kPartial;
}

// --- Elements ---------------------------------------------------------------------------------

// Lengths and window.
__device__ __forceinline__ bool is_in_window(const Window& see, int row, int column) {
  return row < see.query_len && column < see.kv_len && column >= row + see.window_low &&
         column <= row + see.window_high;
}

// Everything but the bias. Reads nothing outside the lengths.
__device__ __forceinline__ bool is_visible(const Visibility& see, int row, int column) {
  if (!is_in_window(see, row, column)) return false;
  if (see.query_ids != nullptr) {
    const int32_t id = see.query_ids[row];
    if (id < 0 || id != see.kv_ids[column]) return false;
  }
  if (see.block_mask.data != nullptr &&
      !block_is_kept(see, row / see.mask_block_q, column / see.mask_block_kv))
    return false;
  return see.mask.data == nullptr ||
         static_cast<const uint8_t*>(
             see.mask.data)[row * see.mask.row_stride + column * see.mask.column_stride] != 0;
}

__device__ __forceinline__ float read_float(const void* data, DataType dtype, int64_t index) {
  if (dtype == DataType::kFloat32) return static_cast<const float*>(data)[index];
  if (dtype == DataType::kBFloat16)
    return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
  return __half2float(static_cast<const __half*>(data)[index]);
}

// The final logit of a pair in natural units: x plus bias, -inf where hidden. A bias of -inf hides,
// and a finite sum never becomes -inf, so that a row of the most negative finite bias gives the
// mean of v and not NaN.
__device__ __forceinline__ float adjust_logit(const Visibility& see, int row, int column, float x) {
  if (!is_visible(see, row, column)) return -kInfinity;
  if (see.bias.data == nullptr) return x;
  const float bias = read_float(see.bias.data, see.bias.dtype,
                                row * see.bias.row_stride + column * see.bias.column_stride);
  if (bias == -kInfinity) return -kInfinity;
  const float sum = x + bias;
  return sum < -FLT_MAX ? -FLT_MAX : sum;
}

// Whether a key may be read at all: padding, NaN included, is loaded as zeros.
__device__ __forceinline__ bool is_key_valid(const Visibility& see, int column) {
  return column < see.kv_len && (see.kv_ids == nullptr || see.kv_ids[column] >= 0);
}
__device__ __forceinline__ bool is_query_valid(const Visibility& see, int row) {
  return row < see.query_len && (see.query_ids == nullptr || see.query_ids[row] >= 0);
}

}  // namespace jaxflash::device
