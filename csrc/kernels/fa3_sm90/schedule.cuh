// In which order the CTAs work off the tiles of the forward.
#pragma once

#include <cstdint>

#include "device/sequence.cuh"
#include "device/visibility.cuh"
#include "kernels/fa3_sm90/config.h"

namespace jaxflash::fa3_sm90 {

// Tiles are counted 0 .. num_tiles - 1: sections of heads, and inside a section the last rows of
// all its heads first: with a causal mask those see the most keys, so the long tiles start early
// and the short ones fill the gaps at the end.
struct Schedule {
  int num_tiles;
  int tiles_per_head;  // a tile is kBlockQ rows
  int num_heads;       // B * N
  int section_heads;
  // CTAs draw their next tile here where tiles differ in length, 0 at the launch; nullptr =
  // every CTA takes its tiles at a fixed stride.
  int* drawn;
};

struct TilePlace {
  int head, batch;
  int tile;  // of the head
};

// Where tile `index` of the schedule lies.
__device__ __forceinline__ TilePlace place_of(const AttentionParams& params,
                                              const Schedule& schedule, int index) {
  const int section_tiles = schedule.section_heads * schedule.tiles_per_head;
  const int section = index / section_tiles;
  const int first_head = section * schedule.section_heads;
  const int heads = min(schedule.section_heads, schedule.num_heads - first_head);
  const int in_section = index - section * section_tiles;
  const int from_last = in_section / heads;
  const int entry = first_head + in_section - from_last * heads;
  const int batch = entry / static_cast<int>(params.N);
  return {entry - batch * static_cast<int>(params.N), batch,
          schedule.tiles_per_head - 1 - from_last};
}

template <class Config>
__device__ __forceinline__ WorkTile locate(const AttentionParams& params,
                                           const SequenceInputs& inputs, const Schedule& schedule,
                                           int index) {
  WorkTile tile = {};
  tile.row_begin = -1;
  if (index >= schedule.num_tiles) return tile;
  const TilePlace found = place_of(params, schedule, index);
  tile.row_begin = found.tile * Config::kBlockQ;
  tile.batch = found.batch;
  tile.head = found.head;
  tile.kv_head = tile.head / static_cast<int>(params.group_size);

  device::SequenceTile place = {};
  place.query_len =
      device::length_of(inputs.query_lengths, params, tile.batch, static_cast<int>(params.T));
  place.kv_len =
      device::length_of(inputs.kv_lengths, params, tile.batch, static_cast<int>(params.S));
  if (inputs.is_bottom_right) place.diagonal_offset = place.kv_len - place.query_len;
  tile.see = device::make_window(params, place);
  int begin, end;
  device::kv_range(tile.see, tile.row_begin, tile.row_begin + Config::kBlockQ, &begin, &end);
  tile.block_begin = begin / Config::kBlockKV;
  tile.block_end = begin < end ? (end + Config::kBlockKV - 1) / Config::kBlockKV : tile.block_begin;
  return tile;
}

// The same in the general instance; false where the tile has no rows of its own, -1 = no more work.
template <class Config>
__device__ __forceinline__ bool locate_masked(const AttentionParams& params,
                                              const SequenceInputs& inputs,
                                              const Schedule& schedule, int index,
                                              typename Config::Tile* tile) {
  if (index >= schedule.num_tiles) {
    tile->row_begin = -1;
    return true;
  }
  const TilePlace found = place_of(params, schedule, index);
  const device::SequenceTile place =
      device::locate_tile<true, Config::kBlockQ>(params, inputs, found.batch, found.tile);
  if (place.row_begin >= place.query_rows) return false;
  tile->row_begin = place.row_begin;
  tile->head = found.head;
  tile->batch = found.batch;
  tile->kv_head = found.head / static_cast<int>(params.group_size);
  tile->query_begin = place.query_begin;
  tile->kv_begin = place.kv_begin;
  tile->query_rows = place.query_rows;
  tile->see = device::make_visibility(params, place, found.head);
  return true;
}

}  // namespace jaxflash::fa3_sm90
