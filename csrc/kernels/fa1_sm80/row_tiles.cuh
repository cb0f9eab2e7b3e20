// Which row tiles a column block meets: the test of Algorithm 5, for all of them before the first
// is visited.
//
// A lane classifies one tile and a warp turns 32 answers into a word, so that a hidden tile costs
// one read of the block mask, of which many are in flight, and nothing after it.
#pragma once

#include "device/visibility.cuh"
#include "kernels/fa1_sm80/config.h"
#include "mma/fragment.cuh"

namespace jaxflash::fa1_sm80 {

using device::Box;
using device::Tile;
using device::Visibility;

// Whether anything in the box is visible and whether everything is; each thread has its own box.
// kv_ids: range of the ids of the box's columns.
template <bool kIsGeneral>
__device__ __forceinline__ Tile classify(const Visibility& see, const Box& box,
                                         const device::IdRange& kv_ids) {
  if (!device::meets_window(see, box)) return Tile::kHidden;
  const Tile blocks = device::classify_blocks(see, box);
  if (blocks == Tile::kHidden) return Tile::kHidden;
  bool is_full = device::is_inside_window<false>(see, box) && blocks == Tile::kFull;
  if constexpr (kIsGeneral) {
    is_full &= see.mask.data == nullptr;
    if (see.query_ids != nullptr) {
      const int row_end = min(box.row_end, see.query_len);
      const Tile segments = device::classify_segments(
          device::lane_id_range(see.query_ids, box.row_begin, row_end), kv_ids);
      if (segments == Tile::kHidden) return Tile::kHidden;
      is_full &= segments == Tile::kFull;
    }
  }
  return is_full ? Tile::kFull : Tile::kPartial;
}

// Hides what lies outside lengths and window of a 16-row fragment of logits, scores[j] being its
// columns 8 j ... row, column: of its first element.
template <int kTilesN>
__device__ __forceinline__ void hide_outside_window(const device::Window& see, int row, int column,
                                                    int lane_idx, float (&scores)[kTilesN][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + mma::fragment_row(lane_idx, 2 * half);
    const int begin = r < see.query_len ? r + see.window_low : see.kv_len;
    const int end = min(r + see.window_high, see.kv_len - 1);
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        const int key = column + 8 * j + mma::fragment_column(lane_idx, parity);
        if ((key < begin) | (key > end)) scores[j][2 * half + parity] = -device::kInfinity;
      }
    }
  }
}

// Hides the zero blocks of a block mask whose blocks are whole fragments.
template <int kTilesN>
__device__ __forceinline__ void hide_blocks(const Visibility& see, int row, int column,
                                            int lane_idx, float (&scores)[kTilesN][4]) {
  const int first_key = column + 8 * lane_idx;  // each lane asks for one fragment
  const bool is_kept =
      lane_idx < kTilesN && row < see.query_len && first_key < see.kv_len &&
      device::block_is_kept(see, row / see.mask_block_q, first_key / see.mask_block_kv);
  const uint32_t kept = __ballot_sync(0xFFFFFFFF, is_kept);
#pragma unroll
  for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if ((kept >> j & 1) == 0) scores[j][e] = -device::kInfinity;
    }
  }
}

// Whether each element of num_tiles fragments is seen, one bit each, whatever hides it. A call and
// in it a loop, because these questions, inlined and unrolled, would take the registers of K and V.
static __device__ __noinline__ uint32_t seen_elements(const Visibility& see, int row, int column,
                                                      int lane_idx, int num_tiles) {
  uint32_t seen = 0;
#pragma unroll 1
  for (int j = 0; j < num_tiles; ++j) {
    // Without branches, so that the reads of an iteration are in flight together. Where
    // is_in_window() says no they go to a valid place.
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = row + mma::fragment_row(lane_idx, e);
      const int key = column + 8 * j + mma::fragment_column(lane_idx, e);
      bool is_seen = device::is_in_window(see, r, key);
      const int valid_r = min(r, see.query_len - 1), valid_key = min(key, see.kv_len - 1);
      if (see.query_ids != nullptr) {
        const int32_t id = see.query_ids[valid_r];
        is_seen &= id >= 0 && id == see.kv_ids[valid_key];
      }
      if (see.block_mask.data != nullptr) {
        is_seen &=
            device::block_is_kept(see, valid_r / see.mask_block_q, valid_key / see.mask_block_kv);
      }
      if (see.mask.data != nullptr) {
        is_seen &=
            static_cast<const uint8_t*>(see.mask.data)[valid_r * see.mask.row_stride +
                                                       valid_key * see.mask.column_stride] != 0;
      }
      seen |= static_cast<uint32_t>(is_seen) << (4 * j + e);
    }
  }
  return seen;
}

