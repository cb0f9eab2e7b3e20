// Which query tiles a CTA of the backward meets: the same sequence for every role.
#pragma once

#include "device/visibility.cuh"

namespace jaxflash::fa3_sm90 {

// Order of the CTAs. A head is one KV head of one batch entry. Sections of heads follow each other,
// in each the first blocks of all its heads, then the second ones: with a causal mask the longest
// blocks start early and the short ones fill the gaps at the end. Within a head blocks always come
// in order, on which the order of dq relies.
struct KeyGrid {
  int blocks;  // of a head
  int num_heads, section_heads;
};

// The keys [first_key, first_key + kBlockKV) of one KV head. Each query head of its group brings
// the tiles [first_tile, end_tile) of queries that can see one of them. It lies in shared memory,
// so that it takes no registers in the loops.
template <int kBlockQ, int kBlockKV>
struct KeyBlock {
  int batch, kv_head, first_key;
  int first_head, end_head;
  int first_tile, end_tile;
  int first_plain, end_plain;  // tiles whose every pair is visible
  device::Window see;
  int first_row, end_row;  // the queries of the batch entry that see a key at all

  // index: in the order of the grid. One thread of the CTA. Returns what the block lies in.
  __device__ __forceinline__ device::SequenceTile locate(const AttentionParams& params,
                                                         const SequenceInputs& inputs,
                                                         unsigned index, const KeyGrid& grid,
                                                         bool is_reversed) {
    const int K = static_cast<int>(params.K), group_size = static_cast<int>(params.group_size);
    const int section_blocks = grid.blocks * grid.section_heads;
    const int first_of_section = index / section_blocks * grid.section_heads;
    const int heads = min(grid.section_heads, grid.num_heads - first_of_section);
    const int block = index % section_blocks / heads;
    const int entry = first_of_section + index % section_blocks % heads;
    kv_head = entry % K;
    batch = entry / K;
    const device::SequenceTile place = device::locate_tile<false, kBlockKV>(
        params, inputs, batch, is_reversed ? grid.blocks - 1 - block : block);
    first_key = place.row_begin;
    first_head = kv_head * group_size;
    end_head = first_head + group_size;
    see = device::make_window(params, place);
    int begin, end;
    device::query_range(see, first_key, first_key + kBlockKV, &begin, &end);
    first_tile = begin / kBlockQ;
    end_tile = begin < end ? (end - 1) / kBlockQ + 1 : first_tile;
    if (begin >= end) end_head = first_head;
    // Every row of tile t sees every key: is_inside_window(), solved for t.
    const int end_key = first_key + kBlockKV;
    first_plain = max(first_tile, round_up(end_key - 1 - see.window_high) / kBlockQ);
    end_plain = min(see.query_len, first_key - see.window_low + 1) / kBlockQ;
    if (end_key > see.kv_len) end_plain = first_plain;
    first_row = device::clamp(-see.window_high, 0, see.query_len);
    end_row = device::clamp(see.kv_len - see.window_low, first_row, see.query_len);
    return place;
  }

  // Where tiles and keys lie: in the workspace, and among the rows of the batch entry.
  __device__ __forceinline__ int slot(int tile) const { return tile; }
  __device__ __forceinline__ int query_row(int tile) const { return tile * kBlockQ; }
  __device__ __forceinline__ int key_row() const { return first_key; }

  // To whole tiles, and not below 0.
  __device__ __forceinline__ static int round_up(int row) {
    return (max(row, 0) + kBlockQ - 1) / kBlockQ * kBlockQ;
  }

  // Whether the tile has rows that must not be observed; rows from T on are read as zeros anyway.
  __device__ __forceinline__ bool has_hidden_rows(int tile, int T) const {
    const int row = tile * kBlockQ;
    return row < first_row || min(row + kBlockQ, T) > end_row;
  }

  // How many CTAs add to dq of the tile before this one does, in the order of the key blocks.
  __device__ __forceinline__ int turn(int tile, bool is_reversed) const {
    const int row = tile * kBlockQ;
    int begin, end;
    device::kv_range(see, row, row + kBlockQ, &begin, &end);
    const int block = first_key / kBlockKV;
    return is_reversed ? (end - 1) / kBlockKV - block : block - begin / kBlockKV;
  }
};

}  // namespace jaxflash::fa3_sm90
