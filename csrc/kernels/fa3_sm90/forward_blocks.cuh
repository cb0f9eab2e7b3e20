// Which K/V blocks a tile of the general forward meets. It depends on data, so the scheduler's warp
// decides, 32 blocks at a time, and hands the decision to all through a ring of words: a hidden
// block costs one read of the block mask and nothing after it.
//
// barrier        arrives                         waits      protects
// word_full[s]   scheduler                       all        words[s] filled
// word_empty[s]  warps of consumers, loaders     scheduler  words[s] may be overwritten
#pragma once

#include <cstdint>

#include "device/sequence.cuh"
#include "device/visibility.cuh"
#include "ptx/mbarrier.cuh"

namespace jaxflash::fa3_sm90 {

// A tile of the general instance; positions count inside its sequence. Lives in shared memory.
template <int kNumConsumers>
struct MaskedTile {
  int row_begin;  // first query row, -1 = no more work
  int head, batch, kv_head;
  int query_begin, kv_begin;  // of the sequence, inside the batch entry
  int query_rows;             // owned by the sequence, padding included
  device::Visibility see;
  device::IdRange query_ids[kNumConsumers];  // of each consumer's rows
};

// Blocks first_block .. first_block + 31 of a tile, one bit each. A tile's words come last block
// first; one with no block visible ends them.
template <int kNumConsumers>
struct alignas(16) BlockWord {
  int first_block;
  uint32_t visible;              // to any row of the tile
  uint32_t has_padding;          // holds keys of negative segments
  uint32_t full[kNumConsumers];  // every row of the consumer that takes part sees all of it
};

// Bits [first, end) of 32.
__device__ __forceinline__ uint32_t bit_range(int first, int end) {
  const uint32_t below_end = end >= 32 ? 0xFFFFFFFF : end <= 0 ? 0 : (1u << end) - 1;
  return first >= 32 ? 0 : first <= 0 ? below_end : below_end & (0xFFFFFFFF << first);
}

// One reader's way through the words: a warp of a consumer, or a thread that loads.
template <class Config, int kLanes>
class BlockReader {
  using Storage = typename Config::SharedStorage;

 public:
  // Moves to the next block of the tile; false after its last.
  __device__ __forceinline__ bool next(Storage* shared, int consumer_idx) {
    if (left_ == 0) read(shared, consumer_idx);
    if (left_ == 0) return false;
    bit_ = 31 - __clz(left_);
    left_ ^= 1u << bit_;
    return true;
  }

  __device__ __forceinline__ int block() const { return first_block_ + bit_; }
  __device__ __forceinline__ bool is_full() const { return (full_ >> bit_ & 1) != 0; }
  __device__ __forceinline__ bool has_padding() const { return (has_padding_ >> bit_ & 1) != 0; }

 private:
  __device__ __forceinline__ void read(Storage* shared, int consumer_idx) {
    ptx::mbarrier_wait(&shared->word_full[ring_.stage], ring_.phase);
    const auto& word = shared->words[ring_.stage];
    first_block_ = word.first_block;
    left_ = word.visible;
    has_padding_ = word.has_padding;
    full_ = word.full[consumer_idx];
    if constexpr (kLanes > 1) __syncwarp();
    if (kLanes == 1 || threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(&shared->word_empty[ring_.stage]);
    }
    ring_.advance();
  }

  typename Config::WordRing ring_;
  int first_block_, bit_;
  uint32_t left_ = 0, has_padding_, full_;
};

// The scheduler's side; all lanes of its warp call everything together.
template <class Config>
class BlockWriter {
  using Storage = typename Config::SharedStorage;
  using Tile = typename Config::Tile;
  static constexpr int kNumConsumers = Config::kNumConsumers;
  static constexpr int kBlockQ = Config::kBlockQ, kBlockKV = Config::kBlockKV;

 public:
  __device__ __forceinline__ explicit BlockWriter(Storage* shared)
      : shared_(*shared), lane_idx_(threadIdx.x % 32) {}

  // The words of a tile whose place, masks and batch are known.
  __device__ __forceinline__ void write(const Tile& tile) {
    const device::Visibility& see = tile.see;
    if (see.query_ids != nullptr && tile.batch != batch_) find_key_ids(tile);
    int begin, end;
    device::kv_range(see, tile.row_begin, tile.row_begin + kBlockQ, &begin, &end);
    const int first = begin / kBlockKV;
    const int last = begin < end ? (end - 1) / kBlockKV : first - 1;
    device::common_kv_range(see, tile.row_begin, tile.row_begin + kBlockQ, &begin, &end);
    Rows rows;
    rows.full_begin = (begin + kBlockKV - 1) / kBlockKV;
    rows.full_end = end / kBlockKV;
    const int active = min(kBlockQ, see.query_len - tile.row_begin);
    rows.consumers = bit_range(0, (active + 63) / 64);
    if (see.block_mask.data != nullptr) {
      rows.mask_begin = tile.row_begin / see.mask_block_q;
      rows.mask_end = (tile.row_begin + active - 1) / see.mask_block_q + 1;
    }
#pragma unroll 1
    for (int index = last >> 5; index >= first >> 5 && first <= last; --index) {
      const int block = 32 * index + lane_idx_;
      Answer answer = {};
      if (block >= first && block <= last) answer = classify(tile, rows, block);
      const uint32_t visible = __ballot_sync(0xFFFFFFFF, answer.is_visible);
      if (visible == 0) continue;
      const uint32_t padding = __ballot_sync(0xFFFFFFFF, answer.has_padding);
      uint32_t full[kNumConsumers];
#pragma unroll
      for (int c = 0; c < kNumConsumers; ++c) {
        full[c] = __ballot_sync(0xFFFFFFFF, (answer.full >> c & 1) != 0);
      }
      post(32 * index, visible, padding, full);
    }
    const uint32_t none[kNumConsumers] = {};
    post(0, 0, 0, none);
  }

