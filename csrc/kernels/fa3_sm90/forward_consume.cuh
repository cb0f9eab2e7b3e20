// A consumer warpgroup of the FlashAttention-3 forward: 64 query rows of every tile. The schedule
// and the barriers are in forward.cuh, the arithmetic on the rows in forward_rows.cuh.
#pragma once

#include "device/row_result.cuh"
#include "kernels/fa3_sm90/config.h"
#include "kernels/fa3_sm90/forward_produce.cuh"
#include "kernels/fa3_sm90/forward_rows.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace jaxflash::fa3_sm90 {

template <class Config>
class Consumer {
  using Element = typename Config::Element;
  using Storage = typename Config::SharedStorage;
  using QueryTile = typename Config::QueryTile;
  using KVTile = typename Config::KVTile;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kBlockKV = Config::kBlockKV;

 public:
  __device__ __forceinline__ Consumer(const ForwardParams& params, const ForwardMaps& maps,
                                      int consumer_idx, Storage* shared)
      : params_(params),
        maps_(maps),
        shared_(*shared),
        consumer_idx_(consumer_idx),
        thread_idx_(threadIdx.x % 128),
        warp_idx_(threadIdx.x % 128 / 32),
        lane_idx_(threadIdx.x % 32),
        scale_log2_(params.attention.softmax_scale * device::kLog2E) {}

  __device__ __forceinline__ void run() {
    if (consumer_idx_ == 0) give_turn(0);
#pragma unroll 1
    for (int t = 0;; ++t) {
      const int slot = t % Config::kNumTileSlots;
      ptx::mbarrier_wait(&shared_.tile_full[slot], t / Config::kNumTileSlots & 1);
      const WorkTile& tile = shared_.tiles[slot];
      if (tile.row_begin < 0) break;
      attend(tile, t);
      // The warp is done with tiles[slot].
      __syncwarp();
      if (lane_idx_ == 0) ptx::mbarrier_arrive_cluster(&shared_.tile_empty[slot], 0);
    }
    if (thread_idx_ == 0) ptx::bulk_wait<0>();
  }

 private:
  __device__ __forceinline__ void attend(const WorkTile& tile, int t) {
    const int buffer = t % 2;
    queries_ = &shared_.q[buffer][consumer_idx_];
    row_begin_ = tile.row_begin + 64 * consumer_idx_;
    if constexpr (Config::kCluster > 1) row_begin_ += ptx::cluster_rank() * Config::kBlockQ;
    const int num_blocks = tile.block_end - tile.block_begin;
    ptx::mbarrier_wait(&shared_.q_full[buffer][consumer_idx_], t / 2 & 1);
    if (tile.see.query_len < params_.attention.T && row_begin_ + 64 > tile.see.query_len) {
      clear_padding(&shared_.q[buffer][consumer_idx_], tile.see.query_len - row_begin_);
    }
    rows_.clear();
    if (num_blocks > 0) {
      first_block(tile);
      give_back_previous(t);
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
    } else {
      give_back_previous(t);
    }
    store_output(tile);
  }

  // --- Lines of the algorithm -------------------------------------------------------------------

  // A tile's first block: S and its softmax alone, with nothing to overlap.
  __device__ __forceinline__ void first_block(const WorkTile& tile) {
    const int key = (tile.block_end - 1) * kBlockKV;
    ptx::mbarrier_wait(&shared_.k_full[k_.stage], k_.phase);
    issue_scores();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(rows_.scores);
    give_back(&shared_.k_empty[k_.stage]);
    k_.advance();
    const device::Box box = {row_begin_, row_begin_ + 64, key, key + kBlockKV};
    if (!device::is_inside_window<true>(tile.see, box)) hide(tile, key);
    rows_.take_exact_reference(scale_log2_);
    rows_.exponentiate(scale_log2_);
    rows_.finish_block();
    // Only the last block of all can hold keys that are padding.
    const int valid = tile.see.kv_len - key;
    if (valid < kBlockKV && tile.see.kv_len < params_.attention.S) {
      ptx::mbarrier_wait(&shared_.v_full[v_.stage], v_.phase);
      // Every consumer writes all the zeros: those of another may come late, but change nothing.
      clear_padding(&shared_.v[v_.stage], valid);
    }
  }

  // Scores of one block together with the output of the block before it.
  template <bool kIsMasked>
  __device__ __forceinline__ void next_block(const WorkTile& tile, int block) {
    ptx::mbarrier_wait(&shared_.k_full[k_.stage], k_.phase);
    take_turn();
    issue_scores();
    ptx::mbarrier_wait(&shared_.v_full[v_.stage], v_.phase);
    issue_output();
    give_turn((consumer_idx_ + 1) % Config::kNumConsumers);
    ptx::wgmma_wait<1>();  // the scores
    ptx::wgmma_pin(rows_.scores);
    give_back(&shared_.k_empty[k_.stage]);
    k_.advance();
    if constexpr (kIsMasked) {
      hide(tile, block * kBlockKV);
      rows_.take_exact_reference(scale_log2_);
    }
    rows_.exponentiate(scale_log2_);
    ptx::wgmma_hold(rows_.block_sum[0], rows_.block_sum[1], ptx::shared_address(&shared_));
    ptx::wgmma_wait<0>();  // the output; the registers of P may be rewritten only now
    ptx::wgmma_pin(rows_.output);
    ptx::wgmma_pin(rows_.probabilities);
    give_back(&shared_.v_empty[v_.stage]);
    v_.advance();
    if constexpr (kIsMasked) {
      rows_.rescale_output();
      rows_.finish_block();
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
                                       k + KVTile::k_major_step(i), i > 0);
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
                                       v + KVTile::mn_major_step(i), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_pin(rows_.output);
    ptx::wgmma_pin(rows_.probabilities);
  }

