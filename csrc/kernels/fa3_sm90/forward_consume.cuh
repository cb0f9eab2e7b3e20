// A consumer warpgroup of the FlashAttention-3 forward: 64 query rows of every tile. The schedule
// and the barriers are in forward.cuh, the arithmetic on the rows in forward_rows.cuh, the way out
// of the results in forward_output.cuh.
#pragma once

#include "kernels/fa3_sm90/config.h"
#include "kernels/fa3_sm90/forward_mask.cuh"
#include "kernels/fa3_sm90/forward_output.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace jaxflash::fa3_sm90 {

template <class Config>
class Consumer : protected ConsumerTile<Config> {
 protected:
  using Base = ConsumerTile<Config>;
  using Base::clear_padding, Base::group_sync, Base::kv_begin, Base::lane_row, Base::query_begin,
      Base::stage_output;
  using Base::consumer_idx_, Base::thread_idx_, Base::warp_idx_, Base::lane_idx_;
  using Base::params_, Base::shared_, Base::queries_, Base::row_begin_, Base::rows_;
  using Element = typename Config::Element;
  using Storage = typename Config::SharedStorage;
  using QueryTile = typename Config::QueryTile;
  using KeyTile = typename Config::KeyTile;
  using ValueTile = typename Config::ValueTile;
  using Tile = typename Config::Tile;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kBlockKV = Config::kBlockKV;

 public:
  __device__ __forceinline__ Consumer(const ForwardParams& params, float scale_log2,
                                      int consumer_idx, Storage* shared)
      : Base(params, consumer_idx, shared), scale_log2_(scale_log2) {}

  __device__ __forceinline__ void run() {
    if (consumer_idx_ == 0) give_turn(0);
#pragma unroll 1
    for (int t = 0;; ++t) {
      const int slot = t % Config::kNumTileSlots;
      ptx::mbarrier_wait(&shared_.tile_full[slot], t / Config::kNumTileSlots & 1);
      const Tile& tile = shared_.tiles[slot];
      if (tile.row_begin < 0) break;
      attend(tile, t);
      // The warp is done with tiles[slot].
      __syncwarp();
      if (lane_idx_ == 0) ptx::mbarrier_arrive(&shared_.tile_empty[slot]);
    }
  }

 protected:
  __device__ __forceinline__ void attend(const Tile& tile, int t) {
    const int buffer = t % Config::kNumQueryBuffers;
    queries_ = &shared_.q[buffer][consumer_idx_];
    row_begin_ = tile.row_begin + 64 * consumer_idx_;
    ptx::mbarrier_wait(&shared_.q_full[buffer][consumer_idx_], t / Config::kNumQueryBuffers & 1);
    if (query_begin(tile) + tile.see.query_len < params_.attention.T &&
        row_begin_ + 64 > tile.see.query_len) {
      clear_padding(&shared_.q[buffer][consumer_idx_], tile.see.query_len - row_begin_);
    }
    rows_.clear();
    if constexpr (Config::kIsGeneral) {
      attend_blocks_found(tile);
    } else {
      attend_blocks(tile);
    }
    stage_output(tile, &shared_.output_staged[buffer][consumer_idx_]);
  }

  // The blocks that the window lets the tile see.
  __device__ __forceinline__ void attend_blocks(const Tile& tile) {
    const int num_blocks = tile.block_end - tile.block_begin;
    if (num_blocks > 0) {
      first_block(tile, tile.block_end - 1);
      // Which steps take blocks that all rows see whole, after a block of which they all see a key.
      const int last_row = max(min(row_begin_ + 64, tile.see.query_len) - 1, row_begin_);
      const int plain_high = min(row_begin_ + tile.see.window_high, tile.see.kv_len) / kBlockKV;
      const int plain_low = (max(last_row + tile.see.window_low, 0) + kBlockKV - 1) / kBlockKV;
      const int plain_begin = device::clamp(tile.block_end - plain_high, 1, num_blocks);
      const int plain_end = max(min(tile.block_end - plain_low, num_blocks), plain_begin);
      int step = 1, masked_end = plain_begin;
#pragma unroll 1
      while (true) {
#pragma unroll 1
        for (; step < masked_end; ++step) next_block<true>(tile, tile.block_end - 1 - step);
#pragma unroll 1
        for (; step < plain_end; ++step) next_block<false>(tile, tile.block_end - 1 - step);
        if (step >= num_blocks) break;
        masked_end = num_blocks;
      }
      last_output();
    }
  }