// Hides everything that is hidden in a partial tile.
template <bool kIsGeneral, int kTilesN>
__device__ __forceinline__ void hide(const Visibility& see, int row, int column, int lane_idx,
                                     float (&scores)[kTilesN][4]) {
  const bool has_blocks = see.block_mask.data != nullptr;
  const bool has_fragments = see.mask_block_q % 16 == 0 && see.mask_block_kv % 8 == 0;
  if (kIsGeneral || (has_blocks && !has_fragments)) {
    static_assert(4 * kTilesN <= 32, "one bit an element");
    const uint32_t seen = seen_elements(see, row, column, lane_idx, kTilesN);
#pragma unroll
    for (int n = 0; n < 4 * kTilesN; ++n) {
      if ((seen >> n & 1) == 0) scores[n / 4][n % 4] = -device::kInfinity;
    }
    return;
  }
  hide_outside_window(see, row, column, lane_idx, scores);
  if (has_blocks) hide_blocks(see, row, column, lane_idx, scores);
}

// The row tiles of a head that one CTA has: of every `splits` groups of 2^log2_group tiles one.
struct RowShare {
  int split, splits, log2_group;

  // The n-th of them, counted among all tiles of the head.
  __device__ __forceinline__ int tile(int n) const {
    const int group = n >> log2_group;
    return ((group * splits + split) << log2_group) + (n - (group << log2_group));
  }
  // Not more than any n whose tile is `tile` or later.
  __device__ __forceinline__ int first_from(int tile) const {
    return (tile >> log2_group) / splits << log2_group;
  }
};

// The row tiles that the column blocks [first_block, end_block) meet, as far as this CTA has them,
// block by block and in ascending order. A block has a fixed number of words in an endless list,
// one bit a tile; kListWords of them, whatever blocks they belong to, are at hand at a time. An
// item is a bit among those, a run the items of one block.
template <class Config>
class RowTiles {
 public:
  // All warps of the CTA call everything here together.
  __device__ __forceinline__ RowTiles(const Visibility& see, const RowShare& share, int first_block,
                                      int end_block, RowTileList* list)
      : see_(see), list_(*list), share_(share), first_block_(first_block) {
    const int group = 1 << share.log2_group;
    const int last_tile = max(see.query_len - 1, 0) / Config::kBlockQ;
    all_words_ = (share.first_from(last_tile) + group + 31) / 32;
    block_words_ = all_words_;
    if (see.window_low > -device::kFar && see.window_high < device::kFar) {
      // The window lets a block meet an interval of rows, which may begin and end inside a group.
      const int rows = Config::kBlockKV + max(see.window_high - see.window_low, 0);
      const int groups = ((rows / Config::kBlockQ + 2) >> share.log2_group) + 2;
      block_words_ = min(all_words_, ((groups / share.splits + 2) * group + 31) / 32 + 1);
    }
    first_word_ = -kListWords;
    end_word_ = (end_block - first_block) * block_words_;
  }