  __device__ __forceinline__ void hide(const WorkTile& tile, int key) {
    rows_.hide(tile.see, row_begin_ + 16 * warp_idx_ + lane_idx_ / 4, key, lane_idx_);
  }

  __device__ __forceinline__ void recompute_scores(const WorkTile& tile, int key) {
    const AttentionParams& attention = params_.attention;
    const int64_t row = tile.batch * attention.S + key;
    const Element* keys =
        static_cast<const Element*>(attention.k) + (row * attention.K + tile.kv_head) * attention.H;
    rows_.recompute_scores(*queries_, warp_idx_, lane_idx_, keys, attention.K * attention.H,
                           static_cast<int>(attention.H));
  }

  // O / l through the tile's own query rows to global memory; lse.
  __device__ __forceinline__ void store_output(const WorkTile& tile) {
    const AttentionParams& attention = params_.attention;
    const float* sinks = device::batch_data<float>(params_.sinks, attention, tile.batch);
    const float sink = sinks == nullptr ? -kInfinity : sinks[tile.head * params_.sinks.head_stride];
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_begin_ + 16 * warp_idx_ + lane_idx_ / 4 + 8 * r;
      device::RowResult result =
          device::finish_softmax(rows_.reference[r], quad_sum(rows_.row_sum[r]), sink, true);
      if (row >= tile.see.query_len) result = {-kInfinity, 0.0f, 0.0f};
      factor[r] = result.factor;
      if (lane_idx_ % 4 == 0 && row < attention.T) {
        const int64_t index = (tile.batch * attention.T + row) * attention.N + tile.head;
        params_.lse[index] = result.lse;
        params_.lse_low[index] = result.lse_low;
      }
    }
    group_sync();  // all four warps are done with the queries
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; j += 2) {  // 16 features at a time
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &rows_.output[4 * j + 2 * i];
        const bool is_zero = factor[i % 2] == 0.0f;  // whatever the accumulator holds
        pairs[i] = ptx::pack<Element>(is_zero ? 0.0f : pair[0] * factor[i % 2],
                                      is_zero ? 0.0f : pair[1] * factor[i % 2]);
      }
      ptx::stmatrix_x4(queries_->chunk_address(16 * warp_idx_ + lane_idx_ % 16, j + lane_idx_ / 16),
                       pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    ptx::fence_async_proxy();
    group_sync();  // the output is complete and TMA may read it
    if (thread_idx_ == 0) {
#pragma unroll
      for (int slab = 0; slab < QueryTile::kNumSlabs; ++slab) {
        ptx::tma_store(&maps_.out, queries_->slabs[slab], 64 * slab, row_begin_, tile.head,
                       tile.batch);
      }
      ptx::bulk_commit();
    }
  }

  // --- Synchronisation --------------------------------------------------------------------------

  __device__ __forceinline__ void group_sync() const {
    ptx::named_barrier_sync(static_cast<int>(NamedBarrier::kGroup) + consumer_idx_, 128);
  }
  __device__ __forceinline__ void take_turn() const {
    ptx::named_barrier_sync(static_cast<int>(NamedBarrier::kTurn) + consumer_idx_, 256);
  }
  __device__ __forceinline__ void give_turn(int consumer) const {
    ptx::named_barrier_arrive(static_cast<int>(NamedBarrier::kTurn) + consumer, 256);
  }

  // One arrival for the warpgroup on the barrier of every CTA that fills this stage.
  __device__ __forceinline__ void give_back(uint64_t* empty) const {
    if constexpr (Config::kCluster > 1) {
      if (thread_idx_ < Config::kCluster) ptx::mbarrier_arrive_cluster(empty, thread_idx_);
    } else {
      if (thread_idx_ == 0) ptx::mbarrier_arrive(empty);
    }
  }

  // The output of the tile before t has left its queries' place.
  __device__ __forceinline__ void give_back_previous(int t) const {
    if (t == 0 || thread_idx_ != 0) return;
    ptx::bulk_wait_read<0>();
    ptx::mbarrier_arrive(&shared_.q_empty[(t + 1) % 2][consumer_idx_]);
  }

  // Zeroes the rows from `first` on, which TMA has filled with padding: 0 * NaN would reach
  // results.
  template <class Tile>
  __device__ __forceinline__ void clear_padding(Tile* tile, int first) const {
    constexpr int kRowChunks = Tile::kNumColumns / 8;
    for (int i = max(first, 0) * kRowChunks + thread_idx_; i < Tile::kNumRows * kRowChunks;
         i += 128) {
      *tile->chunk_at(i / kRowChunks, i % kRowChunks) = {0, 0, 0, 0};
    }
    ptx::fence_async_proxy();
    group_sync();  // the zeros are complete before any warp's wgmma reads them
  }

  const ForwardParams& params_;
  const ForwardMaps& maps_;
  Storage& shared_;
  const int consumer_idx_, thread_idx_, warp_idx_, lane_idx_;
  const float scale_log2_;
  Ring<Config::kNumStages> k_, v_;
  const QueryTile* queries_;
  int row_begin_;  // of this warpgroup, inside the batch entry
  Rows<Config> rows_;
};

}  // namespace jaxflash::fa3_sm90
