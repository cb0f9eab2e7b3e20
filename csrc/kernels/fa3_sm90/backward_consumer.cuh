// A consumer warpgroup of the backward: 64 keys, all products, dK and dV in registers.
#pragma once

#include "kernels/fa3_sm90/backward_consumer_steps.cuh"

namespace jaxflash::fa3_sm90 {

template <class Config>
class Consumer : public StepConsumer<Config, Consumer<Config>> {
  using Base = StepConsumer<Config, Consumer<Config>>;
  friend Base;

 public:
  __device__ __forceinline__ Consumer(const BackwardParams& params,
                                      const BackwardWorkspace& workspace,
                                      typename Config::SharedStorage& shared)
      : Base(params, workspace, shared),
        dscores_address_(dscores_address(shared.dscores[0], c_, warp_idx_, lane_idx_)) {}

  __device__ __forceinline__ void run(const BackwardMaps& maps) {
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) dk_[i] = dv_[i] = 0.0f;
    this->run_steps();
    store(maps);
  }

 private:
  using Base::c_, Base::lane_idx_, Base::params_, Base::ring_, Base::shared_, Base::thread_idx_,
      Base::warp_idx_;
  using typename Base::Element;
  static constexpr int kWriterThreads = 128 + 32;

  template <class IsHidden>
  __device__ __forceinline__ void clear_keys(const IsHidden& is_hidden) {
    clear_rows<Config>(is_hidden, shared_.k);
    clear_rows<Config>(is_hidden, shared_.v);
  }

  __device__ __forceinline__ const Ring<Config::kStages>& dout_ring() const { return ring_; }

  // Gives a stage back to the loader.
  __device__ __forceinline__ void release(uint64_t* empty) const {
    if (thread_idx_ == 0) ptx::mbarrier_arrive(empty);
  }

  // Lines 10 to 16 of Algorithm 2.
  template <StepKind kKind>
  __device__ __forceinline__ void step(int head, int tile) {
    constexpr bool kIsExtreme = kKind == StepKind::kExtreme;
    constexpr bool kIssuesEarly = Config::kIssuesEarly && !kIsExtreme;
    // Else there is the window alone.
    constexpr bool kHasBits = Config::kIsGeneral && kKind != StepKind::kPlain;
    const int stage = ring_.stage;
    const auto& q = shared_.q[stage];
    const auto& dout = shared_.dout[stage];
    const StatisticColumns* statistics = shared_.statistics[stage];
    const RowStatistics* rows = this->rows_of(head, tile);
    const int first_key = shared_.block.first_key + 64 * c_ + 16 * warp_idx_ + lane_idx_ / 4;
    const int first_query = tile * Config::kBlockQ + 2 * (lane_idx_ % 4);
    ScoreFragment<Config> p, ds;
    LeftOperand<Config> p_left, ds_left;
    VisibleBits<Config> visible;

    if constexpr (!Config::kIsGeneral) ptx::mbarrier_wait(&shared_.q_full[stage], ring_.phase);
    if constexpr (Config::kIsGeneral || kKind != StepKind::kPlain) {
      this->clear_hidden_rows(tile, rows);
    }
    if constexpr (kHasBits) this->find_pairs(head, first_key, first_query, visible);
    issue_scores<Config, !kIsExtreme>(shared_.k, c_, q, this->selector(kSelectLse), statistics, p);
    ptx::mbarrier_wait(&shared_.dout_full[stage], ring_.phase);
    issue_scores<Config, !kIsExtreme>(shared_.v, c_, dout, this->selector(kSelectDelta), statistics,
                                      ds);
    if constexpr (kIsExtreme) {
      ptx::wgmma_wait<0>();  // S and dP
      ptx::wgmma_pin(p);
      ptx::wgmma_pin(ds);
      rows = this->extreme_rows(rows) + 2 * (lane_idx_ % 4);
      const float scale = params_.attention.softmax_scale;
      this->with_soft_cap([&](auto cap, const device::SoftCap& soft_cap) {
        form_extreme<Config, decltype(cap)::value>(scale, soft_cap, rows, p, ds);
      });
      if constexpr (!kHasBits) {
        const QueriesOfKeys queries(shared_.block.see, first_key, first_query);
        hide<Config>(queries, p);
        hide<Config>(queries, ds);
      } else if (!this->is_full()) {
        keep_visible<Config>(visible, p);
        keep_visible<Config>(visible, ds);
      }
    } else {
      ptx::wgmma_wait<1>();  // S
      ptx::wgmma_pin(p);
      exponentiate<Config>(params_.attention.softmax_scale * device::kLog2E, p);
      if constexpr (kHasBits) {
        keep_visible<Config>(visible, p);
      } else if constexpr (kKind == StepKind::kMasked) {
        hide<Config>(QueriesOfKeys(shared_.block.see, first_key, first_query), p);
      }
      if constexpr (kIssuesEarly) {
        round_to_operand<Config>(p, p_left);
        issue_gradient<Config>(p_left, dout, dv_);
        ptx::wgmma_wait<1>();  // dP
      } else {
        keep_before_wait<Config>(p, dscores_address_);
        ptx::wgmma_wait<0>();  // dP
      }
      ptx::wgmma_pin(ds);
      multiply<Config>(p, ds);
      if constexpr (kHasBits) keep_visible<Config>(visible, ds);
    }
    if constexpr (!kIssuesEarly) round_to_operand<Config>(p, p_left);
    round_to_operand<Config>(ds, ds_left);
    store_dscores<Config>(ds_left, dscores_address_ + stage * sizeof(shared_.dscores[0]));
    if constexpr (!kIssuesEarly) issue_gradient<Config>(p_left, dout, dv_);
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
    ring_.advance();
  }

  // Hands dQ over to the writer, and in a general instance the step's name.
  __device__ __forceinline__ void store_dq(const QueryFragment<Config>& dq) {
    ptx::named_barrier_sync(kBarrierTaken + c_, kWriterThreads);
    if constexpr (Config::kIsGeneral) {
      if (threadIdx.x == 128) shared_.block.formed = shared_.block.loaded[ring_.stage];
    }
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
    if constexpr (Config::kIsGeneral) {
      if (c_ == 0) {
        if (thread_idx_ == 0) shared_.block.formed.kind = StepKind::kNone;
        ptx::named_barrier_arrive(kBarrierFormed, kWriterThreads);
      }
    }
    ptx::named_barrier_sync(kBarrierConsumers, 128 * Config::kConsumers);
    stage_gradient(dv_, 1.0f, shared_.v);
    stage_gradient(dk_, params_.attention.softmax_scale, shared_.k);
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierStaged + c_, 128);
    if constexpr (Config::kIsGeneral) {
      // A copy of whole boxes would reach into the next sequence.
      const int num_rows = shared_.block.num_rows - 64 * c_;
      if (num_rows < 64) {
        this->store_rows(shared_.v, 64 * c_, 64 * c_, num_rows, params_.attention.Hv, params_.dv);
        this->store_rows(shared_.k, 64 * c_, 64 * c_, num_rows, params_.attention.H, params_.dk);
        return;
      }
    }
    if (thread_idx_ != 0) return;
    constexpr int kRowElements = 64;
    const int row = shared_.block.key_row() + 64 * c_;
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

  const uint32_t dscores_address_;
  GradientFragment<Config> dk_, dv_;
};

}  // namespace jaxflash::fa3_sm90
