// The dropout multiplier of a tile: dropout_scale where an element is kept, 0 where it is dropped.
//
// Philox key = the two seeds, counter = (column / 8, row, head, batch); the four words are eight
// 16-bit draws, column c of the group taking half c % 2 of word c / 2.
#pragma once

#include "device/philox.h"
#include "kernels/cpu/mask.h"

namespace jaxflash::cpu::JF_CPU_ISA {

struct DropoutStream {
  uint32_t seed0, seed1, head, batch;
  int32_t threshold;  // 0 = no dropout
  float scale;
};

inline DropoutStream make_dropout(const AttentionParams& params, const Sequence& sequence,
                                  int64_t head) {
  if (params.dropout_threshold <= 0) return {};
  const uint32_t* batch =
      static_cast<const uint32_t*>(batch_data(params.dropout_batch, sequence.batch, 4));
  const uint32_t* heads =
      static_cast<const uint32_t*>(batch_data(params.dropout_heads, sequence.batch, 4));
  return {batch[0],
          batch[1],
          heads[head * params.dropout_heads.head_stride],
          batch[2] + static_cast<uint32_t>(sequence.index),
          params.dropout_threshold,
          params.dropout_scale};
}

// Eight draws of each of 64 counters, words[word][counter].
struct DropoutWords {
  alignas(64) uint32_t words[4][kPanelLanes];
};

inline void draw(const DropoutStream& stream, const uint32_t* column_groups, const uint32_t* rows,
                 DropoutWords* draws) {
  for (int64_t i = 0; i < kPanelLanes; ++i) {
    const device::PhiloxWords words = device::philox4x32_7(
        {column_groups[i], rows[i], stream.head, stream.batch}, stream.seed0, stream.seed1);
    draws->words[0][i] = words.x;
    draws->words[1][i] = words.y;
    draws->words[2][i] = words.z;
    draws->words[3][i] = words.w;
  }
}

// keep[stream][lane]; the box starts at a multiple of 8 columns.
template <Owned kOwned>
inline void fill_keep(const DropoutStream& stream, const Box& box, float* keep) {
  alignas(64) uint32_t column_groups[kPanelLanes], rows[kPanelLanes];
  DropoutWords draws;
  const int32_t threshold = stream.threshold;
  const float scale = stream.scale;
  const uint32_t first_group = static_cast<uint32_t>(box.column_begin / kDropoutColumns);
  if (kOwned == Owned::kQueries) {
    const int64_t groups = ceil_div(box.column_end - box.column_begin, kDropoutColumns);
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t lane = 0; lane < kPanelLanes; ++lane) {
        column_groups[lane] = first_group + static_cast<uint32_t>(group);
        rows[lane] = static_cast<uint32_t>(box.row_begin + lane);
      }
      draw(stream, column_groups, rows, &draws);
      for (int64_t c = 0; c < kDropoutColumns; ++c) {
        const uint32_t* words = draws.words[c / 2];
        const int shift = c % 2 * 16;
        float* destination = keep + (group * kDropoutColumns + c) * kPanelLanes;
        for (int64_t lane = 0; lane < kPanelLanes; ++lane) {
          const int32_t bits = static_cast<int32_t>(words[lane] >> shift & 0xFFFF);
          destination[lane] = bits >= threshold ? scale : 0.0f;
        }
      }
    }
  } else {
    constexpr int64_t kGroups = kPanelLanes / kDropoutColumns;  // per row of 64 keys
    constexpr int64_t kRowsPerDraw = kPanelLanes / kGroups;
    const int64_t num_rows = box.row_end - box.row_begin;
    for (int64_t row = 0; row < num_rows; row += kRowsPerDraw) {
      for (int64_t i = 0; i < kPanelLanes; ++i) {
        column_groups[i] = first_group + static_cast<uint32_t>(i % kGroups);
        rows[i] = static_cast<uint32_t>(box.row_begin + row + i / kGroups);
      }
      draw(stream, column_groups, rows, &draws);
      for (int64_t i = 0; i < kPanelLanes; ++i) {
        float* destination = keep + row * kPanelLanes + i * kDropoutColumns;
        for (int64_t c = 0; c < kDropoutColumns; ++c) {
          const int32_t bits = static_cast<int32_t>(draws.words[c / 2][i] >> (c % 2 * 16) & 0xFFFF);
          destination[c] = bits >= threshold ? scale : 0.0f;
        }
      }
    }
  }
}

}  // namespace jaxflash::cpu::JF_CPU_ISA
