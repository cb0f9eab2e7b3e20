// A consumer warpgroup of the backward: 64 keys, all products, dK and dV in registers.
#pragma once

#include "kernels/fa3_sm90/backward_producer.cuh"
#include "kernels/fa3_sm90/backward_scores.cuh"
#include "ptx/named_barrier.cuh"

namespace jaxflash::fa3_sm90 {

// Zeroes rows of a tile of shared memory outside [begin, end), from all threads of both consumers.
template <class Config, class Tile>
__device__ __forceinline__ void clear_rows_outside(int begin, int end, Tile& tile) {
  constexpr int kChunks = Tile::kNumRows * 8;
  for (int i = threadIdx.x - 128; i < kChunks; i += 128 * Config::kConsumers) {
    if (i / 8 >= begin && i / 8 < end) continue;
#pragma unroll
    for (int slab = 0; slab < Tile::kNumSlabs; ++slab) {
      reinterpret_cast<uint4*>(tile.slabs[slab])[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

template <class Config>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const BackwardParams& params,
                                      const BackwardWorkspace& workspace,
                                      typename Config::SharedStorage& shared)
      : params_(params),
        workspace_(workspace),
        shared_(shared),
        c_(__shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0) - 1),
        thread_idx_(threadIdx.x % 128),
        lane_idx_(threadIdx.x % 32),
        warp_idx_(threadIdx.x / 32 % 4),
        dscores_address_(dscores_address<Config>(shared.dscores[0], c_, warp_idx_, lane_idx_)) {}

  __device__ __forceinline__ void run(const BackwardMaps& maps) {
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) dk_[i] = dv_[i] = 0.0f;
    if (shared_.block.first_head < shared_.block.end_head) wait_for_keys();
#pragma unroll 1
    for (int head = shared_.block.first_head; head < shared_.block.end_head; ++head) {
      run_head(head);
    }
    store(maps);
  }

 private:
  using Element = typename Config::Element;
  static constexpr int kWriterThreads = 128 + 32;

  // A copy of the step for each kind: as a condition inside one, the compiler turns the mask into
  // selects that every step pays for.
  __device__ __forceinline__ void run_head(int head) {
    const bool is_extreme = has_extreme_row(head);
    int tile = shared_.block.first_tile;
    while (tile < shared_.block.end_tile) {
      int end = shared_.block.end_tile;
      if (is_extreme) {
#pragma unroll 1
        for (; tile < end; ++tile) step<StepKind::kExtreme>(head, tile);
        return;
      }
      const bool is_plain = tile >= shared_.block.first_plain && tile < shared_.block.end_plain;
      if (is_plain) {
        end = min(end, shared_.block.end_plain);
#pragma unroll 1
        for (; tile < end; ++tile) step<StepKind::kPlain>(head, tile);
      } else {
        if (tile < shared_.block.first_plain) end = min(end, shared_.block.first_plain);
#pragma unroll 1
        for (; tile < end; ++tile) step<StepKind::kMasked>(head, tile);
      }
    }
  }

  // K and V have arrived; keys of padding, NaN included, count as zeros.
  __device__ __forceinline__ void wait_for_keys() {
    ptx::mbarrier_wait(&shared_.k_full, 0);
    ptx::mbarrier_wait(&shared_.v_full, 0);
    const int num_keys = shared_.block.see.kv_len - shared_.block.first_key;
    if (num_keys >= Config::kBlockKV) return;
    clear_rows_outside<Config>(0, num_keys, shared_.k);
    clear_rows_outside<Config>(0, num_keys, shared_.v);
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierConsumers, 128 * Config::kConsumers);
  }

  // The same answer in every warp.
  __device__ __forceinline__ bool has_extreme_row(int head) const {
    const int* is_extreme = workspace_.is_extreme +
                            workspace_.index_of(params_.attention.N, shared_.block.batch, head, 0);
    int found = 0;
    for (int tile = shared_.block.first_tile + lane_idx_; tile < shared_.block.end_tile;
         tile += 32) {
      found |= is_extreme[tile];
    }
    return __any_sync(0xFFFFFFFF, found != 0);
  }

