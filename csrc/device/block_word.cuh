// What a block mask keeps of 32 neighbouring tiles.
//
// A lane asks for one tile and a warp turns 32 answers into words, so that the reads of the block
// mask are in flight together and a hidden tile costs nothing after them.
#pragma once

#include "device/visibility.cuh"

namespace jaxflash::device {

// Tiles 32 index .. 32 index + 31 of a row or a column of tiles. All lanes call everything here
// together, and every warp finds the same. box_of(tile) is the tile's Box.
class BlockWord {
 public:
  // The first tile at or after `tile` of which the block mask keeps anything; at least end_tile
  // where there is none before that.
  template <class BoxOf>
  __device__ __forceinline__ int first_kept(const Visibility& see, const BoxOf& box_of, int tile,
                                            int end_tile, int lane_idx) {
    while (tile < end_tile) {
      read(see, box_of, tile / 32, lane_idx);
      const uint32_t kept = kept_ >> tile % 32;
      if (kept != 0) return tile + __ffs(kept) - 1;
      tile = 32 * (index_ + 1);
    }
    return tile;
  }

  // The last tile at or before `tile` of which it keeps anything; less than first_tile where there
  // is none from that on.
  template <class BoxOf>
  __device__ __forceinline__ int last_kept(const Visibility& see, const BoxOf& box_of, int tile,
                                           int first_tile, int lane_idx) {
    while (tile >= first_tile) {
      read(see, box_of, tile / 32, lane_idx);
      const uint32_t kept = kept_ << (31 - tile % 32);
      if (kept != 0) return tile - __clz(kept);
      tile = 32 * index_ - 1;
    }
    return tile;
  }

  // Of the tile that was found last.
  __device__ __forceinline__ Tile kind(int tile) const {
    return (full_ >> tile % 32 & 1) != 0 ? Tile::kFull : Tile::kPartial;
  }

  // Another head begins.
  __device__ __forceinline__ void forget() { index_ = -1; }

 private:
  template <class BoxOf>
  __device__ __forceinline__ void read(const Visibility& see, const BoxOf& box_of, int index,
                                       int lane_idx) {
    if (index == index_) return;
    index_ = index;
    const Tile kind = classify_blocks(see, box_of(32 * index + lane_idx));
    kept_ = __ballot_sync(0xFFFFFFFF, kind != Tile::kHidden);
    full_ = __ballot_sync(0xFFFFFFFF, kind == Tile::kFull);
  }

  int index_ = -1;
  uint32_t kept_, full_;
};

// classify() of tile after tile, forwards: the first at or after `tile` in which anything is
// visible; at least end_tile where there is none.
template <class BoxOf>
__device__ __forceinline__ int first_visible(const Visibility& see, const BoxOf& box_of, int tile,
                                             int end_tile, int lane_idx, BlockWord* word,
                                             Tile* kind) {
  for (; tile < end_tile; ++tile) {
    Tile blocks = Tile::kFull;
    if (see.block_mask.data != nullptr) {
      tile = word->first_kept(see, box_of, tile, end_tile, lane_idx);
      if (tile >= end_tile) break;
      blocks = word->kind(tile);
    }
    *kind = classify(see, box_of(tile), blocks, lane_idx);
    if (*kind != Tile::kHidden) break;
  }
  return tile;
}

// Backwards: the last at or before `tile`; less than first_tile where there is none.
template <class BoxOf>
__device__ __forceinline__ int last_visible(const Visibility& see, const BoxOf& box_of, int tile,
                                            int first_tile, int lane_idx, BlockWord* word,
                                            Tile* kind) {
  for (; tile >= first_tile; --tile) {
    Tile blocks = Tile::kFull;
    if (see.block_mask.data != nullptr) {
      tile = word->last_kept(see, box_of, tile, first_tile, lane_idx);
      if (tile < first_tile) break;
      blocks = word->kind(tile);
    }
    *kind = classify(see, box_of(tile), blocks, lane_idx);
    if (*kind != Tile::kHidden) break;
  }
  return tile;
}

}  // namespace jaxflash::device