  // The blocks that the scheduler has found. The loop without masks needs a reference in every row:
  // the first block that all rows see whole runs in the other one, which gives them that.
  __device__ __forceinline__ void attend_blocks_found(const Tile& tile) {
    if (!blocks_.next(&shared_, consumer_idx_)) return;
    bool has_references = blocks_.is_full();
    find_visible(tile);
    first_block(tile, blocks_.block());
    bool has_next = blocks_.next(&shared_, consumer_idx_);
#pragma unroll 1
    while (has_next) {
#pragma unroll 1
      while (has_next && !(has_references && blocks_.is_full())) {
        has_references |= blocks_.is_full();
        find_visible(tile);
        next_block<true>(tile, blocks_.block());
        has_next = blocks_.next(&shared_, consumer_idx_);
      }
#pragma unroll 1
      while (has_next && blocks_.is_full()) {
        next_block<false>(tile, blocks_.block());
        has_next = blocks_.next(&shared_, consumer_idx_);
      }
    }
    last_output();
  }

  // --- Lines of the algorithm -------------------------------------------------------------------

  // A tile's first block: S and its softmax alone, with nothing to overlap.
  __device__ __forceinline__ void first_block(const Tile& tile, int block) {
    const int key = block * kBlockKV;
    ptx::mbarrier_wait(&shared_.k_full[k_.stage], k_.phase);
    issue_scores();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(rows_.scores);
    give_back(&shared_.k_empty[k_.stage]);
    k_.advance();
    cap();
    const device::Box box = {row_begin_, row_begin_ + 64, key, key + kBlockKV};
    if (Config::kIsGeneral || !device::is_inside_window<true>(tile.see, box)) hide(tile, key);
    rows_.take_exact_reference(scale_log2_);
    rows_.exponentiate(scale_log2_);
    rows_.finish_block();
    // Only the last block of all can hold keys that are padding.
    const int valid = tile.see.kv_len - key;
    if (valid < kBlockKV && kv_begin(tile) + tile.see.kv_len < params_.attention.S) {
      ptx::mbarrier_wait(&shared_.v_full[v_.stage], v_.phase);
      // Every consumer writes all the zeros: those of another may come late, but change nothing.
      clear_padding(&shared_.v[v_.stage], valid);
    }
    clear_negative_segments(tile, key);
  }

  // Scores of one block together with the output of the block before it.
  template <bool kIsMasked>
  __device__ __forceinline__ void next_block(const Tile& tile, int block) {
    ptx::mbarrier_wait(&shared_.k_full[k_.stage], k_.phase);
    take_turn();
    issue_scores();
    ptx::mbarrier_wait(&shared_.v_full[v_.stage], v_.phase);
    issue_output();
    give_turn((consumer_idx_ + 1) % Config::kNumConsumers);
    ptx::wgmma_wait<Config::kOverlaps ? 1 : 0>();  // the scores
    ptx::wgmma_pin(rows_.scores);
    give_back(&shared_.k_empty[k_.stage]);
    k_.advance();
    cap();
    if constexpr (kIsMasked) {
      hide(tile, block * kBlockKV);
      rows_.take_exact_reference(scale_log2_);
    }
    rows_.exponentiate(scale_log2_);
    if constexpr (Config::kHoldsWait) {
      ptx::wgmma_hold(rows_.block_sum[0], rows_.block_sum[1], ptx::shared_address(&shared_));
    }
    ptx::wgmma_wait<0>();  // the output; the registers of P may be rewritten only now
    ptx::wgmma_pin(rows_.output);
    ptx::wgmma_pin(rows_.probabilities);
    give_back(&shared_.v_empty[v_.stage]);
    v_.advance();
    if constexpr (kIsMasked) {
      rows_.rescale_output();
      rows_.finish_block();
      clear_negative_segments(tile, block * kBlockKV);
    } else {
      const bool has_overflown = rows_.settle();
      rows_.finish_block();
      if (has_overflown) {
        recompute_scores(tile, block * kBlockKV);
        rows_.redo(scale_log2_);
      }
    }
  }

  __device__ __forceinline__ void last_output() {
    ptx::mbarrier_wait(&shared_.v_full[v_.stage], v_.phase);
    issue_output();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(rows_.output);
    ptx::wgmma_pin(rows_.probabilities);
    give_back(&shared_.v_empty[v_.stage]);
    v_.advance();
  }