  // Gives a stage back to the loader.
  __device__ __forceinline__ void release(uint64_t* empty) const {
    if (thread_idx_ == 0) ptx::mbarrier_arrive(empty);
  }

  // Low word of the left operand that picks one statistic: its core, and no others.
  __device__ __forceinline__ uint32_t selector(int row) const {
    constexpr int kRowBytes = sizeof(shared_.selectors[0]);
    return mma::descriptor_low(ptx::shared_address(shared_.selectors[row]),
                               (kSelectNothing - row) * kRowBytes);
  }

  // Rows of padding, NaN included, count as zeros in every product.
  __device__ __forceinline__ void clear_hidden_rows(int tile) {
    if (!shared_.block.has_hidden_rows(tile, static_cast<int>(params_.attention.T))) return;
    const int row = tile * Config::kBlockQ, begin = shared_.block.first_row - row;
    ptx::mbarrier_wait(&shared_.dout_full[ring_.stage], ring_.phase);
    clear_rows_outside<Config>(begin, shared_.block.end_row - row, shared_.q[ring_.stage]);
    clear_rows_outside<Config>(begin, shared_.block.end_row - row, shared_.dout[ring_.stage]);
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierConsumers, 128 * Config::kConsumers);
  }

  // Lines 10 to 16 of Algorithm 2.
  template <StepKind kKind>
  __device__ __forceinline__ void step(int head, int tile) {
    constexpr bool kIsExtreme = kKind == StepKind::kExtreme;
    const int stage = ring_.stage;
    const auto& q = shared_.q[stage];
    const auto& dout = shared_.dout[stage];
    const StatisticColumns* statistics = shared_.statistics[stage];
    const RowStatistics* rows =
        workspace_.rows +
        workspace_.index_of(params_.attention.N, shared_.block.batch, head, tile) *
            Config::kBlockQ +
        2 * (lane_idx_ % 4);
    ScoreFragment<Config> p, ds;
    LeftOperand<Config> p_left, ds_left;

    ptx::mbarrier_wait(&shared_.q_full[stage], ring_.phase);
    if constexpr (kKind != StepKind::kPlain) clear_hidden_rows(tile);
    issue_scores<Config, !kIsExtreme>(shared_.k, c_, q, selector(kSelectLse), statistics, p);
    ptx::mbarrier_wait(&shared_.dout_full[stage], ring_.phase);
    issue_scores<Config, !kIsExtreme>(shared_.v, c_, dout, selector(kSelectDelta), statistics, ds);
    ptx::wgmma_wait<1>();  // S
    ptx::wgmma_pin(p);
    const float scale = params_.attention.softmax_scale;
    if constexpr (kIsExtreme) {
      exponentiate_extreme<Config>(scale, rows, p);
    } else {
      exponentiate<Config>(scale * device::kLog2E, p);
    }
    if constexpr (kKind != StepKind::kPlain) {
      hide<Config>(shared_.block.see,
                   shared_.block.first_key + 64 * c_ + 16 * warp_idx_ + lane_idx_ / 4,
                   tile * Config::kBlockQ + 2 * (lane_idx_ % 4), p);
    }
    if constexpr (Config::kIssuesEarly) {
      round_to_operand<Config>(p, p_left);
      issue_gradient<Config>(p_left, dout, dv_);
      ptx::wgmma_wait<1>();  // dP
    } else {
      keep_before_wait<Config>(p, dscores_address_);
      ptx::wgmma_wait<0>();  // dP
    }
    ptx::wgmma_pin(ds);
    if constexpr (kIsExtreme) {
      multiply_extreme<Config>(p, rows, ds);
    } else {
      multiply<Config>(p, ds);
    }
    if constexpr (!Config::kIssuesEarly) round_to_operand<Config>(p, p_left);
    round_to_operand<Config>(ds, ds_left);
    store_dscores<Config>(ds_left, dscores_address_ + stage * sizeof(shared_.dscores[0]));
    if constexpr (!Config::kIssuesEarly) issue_gradient<Config>(p_left, dout, dv_);
    ptx::fence_async_proxy();
    // dS of all keys is written. The one of kStages steps before, in the same place, has been
    // read: its product was waited for before the barrier of the last step.
    ptx::named_barrier_sync(kBarrierConsumers, 128 * Config::kConsumers);
    QueryFragment<Config> dq;
    issue_dq<Config>(shared_.k, c_, shared_.dscores[stage], dq);
    ptx::wgmma_wait<1>();  // dV
    ptx::wgmma_pin(dv_);
    ptx::wgmma_pin(p_left);
    release(&shared_.dout_empty[stage]);
    issue_gradient<Config>(ds_left, q, dk_);
    ptx::wgmma_wait<1>();  // dQ
    ptx::wgmma_pin(dq);
    store_dq(dq);
    ptx::wgmma_wait<0>();  // dK
    ptx::wgmma_pin(dk_);
    ptx::wgmma_pin(ds_left);
    release(&shared_.q_empty[stage]);
    ring_.next();
  }

  // Hands dQ over to the writer.
  __device__ __forceinline__ void store_dq(const QueryFragment<Config>& dq) {
    ptx::named_barrier_sync(kBarrierTaken + c_, kWriterThreads);
    float4* destination = reinterpret_cast<float4*>(shared_.dq[c_]);
#pragma unroll
    for (int j = 0; j < Config::kColumnsDQ / 8; ++j) {
      destination[j * 128 + thread_idx_] =
          make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_arrive(kBarrierFormed + c_, kWriterThreads);
  }

  // Line 19. Rows of padding have sums of exactly zero.
  __device__ __forceinline__ void store(const BackwardMaps& maps) {
    ptx::named_barrier_sync(kBarrierTaken + c_, kWriterThreads);  // the writer's last arrival
    ptx::named_barrier_sync(kBarrierConsumers, 128 * Config::kConsumers);
    stage_gradient(dv_, 1.0f, shared_.v);
    stage_gradient(dk_, params_.attention.softmax_scale, shared_.k);
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierStaged + c_, 128);
    if (thread_idx_ != 0) return;
    constexpr int kRowElements = 64;
    const int row = shared_.block.first_key + 64 * c_;
#pragma unroll
    for (int slab = 0; slab < Config::kSlabs; ++slab) {
      ptx::tma_store(&maps.dv, shared_.v.slabs[slab] + 64 * c_ * kRowElements, 64 * slab, row,
                     shared_.block.kv_head, shared_.block.batch);
      ptx::tma_store(&maps.dk, shared_.k.slabs[slab] + 64 * c_ * kRowElements, 64 * slab, row,
                     shared_.block.kv_head, shared_.block.batch);
    }
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }

  // This warp's 16 keys, rounded.
  __device__ __forceinline__ void stage_gradient(const GradientFragment<Config>& gradient,
                                                 float factor,
                                                 const typename Config::TileKV& tile) const {
#pragma unroll
    for (int j = 0; j < Config::kHeadDim / 8; j += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] = ptx::pack<Element>(gradient[4 * j + 2 * i] * factor,
                                      gradient[4 * j + 2 * i + 1] * factor);
      }
      ptx::stmatrix_x4(
          tile.chunk_address(64 * c_ + 16 * warp_idx_ + lane_idx_ % 16, j + lane_idx_ / 16),
          pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }

  const BackwardParams& params_;
  const BackwardWorkspace& workspace_;
  typename Config::SharedStorage& shared_;
  const int c_, thread_idx_, lane_idx_, warp_idx_;
  const uint32_t dscores_address_;
  Ring<Config::kStages> ring_;
  GradientFragment<Config> dk_, dv_;
};

}  // namespace jaxflash::fa3_sm90
