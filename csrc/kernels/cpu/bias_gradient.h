// Gradient of the bias: dbias = dS summed over every dim the bias is broadcast over.
//
// A task owns one tile of the bias array (64 rows x 64 keys, or all of a dim of size 1), walks in a
// fixed order over the batch entries, heads, rows and keys that read it, and recomputes dS with
// lanes along the keys. Sums are float32, per tile first and then over tiles.
#pragma once

#include "kernels/cpu/backward.h"

namespace jaxflash::cpu::JF_CPU_ISA {

struct BiasTile {
  int64_t bias_batch, bias_head;
  int64_t row_begin, row_end;        // query rows walked: the tile's, or all when broadcast
  int64_t column_begin, column_end;  // keys walked
  bool is_row_broadcast, is_column_broadcast;
};

inline BiasTile locate_bias_tile(const AttentionParams& params, const BiasGradient& dbias,
                                 int64_t task) {
  const int64_t row_tiles = ceil_div(dbias.num_rows, kStreamRows);
  const int64_t column_tiles = ceil_div(dbias.num_columns, kPanelLanes);
  const int64_t column_tile = task % column_tiles, row_tile = task / column_tiles % row_tiles;
  const int64_t plane = task / column_tiles / row_tiles;
  BiasTile tile;
  tile.bias_head = plane % dbias.num_heads;
  tile.bias_batch = plane / dbias.num_heads;
  // A dim of size 1 that the problem also has once needs no sum, but sums to the same.
  tile.is_row_broadcast = dbias.num_rows == 1;
  tile.is_column_broadcast = dbias.num_columns == 1;
  tile.row_begin = tile.is_row_broadcast ? 0 : row_tile * kStreamRows;
  tile.row_end =
      tile.is_row_broadcast ? params.T : clamp(tile.row_begin + kStreamRows, 0, params.T);
  tile.column_begin = tile.is_column_broadcast ? 0 : column_tile * kPanelLanes;
  tile.column_end =
      tile.is_column_broadcast ? params.S : clamp(tile.column_begin + kPanelLanes, 0, params.S);
  return tile;
}

// total[row][lane] += dS, or total[0][lane] += its sum over the rows.
inline void add_to_total(const float* dscores, int64_t rows, bool is_row_broadcast, float* total) {
  for (int64_t lane = 0; lane < kPanelLanes; lane += kLanes) {
    Vector sum = {};
    for (int64_t row = 0; row < rows; ++row) {
      const Vector value = load(dscores + row * kPanelLanes + lane);
      float* place = total + row * kPanelLanes + lane;
      if (is_row_broadcast) {
        sum += value;
      } else {
        store(place, load(place) + value);
      }
    }
    if (is_row_broadcast) store(total + lane, load(total + lane) + sum);
  }
}

struct BiasScratch {
  BackwardBuffers buffers;
  float* k;      // [H][lane]
  float* v;      // [Hv][lane]
  float* total;  // [row][lane]
};

// Adds one query head's dS for 64 keys and the tile's rows.
inline void add_head(const BackwardParams& params, const Sequence& sequence, int64_t head,
                     const BiasTile& tile, int64_t column, int64_t columns,
                     const BiasScratch& scratch) {
  const AttentionParams& attention = params.attention;
  const BackwardBuffers& buffers = scratch.buffers;
  const Visibility see = make_visibility(attention, sequence, head);
  const DropoutStream dropout = make_dropout(attention, sequence, head);
  const int64_t H = attention.H, Hv = attention.Hv;
  int64_t begin, end;
  stream_range<Owned::kKeys>(see, column, column + columns, &begin, &end);
  begin = begin < tile.row_begin ? tile.row_begin : begin;
  end = end > tile.row_end ? tile.row_end : end;
  for (int64_t row = begin / kStreamRows * kStreamRows; row < end; row += kStreamRows) {
    const int64_t rows = clamp(see.query_len - row, 0, kStreamRows);
    const Box box = make_box<Owned::kKeys>(column, columns, row, rows);
    if (classify(see, box) == Tile::kHidden) continue;
    if (!fill_adjust<Owned::kKeys>(see, box, buffers.adjust)) continue;
    load_stream<Owned::kKeys>(params, sequence, see, head, row, rows, buffers);
    multiply({buffers.first, H, 1}, rows, scratch.k, H, buffers.scores, kPanelVectors,
             Store::kOverwrite);
    multiply({buffers.second, Hv, 1}, rows, scratch.v, Hv, buffers.dscores, kPanelVectors,
             Store::kOverwrite);
    if (dropout.threshold > 0) fill_keep<Owned::kKeys>(dropout, box, buffers.keep);
    const GradientTile gradient = {
        buffers.scores,     buffers.dscores,
        buffers.adjust,     dropout.threshold > 0 ? buffers.keep : nullptr,
        buffers.statistics, attention.logits_soft_cap};
    logits_gradient<Owned::kKeys, GradientOf::kCapped>(gradient, rows, kPanelVectors);
    add_to_total(buffers.dscores, rows, tile.is_row_broadcast, scratch.total);
  }
}

inline void add_batch(const BackwardParams& params, const Sequence& sequence, const BiasTile& tile,
                      const BiasScratch& scratch) {
  const AttentionParams& attention = params.attention;
  const bool is_head_broadcast = params.dbias.num_heads == 1;
  const int64_t head_begin = is_head_broadcast ? 0 : tile.bias_head;
  const int64_t head_end = is_head_broadcast ? attention.N : tile.bias_head + 1;
  const int64_t column_end = clamp(sequence.kv_len, 0, tile.column_end);
  for (int64_t column = tile.column_begin; column < column_end; column += kPanelLanes) {
    const int64_t columns = clamp(column_end - column, 0, kPanelLanes);
    const int32_t* kv_ids =
        static_cast<const int32_t*>(batch_data(attention.kv_segment_ids, sequence.batch, 4));
    bool valid[kPanelLanes];
    fill_valid(kv_ids, column, columns, valid);
    int64_t loaded_kv_head = -1;
    for (int64_t head = head_begin; head < head_end; ++head) {
      const int64_t kv_head = head / attention.group_size;
      if (kv_head != loaded_kv_head) {
        load_panel(kv_rows(attention, sequence, attention.k, kv_head, attention.H), column, columns,
                   valid, 1.0f, scratch.k);
        load_panel(kv_rows(attention, sequence, attention.v, kv_head, attention.Hv), column,
                   columns, valid, 1.0f, scratch.v);
        loaded_kv_head = kv_head;
      }
      add_head(params, sequence, head, tile, column, columns, scratch);
    }
  }
}

inline void store_bias_tile(const BackwardParams& params, const BiasTile& tile,
                            const float* total) {
  const BiasGradient& dbias = params.dbias;
  const DataType dtype = params.attention.bias.dtype;
  const int64_t rows = tile.is_row_broadcast ? 1 : tile.row_end - tile.row_begin;
  const int64_t columns = tile.is_column_broadcast ? 1 : tile.column_end - tile.column_begin;
  for (int64_t row = 0; row < rows; ++row) {
    float values[kPanelLanes];
    __builtin_memcpy(values, total + row * kPanelLanes, sizeof(values));
    for (int64_t lane = 1; tile.is_column_broadcast && lane < kPanelLanes; ++lane) {
      values[0] += values[lane];
    }
    const int64_t plane = tile.bias_batch * dbias.num_heads + tile.bias_head;
    const int64_t first_row = tile.is_row_broadcast ? 0 : tile.row_begin;
    const int64_t offset = (plane * dbias.num_rows + first_row + row) * dbias.num_columns +
                           (tile.is_column_broadcast ? 0 : tile.column_begin);
    row_from_float(values, dtype, columns, element_address(dbias.data, dtype, offset));
  }
}

inline void bias_gradient_task(const BackwardParams& params, int64_t task, float* slot) {
  const AttentionParams& attention = params.attention;
  const BiasGradient& dbias = params.dbias;
  const FlushSubnormals flush;
  const BiasTile tile = locate_bias_tile(attention, dbias, task);
  Scratch pieces(slot);
  BiasScratch scratch;
  scratch.buffers = take_buffers(attention, &pieces);
  scratch.k = pieces.take(attention.H * kPanelLanes);
  scratch.v = pieces.take(attention.Hv * kPanelLanes);
  scratch.total = pieces.take(kTileFloats);
  __builtin_memset(scratch.total, 0, kTileFloats * sizeof(float));
  for (int64_t i = dbias.first_member[tile.bias_batch]; i < dbias.first_member[tile.bias_batch + 1];
       ++i) {
    // Packing allows no bias, so batch entries and sequences are the same here.
    add_batch(params, attention.sequences[dbias.members[i]], tile, scratch);
  }
  store_bias_tile(params, tile, scratch.total);
}

}  // namespace jaxflash::cpu::JF_CPU_ISA
