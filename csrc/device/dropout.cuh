// Which elements dropout keeps, for the fragments of mma.sync.
//
// Philox key = the two seeds, counter = (column / 8, row, head, batch); the four words are eight
// 16-bit draws, column c of the group taking half c % 2 of word c / 2. In a fragment of 16 rows x 8
// columns, lane l holds columns 2t and 2t + 1 (t = l % 4) of a group: exactly word t.
#pragma once

#include <cstdint>

#include "device/philox.h"
#include "device/sequence.cuh"

namespace jaxflash::device {

struct DropoutStream {
  uint32_t seed0, seed1, head, batch;
  int threshold;  // of 65536; 0 = no dropout
  float scale;
};

__device__ __forceinline__ DropoutStream make_dropout(const AttentionParams& params,
                                                      const SequenceTile& place, int head) {
  if (params.dropout_threshold <= 0) return {};
  const uint32_t* batch = batch_data<uint32_t>(params.dropout_batch, params, place.batch);
  const uint32_t* heads = batch_data<uint32_t>(params.dropout_heads, params, place.batch);
  return {batch[0],
          batch[1],
          heads[head * params.dropout_heads.head_stride],
          batch[2] + static_cast<uint32_t>(place.index),
          params.dropout_threshold,
          params.dropout_scale};
}

// words[j] = this lane's word of (row, columns column + 8 j .. + 7), j < 4, for a row shared by the
// four lanes of a quad; column is a multiple of 8. Each lane draws one of the four counters, and
// the quad transposes the 4 x 4 words. All 32 lanes call it.
__device__ __forceinline__ void draw_words(const DropoutStream& stream, int row, int column,
                                           int lane_idx, uint32_t (&words)[4]) {
  const int t = lane_idx % 4;
  const PhiloxWords drawn = philox4x32_7({static_cast<uint32_t>(column / 8 + t),
                                          static_cast<uint32_t>(row), stream.head, stream.batch},
                                         stream.seed0, stream.seed1);
  uint32_t received[4];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    // Lane t sends word t ^ step to lane t ^ step, which holds that word's columns.
    const int other = t ^ step;
    const uint32_t low = other % 2 == 0 ? drawn.x : drawn.y;
    const uint32_t high = other % 2 == 0 ? drawn.z : drawn.w;
    received[step] = __shfl_xor_sync(0xFFFFFFFF, other < 2 ? low : high, step);
  }
  // received[step] came from lane t ^ step, which drew counter t ^ step.
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int step = t ^ j;
    const uint32_t low = step % 2 == 0 ? received[0] : received[1];
    const uint32_t high = step % 2 == 0 ? received[2] : received[3];
    words[j] = step < 2 ? low : high;
  }
}

// Whether the even (0) or odd (1) column of a word is kept.
__device__ __forceinline__ bool is_kept(const DropoutStream& stream, uint32_t word, int parity) {
  return static_cast<int>(word >> (16 * parity) & 0xFFFF) >= stream.threshold;
}

}  // namespace jaxflash::device