  // S = Q K^T
  __device__ __forceinline__ void issue_scores() {
    using Operands = mma::TileOperands<false, false>;
    const uint32_t q = queries_->k_major();
    const uint32_t k = shared_.k[k_.stage].k_major();
    ptx::wgmma_pin(rows_.scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      ptx::wgmma_ss<Element, Operands>(rows_.scores, q + QueryTile::k_major_step(i),
                                       k + KeyTile::k_major_step(i), i > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_pin(rows_.scores);
  }

  // O += P V
  __device__ __forceinline__ void issue_output() {
    using Operands = mma::TileOperands<false, true>;
    const uint32_t v = shared_.v[v_.stage].mn_major();
    ptx::wgmma_pin(rows_.probabilities);
    ptx::wgmma_pin(rows_.output);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockKV / 16; ++i) {
      ptx::wgmma_rs<Element, Operands>(rows_.output, rows_.probabilities[i],
                                       v + ValueTile::mn_major_step(i), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_pin(rows_.output);
    ptx::wgmma_pin(rows_.probabilities);
  }

  // General: which scores of the block just moved to are visible.
  __device__ __forceinline__ void find_visible(const Tile& tile) {
    visible_[0] = visible_[1] = 0xFFFFFFFF;
    if (blocks_.is_full()) return;
    fa3_sm90::find_visible<kBlockKV>(tile.see, lane_row(), blocks_.block() * kBlockKV, lane_idx_,
                                     visible_);
  }

  __device__ __forceinline__ void hide(const Tile& tile, int key) {
    if constexpr (Config::kIsGeneral) {
      rows_.hide(visible_);
    } else {
      rows_.hide(tile.see, lane_row(), key, lane_idx_);
    }
  }

  __device__ __forceinline__ bool has_soft_cap() const {
    return Config::kIsGeneral && params_.attention.logits_soft_cap > 0.0f;
  }
  __device__ __forceinline__ void cap() {
    if constexpr (!Config::kIsGeneral) return;
    if (has_soft_cap()) {
      rows_.cap(params_.attention.softmax_scale / params_.attention.logits_soft_cap);
    }
  }

  // The scores of a block that all rows see whole.
  __device__ __forceinline__ void recompute_scores(const Tile& tile, int key) {
    const AttentionParams& attention = params_.attention;
    const int64_t row = tile.batch * attention.S + kv_begin(tile) + key;
    const Element* keys =
        static_cast<const Element*>(attention.k) + (row * attention.K + tile.kv_head) * attention.H;
    rows_.recompute_scores(*queries_, warp_idx_, lane_idx_, keys, attention.K * attention.H,
                           static_cast<int>(attention.H));
    cap();
  }

  // --- Synchronisation --------------------------------------------------------------------------

  __device__ __forceinline__ void take_turn() const {
    if constexpr (!Config::kTakesTurns) return;
    ptx::named_barrier_sync(static_cast<int>(NamedBarrier::kTurn) + consumer_idx_, 256);
  }
  __device__ __forceinline__ void give_turn(int consumer) const {
    if constexpr (!Config::kTakesTurns) return;
    ptx::named_barrier_arrive(static_cast<int>(NamedBarrier::kTurn) + consumer, 256);
  }

  // One arrival for the warpgroup.
  __device__ __forceinline__ void give_back(uint64_t* empty) const {
    if (thread_idx_ == 0) ptx::mbarrier_arrive(empty);
  }

  // Zeroes the values of keys in negative segments, as clear_padding does.
  __device__ __forceinline__ void clear_negative_segments(const Tile& tile, int key) {
    if constexpr (Config::kIsGeneral) {
      if (!blocks_.has_padding()) return;
      ptx::mbarrier_wait(&shared_.v_full[v_.stage], v_.phase);
      const int row = thread_idx_;  // of the block
      static_assert(kBlockKV <= 128, "a row a thread");
      if (row < kBlockKV && key + row < tile.see.kv_len && tile.see.kv_ids[key + row] < 0) {
#pragma unroll
        for (int chunk = 0; chunk < ValueTile::kNumColumns / 8; ++chunk) {
          *shared_.v[v_.stage].chunk_at(row, chunk) = {0, 0, 0, 0};
        }
      }
      ptx::fence_async_proxy();
      group_sync();  // as above
    }
  }

  const float scale_log2_;
  Ring<Config::kNumStages> k_, v_;
  BlockReader<Config, 32> blocks_;  // general: of the tile, and what this lane's rows see of it
  uint32_t visible_[2];
};

}  // namespace jaxflash::fa3_sm90