  // The smallest and largest segment of each consumer's rows, before the tile is handed out.
  __device__ __forceinline__ void find_query_ids(Tile* tile) const {
    const device::Visibility& see = tile->see;
    if (see.query_ids == nullptr) return;
#pragma unroll 1
    for (int c = 0; c < kNumConsumers; ++c) {
      const int row = tile->row_begin + 64 * c;
      const device::IdRange range =
          device::id_range(see.query_ids, row, min(row + 64, see.query_len), lane_idx_);
      if (lane_idx_ == 0) tile->query_ids[c] = range;
    }
    __syncwarp();
  }

 private:
  struct Answer {
    bool is_visible, has_padding;
    uint32_t full;  // one bit a consumer
  };

  // What is the same for all blocks of a tile.
  struct Rows {
    int full_begin, full_end;  // the blocks that the window shows to every row whole
    uint32_t consumers;        // those with rows that take part, one bit each
    int mask_begin, mask_end;  // rows of the block mask
  };

  // One block, of this lane alone.
  __device__ __forceinline__ Answer classify(const Tile& tile, const Rows& rows, int block) const {
    const device::Visibility& see = tile.see;
    uint32_t visible = rows.consumers, full = visible;  // one bit a consumer
    const int key = block * kBlockKV;
    if (block < rows.full_begin || block >= rows.full_end) {
#pragma unroll
      for (int c = 0; c < kNumConsumers; ++c) {
        const int row = tile.row_begin + 64 * c;
        const device::Box box = {row, row + 64, key, key + kBlockKV};
        if (!device::meets_window(see, box)) visible &= ~(1u << c);
        if (!device::is_inside_window<true>(see, box)) full &= ~(1u << c);
      }
    }
    if (see.block_mask.data != nullptr && visible != 0) {
      apply_block_mask(tile, rows, block, &visible, &full);
    }
    bool has_padding = false;
    if (see.query_ids != nullptr && visible != 0) {
      const device::IdRange keys = key_ids(see, block);
      has_padding = keys.low < 0;
#pragma unroll
      for (int c = 0; c < kNumConsumers; ++c) {
        const device::Tile segments = device::classify_segments(tile.query_ids[c], keys);
        if (segments == device::Tile::kHidden) visible &= ~(1u << c);
        if (segments != device::Tile::kFull) full &= ~(1u << c);
      }
    }
    // Rows that take no part need no mask.
    return {visible != 0, has_padding, full | ~rows.consumers};
  }

  // Takes away what the block mask hides; reads every entry of it once.
  __device__ __forceinline__ static void apply_block_mask(const Tile& tile, const Rows& rows,
                                                          int block, uint32_t* visible,
                                                          uint32_t* full) {
    const device::Visibility& see = tile.see;
    int column_begin = block, column_end = block + 1;
    if (see.mask_block_kv != kBlockKV) {
      column_begin = block * kBlockKV / see.mask_block_kv;
      column_end = (min((block + 1) * kBlockKV, see.kv_len) - 1) / see.mask_block_kv + 1;
    }
    uint32_t any = 0, lacking = 0;
#pragma unroll 1
    for (int row = rows.mask_begin; row < rows.mask_end; ++row) {
      // The consumers that have rows of this row of blocks.
      const int begin = row * see.mask_block_q - tile.row_begin;
      const int end = begin + see.mask_block_q;
      const uint32_t consumers = bit_range(begin >> 6, (end + 63) >> 6);
#pragma unroll 1
      for (int column = column_begin; column < column_end; ++column) {
        const bool is_kept = device::block_is_kept(see, row, column);
        any |= is_kept ? consumers : 0;
        lacking |= is_kept ? 0 : consumers;
      }
    }
    *visible &= any;
    *full &= ~lacking;
  }

  __device__ __forceinline__ device::IdRange key_ids(const device::Visibility& see,
                                                     int block) const {
    if (block < Config::kNumKnownIds) return shared_.key_ids[block];
    return device::lane_id_range(see.kv_ids, block * kBlockKV,
                                 min((block + 1) * kBlockKV, see.kv_len));
  }

  // The segments of the first blocks of a batch entry, for all its tiles.
  __device__ __forceinline__ void find_key_ids(const Tile& tile) {
    const device::Visibility& see = tile.see;
    batch_ = tile.batch;
    const int blocks = min((see.kv_len + kBlockKV - 1) / kBlockKV, Config::kNumKnownIds);
#pragma unroll 1
    for (int block = lane_idx_; block < blocks; block += 32) {
      shared_.key_ids[block] = device::lane_id_range(see.kv_ids, block * kBlockKV,
                                                     min((block + 1) * kBlockKV, see.kv_len));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void post(int first_block, uint32_t visible, uint32_t padding,
                                       const uint32_t (&full)[kNumConsumers]) {
    ptx::mbarrier_wait(&shared_.word_empty[ring_.stage], ring_.phase ^ 1);
    if (lane_idx_ == 0) {
      auto& word = shared_.words[ring_.stage];
      word.first_block = first_block;
      word.visible = visible;
      word.has_padding = padding;
#pragma unroll
      for (int c = 0; c < kNumConsumers; ++c) word.full[c] = full[c];
      ptx::mbarrier_arrive(&shared_.word_full[ring_.stage]);
    }
    ring_.advance();
    __syncwarp();
  }

  Storage& shared_;
  const int lane_idx_;
  int batch_ = -1;  // whose key_ids are known
  typename Config::WordRing ring_;
};

}  // namespace jaxflash::fa3_sm90
