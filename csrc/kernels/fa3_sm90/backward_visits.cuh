// Which query tiles a CTA of the general backward meets. It depends on data, so one warp decides
// and hands the decision on: the loader's, which classifies 32 tiles at a time, one a lane.
//
//   loader      block.loaded[stage]  ->  consumers    under q_full, until q_empty
//   consumer 0  block.formed         ->  dQ writer    under kBarrierFormed, until kBarrierTaken
#pragma once

#include "kernels/fa3_sm90/backward_stream.cuh"
#include "kernels/fa3_sm90/backward_workspace.cuh"

namespace jaxflash::fa3_sm90 {

// How a step treats its pairs. The first two find -lse and -delta in the accumulators.
enum class StepKind : int {
  kPlain,    // every pair is visible
  kMasked,   // some are not
  kExtreme,  // the same, and the products start from zero, the statistics come in float32: rows may
             // exceed what StatisticColumns can hold, or a soft cap comes before -lse
  kNone,     // no pair is visible, nothing is loaded; as a record the end of the steps
};

// A query tile that a step works on.
struct alignas(16) Visit {
  int head, tile;
  StepKind kind;
  bool is_full;        // whether every pair is visible
  bool has_idle_rows;  // rows that take no part and must not be observed
};

// What segment ids and block mask leave of a box inside the window. ids: of its queries and of its
// keys below the lengths. Each lane may ask about a box of its own.
__device__ __forceinline__ device::Tile classify_box(const device::Visibility& see,
                                                     const device::Box& box,
                                                     const device::IdRange& query_ids,
                                                     const device::IdRange& kv_ids) {
  device::Tile segments = device::Tile::kFull;
  if (see.query_ids != nullptr) segments = device::classify_segments(query_ids, kv_ids);
  if (segments == device::Tile::kHidden) return segments;
  const device::Tile blocks = device::classify_blocks(see, box);
  return blocks == device::Tile::kFull ? segments : blocks;
}

// A KeyBlock with everything that can hide a pair. `see` of the base is its window.
template <int kBlockQ, int kBlockKV, int kStages>
struct MaskedKeyBlock : KeyBlock<kBlockQ, kBlockKV> {
  using Base = KeyBlock<kBlockQ, kBlockKV>;

  device::Visibility masks;  // block mask: of head 0
  int64_t mask_head_stride;
  int query_begin, kv_begin;  // of the sequence, inside the batch entry
  int num_rows;               // of dk and dv that this CTA owns; <= 0: none
  int first_slot;
  bool has_soft_cap;
  Visit loaded[kStages], formed;

  // One thread of the CTA.
  __device__ __forceinline__ void locate(const AttentionParams& params,
                                         const SequenceInputs& inputs, unsigned index,
                                         const KeyGrid& grid, bool is_reversed) {
    const device::SequenceTile place = Base::locate(params, inputs, index, grid, is_reversed);
    masks = device::make_visibility(params, place, 0);
    mask_head_stride = params.block_mask.head_stride;
    query_begin = place.query_begin;
    kv_begin = place.kv_begin;
    num_rows = place.row_begin < 0 ? 0 : place.kv_rows - place.row_begin;
    first_slot = first_query_slot(inputs, place, kBlockQ);
    has_soft_cap = params.logits_soft_cap > 0.0f;
  }

  __device__ __forceinline__ int slot(int tile) const { return first_slot + tile; }
  __device__ __forceinline__ int query_row(int tile) const { return query_begin + tile * kBlockQ; }
  __device__ __forceinline__ int key_row() const { return kv_begin + this->first_key; }

  __device__ __forceinline__ device::Visibility masks_of(int head) const {
    device::Visibility see = masks;
    if (see.block_mask.data != nullptr) {
      see.block_mask.data =
          static_cast<const uint8_t*>(see.block_mask.data) + head * mask_head_stride;
    }
    return see;
  }

  __device__ __forceinline__ device::Box box(int tile, int block) const {
    const int row = tile * kBlockQ, key = block * kBlockKV;
    return {row, row + kBlockQ, key, key + kBlockKV};
  }

  // Of a tile of [first_tile, end_tile).
  __device__ __forceinline__ Visit classify(const BackwardWorkspace& workspace, int num_heads,
                                            int head, int tile) const {
    const int block = this->first_key / kBlockKV;
    const int marks = workspace.marks[workspace.index_of(num_heads, this->batch, head, slot(tile))];
    const device::Box pairs = box(tile, block);
    const device::Tile kind =
        classify_box(masks_of(head), pairs, workspace.ids_of_queries(this->batch, slot(tile)),
                     workspace.ids_of_keys(this->batch, block));
    const bool is_full =
        kind == device::Tile::kFull && device::is_inside_window<false>(this->see, pairs);
    Visit visit = {head, tile, is_full ? StepKind::kPlain : StepKind::kMasked, is_full,
                   (marks & kMarkHasIdleRows) != 0};
    if (has_soft_cap || (marks & kMarkIsExtreme) != 0) visit.kind = StepKind::kExtreme;
    if (kind == device::Tile::kHidden || (marks & kMarkIsIdle) != 0) visit.kind = StepKind::kNone;
    return visit;
  }

  // `place` key blocks before this one may add to dq of the tile (turn()). Returns the turn after
  // the last of them that does, 0 without one. One warp.
  __device__ __forceinline__ int turn_after(const BackwardWorkspace& workspace, int head, int tile,
                                            int place, bool is_reversed, int lane_idx) const {
    const int own = this->first_key / kBlockKV;
    const device::Visibility see = masks_of(head);
#pragma unroll 1
    for (int end = place; end > 0; end -= 32) {
      const int candidate = end - 1 - lane_idx, distance = place - candidate;
      bool adds = false;
      if (candidate >= 0) {
        const int block = is_reversed ? own + distance : own - distance;
        adds =
            classify_box(see, box(tile, block), workspace.ids_of_queries(this->batch, slot(tile)),
                         workspace.ids_of_keys(this->batch, block)) != device::Tile::kHidden;
      }
      const unsigned found = __ballot_sync(0xFFFFFFFF, adds);
      if (found != 0) return end - (__ffs(found) - 1);
    }
    return 0;
  }
};

}  // namespace jaxflash::fa3_sm90