  // Lists the next words, if there are any left.
  __device__ __forceinline__ bool advance() {
    first_word_ += kListWords;
    if (first_word_ >= end_word_) return false;
    num_words_ = min(end_word_ - first_word_, kListWords);
    __syncthreads();  // the list is no longer read
    const int lane_idx = threadIdx.x % 32;
    for (int word = threadIdx.x / 32; word < num_words_; word += Config::kNumWarps) {
      const int block = block_of(32 * word), column = block * Config::kBlockKV;
      const int row = share_.tile(offset_of(block) + 32 * word + lane_idx) * Config::kBlockQ;
      device::IdRange kv_ids = {};
      if (Config::kIsGeneral && see_.kv_ids != nullptr) {
        kv_ids = device::id_range(see_.kv_ids, column, min(column + Config::kBlockKV, see_.kv_len),
                                  lane_idx);
      }
      const Box box = {row, row + Config::kBlockQ, column, column + Config::kBlockKV};
      const Tile kind = classify<Config::kIsGeneral>(see_, box, kv_ids);
      const uint32_t visible = __ballot_sync(0xFFFFFFFF, kind != Tile::kHidden);
      const uint32_t partial = __ballot_sync(0xFFFFFFFF, kind == Tile::kPartial);
      if (lane_idx == 0) {
        list_.visible[word] = visible;
        list_.partial[word] = partial;
      }
    }
    __syncthreads();  // the list is complete
    return true;
  }

  // First listed item from `item` on; end() where there is none.
  __device__ __forceinline__ int find(int item) const { return find(item, num_words_); }
  __device__ __forceinline__ static int end() { return 32 * kListWords; }

  // Makes the run that begins at `item` the current one and returns its block.
  __device__ __forceinline__ int start_run(int item) {
    const int block = block_of(item);
    offset_ = offset_of(block);
    run_words_ = min((block - first_block_ + 1) * block_words_ - first_word_, num_words_);
    return block;
  }
  // Of the current run: the next item, end() where there is none; the item after its last; which
  // of the CTA's tiles an item is and its first row.
  __device__ __forceinline__ int next(int item) const { return find(item + 1, run_words_); }
  __device__ __forceinline__ int run_end() const { return 32 * run_words_; }
  __device__ __forceinline__ int number_of(int item) const { return offset_ + item; }
  __device__ __forceinline__ int row_of(int item) const {
    return share_.tile(number_of(item)) * Config::kBlockQ;
  }
  // Sets the bits of the tiles of the run that began at `item`, one a tile of the CTA.
  __device__ __forceinline__ void mark_run(int item, uint32_t* tiles) const {
    const int word = item / 32 + threadIdx.x;
    if (word < run_words_) tiles[offset_ / 32 + word] |= list_.visible[word];
  }
  // Whether masks must be consulted in an item.
  __device__ __forceinline__ bool is_partial(int item) const {
    return (list_.partial[item / 32] >> item % 32 & 1) != 0;
  }

 private:
  __device__ __forceinline__ int find(int item, int end_word) const {
    int word = item / 32;
    if (word >= end_word) return end();
    uint32_t bits = list_.visible[word] & 0xFFFFFFFFu << item % 32;
    while (bits == 0) {
      if (++word >= end_word) return end();
      bits = list_.visible[word];
    }
    return 32 * word + __ffs(bits) - 1;
  }

  __device__ __forceinline__ int block_of(int item) const {
    if constexpr (Config::kListsOneBlock) return first_block_;
    return first_block_ + (first_word_ + item / 32) / block_words_;
  }

  // Which of the CTA's tiles an item is, less the item.
  __device__ __forceinline__ int offset_of(int block) const {
    const int column = block * Config::kBlockKV;
    int begin, end;
    device::query_range(see_, column, column + Config::kBlockKV, &begin, &end);
    const int first_tile = share_.first_from(begin / Config::kBlockQ);
    const int word = min(first_tile / 32, all_words_ - block_words_);
    return 32 * (word + first_word_ - (block - first_block_) * block_words_);
  }

  const Visibility& see_;
  RowTileList& list_;
  const RowShare share_;
  const int first_block_;
  int all_words_, block_words_;  // of all tiles of the CTA, and of those that a block may meet
  int first_word_, end_word_, num_words_;  // the list, and where it ends for good
  int run_words_, offset_;                 // the current run
};

}  // namespace jaxflash::fa1_sm80
