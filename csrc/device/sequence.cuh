// Which rows of which sequence a CTA owns.
//
// Without packing a batch entry is one sequence. With packing it is split at its offsets, which lie
// in device memory; the rows before the first and after the last offset form sequences of length 0,
// so that every row is owned by exactly one CTA. A packed entry of n rows gets
// n / tile + num_sequences + 2 tiles: sequence i starts at tile begin_i / tile + i, which rises
// with i, so a CTA finds its sequence by bisection and tiles beyond its end are idle.
#pragma once

#include <cstdint>

#include "params.h"

namespace jaxflash::device {

// What a CTA works on; positions fit 32 bits (checked on the host), offsets in elements do not.
struct SequenceTile {
  int batch;        // flattened batch entry
  int index;        // position inside a packed batch entry, 0 without packing
  int query_begin;  // first query row inside the batch entry
  int query_rows;   // query rows owned, padding included
  int query_len;    // rows that are not padding
  int kv_begin;     // the same three for keys
  int kv_rows;
  int kv_len;
  int diagonal_offset;  // row t is aligned with key t + diagonal_offset
  int row_begin;        // first owned row inside the sequence; >= its rows = nothing to do
};

// Element offset of a batch entry in a broadcast operand.
__device__ __forceinline__ int64_t batch_offset(const BroadcastArray& array,
                                                const AttentionParams& params, int batch) {
  int64_t offset = 0;
#pragma unroll
  for (int dim = kMaxBatchDims - 1; dim >= 0; --dim) {
    const int size = static_cast<int>(params.batch_dims[dim]);
    if (size == 1) continue;
    offset += static_cast<int64_t>(batch % size) * array.batch_stride[dim];
    batch /= size;
  }
  return offset;
}

// An operand's entry of one batch; nullptr where the operand is absent.
template <class T>
__device__ __forceinline__ const T* batch_data(const BroadcastArray& array,
                                               const AttentionParams& params, int batch) {
  if (array.data == nullptr) return nullptr;
  return static_cast<const T*>(array.data) + batch_offset(array, params, batch);
}

__device__ __forceinline__ int clamp(int value, int low, int high) {
  return min(max(value, low), high);
}

// Tiles that cover the owned rows (T or S) of one batch entry.
__host__ __device__ __forceinline__ int64_t tiles_per_batch(int64_t rows, int64_t num_sequences,
                                                            bool is_packed, int tile_rows) {
  return is_packed ? rows / tile_rows + num_sequences + 2 : (rows + tile_rows - 1) / tile_rows;
}

// Split point i of a packed entry of `total` rows: 0, the offsets, total.
__device__ __forceinline__ int split_point(const int32_t* offsets, int num_sequences, int total,
                                           int i) {
  if (i == 0) return 0;
  return i > num_sequences + 1 ? total : clamp(offsets[i - 1], 0, total);
}

__device__ __forceinline__ int length_of(const BroadcastArray& lengths,
                                         const AttentionParams& params, int batch, int full) {
  const int32_t* data = batch_data<int32_t>(lengths, params, batch);
  return data == nullptr ? full : clamp(*data, 0, full);
}

// Tile `tile` of batch entry `batch`, counted along queries or along keys.
template <bool kOwnsQueries, int kTileRows>
__device__ __forceinline__ SequenceTile locate_tile(const AttentionParams& params,
                                                    const SequenceInputs& inputs, int batch,
                                                    int tile) {
  const int T = static_cast<int>(params.T), S = static_cast<int>(params.S);
  SequenceTile place = {};
  place.batch = batch;
  place.query_rows = T;
  place.kv_rows = S;
  if (inputs.query_offsets.data == nullptr) {
    place.query_len = length_of(inputs.query_lengths, params, batch, T);
    place.kv_len = length_of(inputs.kv_lengths, params, batch, S);
    place.row_begin = tile * kTileRows;
  } else {
    const int num_sequences = static_cast<int>(inputs.num_sequences);
    const int32_t* queries = batch_data<int32_t>(inputs.query_offsets, params, batch);
    const int32_t* keys = batch_data<int32_t>(inputs.kv_offsets, params, batch);
    const int32_t* owned = kOwnsQueries ? queries : keys;
    const int total = kOwnsQueries ? T : S;
    int low = 0, high = num_sequences + 2;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      const bool is_before =
          split_point(owned, num_sequences, total, middle) / kTileRows + middle <= tile;
      (is_before ? low : high) = middle;
    }
    const bool is_gap = low == 0 || low == num_sequences + 1;
    place.index = is_gap ? 0 : low - 1;
    place.query_begin = split_point(queries, num_sequences, T, low);
    place.query_rows = max(split_point(queries, num_sequences, T, low + 1) - place.query_begin, 0);
    place.query_len = is_gap ? 0 : place.query_rows;
    place.kv_begin = split_point(keys, num_sequences, S, low);
    place.kv_rows = max(split_point(keys, num_sequences, S, low + 1) - place.kv_begin, 0);
    place.kv_len = is_gap ? 0 : place.kv_rows;
    const int begin = kOwnsQueries ? place.query_begin : place.kv_begin;
    place.row_begin = (tile - begin / kTileRows - low) * kTileRows;
  }
  if (inputs.is_bottom_right) place.diagonal_offset = place.kv_len - place.query_len;
  return place;
}

}  // namespace jaxflash::device
