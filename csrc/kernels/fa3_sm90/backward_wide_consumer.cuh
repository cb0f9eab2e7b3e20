// The consumer warpgroups of the backward for head dims above 128: a role each.
#pragma once

#include "kernels/fa3_sm90/backward_consumer_steps.cuh"
#include "kernels/fa3_sm90/backward_wide_config.h"
#include "ptx/reduce.cuh"

namespace jaxflash::fa3_sm90 {

// S - lse / softmax_scale -> 2^kProbabilityShift P.
template <class Config>
__device__ __forceinline__ void exponentiate_shifted(float scale_log2,
                                                     ScoreFragment<Config>& scores) {
  if constexpr (Config::kProbabilityShift == 0) {
    exponentiate<Config>(scale_log2, scores);
  } else {
#pragma unroll
    for (int i = 0; i < Config::kBlockQ / 2; ++i) {
      scores[i] = ptx::exp2_approx(fmaf(scores[i], scale_log2, Config::kProbabilityShift));
    }
  }
}

// dq += dS K over 64 keys: columns of a slab of K, from byte `offset` of its rows on.
template <class Config, class Tile, int kCount>
__device__ __forceinline__ void issue_wide_dq(const typename Config::TileDscores& dscores,
                                              const Tile& k, int slab, int offset, bool accumulates,
                                              float (&dq)[kCount]) {
  const uint32_t a = dscores.k_major();
  const uint32_t b = k.mn_major() + ((slab * Tile::kSlabBytes + offset) >> 4);
#pragma unroll
  for (int step = 0; step < Config::kKeys / 16; ++step) {
    ptx::wgmma_ss<typename Config::Element, mma::TileOperands<false, true>>(
        dq, a + Config::TileDscores::k_major_step(step), b + Tile::mn_major_step(step),
        accumulates || step > 0);
  }
}

template <class Config, Role kRole, bool kIsOrdered>
class WideConsumer : public StepConsumer<Config, WideConsumer<Config, kRole, kIsOrdered>> {
  using Base = StepConsumer<Config, WideConsumer<Config, kRole, kIsOrdered>>;
  friend Base;

 public:
  __device__ __forceinline__ WideConsumer(const BackwardParams& params,
                                          const BackwardWorkspace& workspace, bool is_reversed,
                                          typename Config::SharedStorage& shared)
      : Base(params, workspace, shared),
        is_reversed_(is_reversed),
        rank_(ptx::cluster_rank()),
        first_key_(shared.block.first_key + rank_ * Config::kKeys) {}

  __device__ __forceinline__ void run(const BackwardMaps& maps) {
#pragma unroll
    for (int i = 0; i < kFeatures / 2; ++i) gradient_[i] = 0.0f;
    if (!kIsValues) ptx::named_barrier_arrive(kBarrierRead, 256);
    this->run_steps();
    if constexpr (kIsValues) ptx::named_barrier_sync(kBarrierRead, 256);
    if (previous_tile_ >= 0) {
      QueryFragment dq;
      issue_previous_dq(dq);
      finish_previous_dq<0>(dq);
    }
    store(maps);
  }

 private:
  using Base::lane_idx_, Base::params_, Base::ring_, Base::shared_, Base::thread_idx_,
      Base::warp_idx_, Base::workspace_;
  using typename Base::Element;
  static constexpr bool kIsValues = kRole == Role::kValues;
  static constexpr int kFeatures = kIsValues ? Config::kHeadDimV : Config::kHeadDim;
  using Features = FeaturesDQ<Config, kRole>;
  using QueryFragment = float[Features::kCount / 2];  // queries x features

  // Of the keys of the pair; a CTA has its own and some features of its partner's.
  template <class IsHidden>
  __device__ __forceinline__ void clear_keys(const IsHidden& is_hidden) {
    const auto is_own_hidden = [&](int key) { return is_hidden(rank_ * Config::kKeys + key); };
    clear_rows<Config>(is_own_hidden, shared_.k);
    clear_rows<Config>(is_own_hidden, shared_.v);
    clear_rows<Config>([&](int key) { return is_hidden((rank_ ^ 1) * Config::kKeys + key); },
                       shared_.other_k);
  }

  __device__ __forceinline__ const Ring<Config::kStagesDout>& dout_ring() const {
    return dout_ring_;
  }

  // Gives a stage back to the loaders of both CTAs.
  __device__ __forceinline__ void release(uint64_t* empty) const {
    if (thread_idx_ < Config::kCluster) ptx::mbarrier_arrive_cluster(empty, thread_idx_);
  }

  template <StepKind kKind>
  __device__ __forceinline__ void step(int head, int tile) {
    if constexpr (!Config::kIsGeneral) {
      ptx::mbarrier_wait(&shared_.q_full[ring_.stage], ring_.phase);
    }
    if constexpr (Config::kIsGeneral || kKind != StepKind::kPlain) {
      this->clear_hidden_rows(tile, this->rows_of(head, tile));
    }
    if (previous_tile_ < 0) previous_index_ = this->index_of(head, tile);  // for zeros
    if constexpr (kIsValues) {
      step_of_values<kKind>(head, tile);
    } else {
      step_of_keys<kKind>(head, tile);
    }
    ring_.advance();
    dout_ring_.advance();
  }

  // Lines 10, 11 and 12 of Algorithm 2, and line 15 of the step before.
  template <StepKind kKind>
  __device__ __forceinline__ void step_of_values(int head, int tile) {
    constexpr bool kIsExtreme = kKind == StepKind::kExtreme;
    const int stage = ring_.stage;
    const auto& dout = shared_.dout[dout_ring_.stage];
    constexpr bool kHasBits = kIsExtreme || (kKind == StepKind::kMasked && Config::kIsGeneral);
    const int first_key = first_key_ + 16 * warp_idx_ + lane_idx_ / 4;
    const int first_query = tile * Config::kBlockQ + 2 * (lane_idx_ % 4);
    ScoreFragment<Config> p;
    LeftOperand<Config> p_left, p_keys;  // for dV; for dS, with the soft cap's slope
    QueryFragment dq;
    VisibleBits<Config> visible;
    if constexpr (kHasBits) this->find_pairs(head, first_key, first_query, visible);
    issue_scores<Config, !kIsExtreme>(shared_.k, 0, shared_.q[stage], this->selector(kSelectLse),
                                      shared_.statistics[stage], p);
    issue_previous_dq(dq);
    ptx::wgmma_wait<1>();  // S
    ptx::wgmma_pin(p);
    release(&shared_.q_empty[stage]);
    if constexpr (kIsExtreme) {
      form_probabilities(this->extreme_rows(this->rows_of(head, tile)), visible, p, p_left, p_keys);
    } else {
      exponentiate_shifted<Config>(params_.attention.softmax_scale * device::kLog2E, p);
      if constexpr (kHasBits) {
        keep_visible<Config>(visible, p);
      } else if constexpr (kKind == StepKind::kMasked) {
        hide<Config>(QueriesOfKeys(shared_.block.see, first_key, first_query), p);
      }
      round_to_operand<Config>(p, p_left);
    }
    const LeftOperand<Config>& handed = kIsExtreme && Config::kIsGeneral ? p_keys : p_left;
    ptx::named_barrier_sync(kBarrierRead, 256);
#pragma unroll
    for (int i = 0; i < Config::kBlockQ / 16; ++i) {
      shared_.probabilities[i][thread_idx_] =
          make_uint4(handed[i][0], handed[i][1], handed[i][2], handed[i][3]);
    }
    ptx::named_barrier_arrive(kBarrierProbability, 256);
    ptx::mbarrier_wait(&shared_.dout_full[dout_ring_.stage], dout_ring_.phase);
    issue_gradient<Config>(p_left, dout, gradient_);
    finish_previous_dq<1>(dq);
    ptx::wgmma_wait<0>();  // dV
    ptx::wgmma_pin(gradient_);
    ptx::wgmma_pin(p_left);
    release(&shared_.dout_empty[dout_ring_.stage]);
    remember(head, tile);
  }

  // P of an extreme step, 2^kProbabilityShift times, alone and with the soft cap's slope. Packed at
  // once: there are no registers for both in float32.
  __device__ __forceinline__ void form_probabilities(const RowStatistics* rows,
                                                     const VisibleBits<Config>& visible,
                                                     const ScoreFragment<Config>& scores,
                                                     LeftOperand<Config>& alone,
                                                     LeftOperand<Config>& sloped) const {
    const float scale = params_.attention.softmax_scale;
    constexpr float kFactor = 1 << Config::kProbabilityShift;
    rows += 2 * (lane_idx_ % 4);
    this->with_soft_cap([&](auto cap, const device::SoftCap& soft_cap) {
#pragma unroll
      for (int i = 0; i < Config::kBlockQ / 2; i += 2) {
        float p[2], with_slope[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const CappedProbability pair = capped_probability<decltype(cap)::value>(
              scale, soft_cap, rows[i / 4 * 8 + e], scores[i + e]);
          p[e] = (visible[0] >> (i + e) & 1) != 0 ? pair.p * kFactor : 0.0f;
          with_slope[e] = p[e] == 0.0f ? 0.0f : p[e] * pair.slope;
        }
        alone[i / 8][i / 2 % 4] = ptx::pack<Element>(p[0], p[1]);
        if constexpr (Config::kIsGeneral) {
          sloped[i / 8][i / 2 % 4] = ptx::pack<Element>(with_slope[0], with_slope[1]);
        }
      }
    });
  }

  // Lines 13 to 16, line 15 of the step before.
  template <StepKind kKind>
  __device__ __forceinline__ void step_of_keys(int head, int tile) {
    constexpr bool kIsExtreme = kKind == StepKind::kExtreme;
    const int stage = ring_.stage;
    ScoreFragment<Config> ds;
    LeftOperand<Config> ds_left;
    QueryFragment dq;
    ptx::mbarrier_wait(&shared_.dout_full[dout_ring_.stage], dout_ring_.phase);
    issue_scores<Config, !kIsExtreme>(shared_.v, 0, shared_.dout[dout_ring_.stage],
                                      this->selector(kSelectDelta), shared_.statistics[stage], ds);
    issue_previous_dq(dq);
    ptx::wgmma_wait<1>();  // dP
    ptx::wgmma_pin(ds);
    release(&shared_.dout_empty[dout_ring_.stage]);
    ptx::named_barrier_sync(kBarrierProbability, 256);
    if constexpr (kIsExtreme) {
      subtract_delta(this->extreme_rows(this->rows_of(head, tile)) + 2 * (lane_idx_ % 4), ds);
    }
    multiply_probabilities<kKind != StepKind::kPlain && Config::kIsGeneral>(ds);
    ptx::named_barrier_arrive(kBarrierRead, 256);
    round_to_operand<Config>(ds, ds_left);
    // The partner has read what lay here two steps ago, so the copy to it is over as well.
    ptx::mbarrier_wait(&shared_.other_empty[stage], ring_.phase ^ 1);
    store_dscores<Config>(ds_left,
                          dscores_address(shared_.dscores[stage], 0, warp_idx_, lane_idx_));
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierStored, 128);
    if (thread_idx_ == 0) send_dscores(stage);
    issue_gradient<Config>(ds_left, shared_.q[stage], gradient_);
    finish_previous_dq<1>(dq);
    ptx::wgmma_wait<0>();  // dK
    ptx::wgmma_pin(gradient_);
    ptx::wgmma_pin(ds_left);
    release(&shared_.q_empty[stage]);
    remember(head, tile);
  }

  // One thread: dS of this step to the values and to the partner, and room for the partner's.
  __device__ __forceinline__ void send_dscores(int parity) {
    constexpr int kBytes = Config::TileDscores::kBytes;
    ptx::mbarrier_arrive(&shared_.dscores_full[parity]);
    ptx::mbarrier_arrive_expect(&shared_.other_full[parity], kBytes);
    ptx::bulk_copy_to_cta(&shared_.other_dscores[parity], &shared_.dscores[parity], kBytes,
                          &shared_.other_full[parity], rank_ ^ 1);
  }

  // dQ of the step before, whose dS has the other parity, over the keys of both CTAs. Before the
  // first step there lie zeros: a branch between products would cost more than to add them.
  __device__ __forceinline__ void issue_previous_dq(QueryFragment& dq) {
    const int parity = ring_.stage ^ 1;
    const uint32_t phase = ring_.stage == 0 ? ring_.phase ^ 1 : ring_.phase;
    const int slab = Features::slab(rank_), offset = 2 * (Features::first(rank_) - 64 * slab);
    if constexpr (kIsValues) ptx::mbarrier_wait(&shared_.dscores_full[parity], phase);
    ptx::mbarrier_wait(&shared_.other_full[parity], phase);
    ptx::wgmma_pin(dq);
    ptx::wgmma_fence();
    issue_wide_dq<Config>(shared_.dscores[parity], shared_.k, slab, offset, false, dq);
    issue_wide_dq<Config>(shared_.other_dscores[parity], shared_.other_k,
                          slab - Features::first_slab(rank_), offset, true, dq);
    ptx::wgmma_commit();
    ptx::wgmma_pin(dq);
  }

  // The same product is done but for kPending others, and added to the workspace.
  template <int kPending>
  __device__ __forceinline__ void finish_previous_dq(QueryFragment& dq) {
    ptx::wgmma_wait<kIsOrdered ? 0 : kPending>();
    ptx::wgmma_pin(dq);
    const bool is_real = previous_tile_ >= 0;
    if (thread_idx_ == 0 && is_real) {
      ptx::mbarrier_arrive_cluster(&shared_.other_empty[ring_.stage ^ 1], rank_ ^ 1);
    }
    add_dq(dq);
  }

  __device__ __forceinline__ void remember(int head, int tile) {
    previous_index_ = this->index_of(head, tile);
    previous_head_ = head;
    previous_tile_ = tile;
  }

  __device__ __forceinline__ static void subtract_delta(const RowStatistics* rows,
                                                        ScoreFragment<Config>& gradient) {
#pragma unroll
    for (int i = 0; i < Config::kBlockQ / 2; ++i) gradient[i] -= rows[i / 4 * 8 + i % 2].delta;
  }

  // gradient: dP - delta -> dS, with the P that the values handed over. kHasHidden: where P is 0 dS
  // is 0, whatever was there.
  template <bool kHasHidden>
  __device__ __forceinline__ void multiply_probabilities(ScoreFragment<Config>& gradient) const {
    constexpr float kFactor = 1.0f / (1 << Config::kProbabilityShift);
#pragma unroll
    for (int step = 0; step < Config::kBlockQ / 16; ++step) {
      const uint4 words = shared_.probabilities[step][thread_idx_];
      const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = ptx::unpack<Element>(pairs[i]);
        float* two = gradient + 8 * step + 2 * i;
        two[0] *= kFactor * pair.x;
        two[1] *= kFactor * pair.y;
        if (kHasHidden && pair.x == 0.0f) two[0] = 0.0f;
        if (kHasHidden && pair.y == 0.0f) two[1] = 0.0f;
      }
    }
  }

  // Line 15, in L2. With kIsOrdered the key blocks take turns at a tile, all consumers of one
  // before those of the next: the sums, and their rounding, repeat. A pair waits only for pairs of
  // smaller index, which were started before it.
  __device__ __forceinline__ void add_dq(const QueryFragment& dq) {
    constexpr int kAdders = Config::kCluster * Config::kConsumers;
    int turns = 1;
    if constexpr (kIsOrdered) {
      if (previous_tile_ < 0) return;
      if (warp_idx_ == 0) {
        const auto& block = shared_.block;
        int turn = block.turn(previous_tile_, is_reversed_);
        if constexpr (Config::kIsGeneral) {
          const int place = turn;
          turn = block.turn_after(workspace_, previous_head_, previous_tile_, place, is_reversed_,
                                  lane_idx_);
          turns = place + 1 - turn;
        }
        while (lane_idx_ == 0 &&
               ptx::load_acquire(workspace_.turn + previous_index_) < kAdders * turn) {
        }
      }
      ptx::named_barrier_sync(kBarrierStaged + static_cast<int>(kRole), 128);
    }
    float* sums = workspace_.dq + previous_index_ * Config::kTileFloatsDQ +
                  (Features::first(rank_) * Config::kBlockQ + thread_idx_ * 4);
#pragma unroll
    for (int j = 0; j < Features::kCount / 8; ++j) {
      ptx::reduce_add_v4(sums + j * 512, {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]});
    }
    if constexpr (kIsOrdered) {
      ptx::named_barrier_sync(kBarrierStaged + static_cast<int>(kRole), 128);
      if (thread_idx_ == 0) ptx::add_release(workspace_.turn + previous_index_, turns);
    }
  }

  // Line 19. Rows of padding have sums of exactly zero.
  __device__ __forceinline__ void store(const BackwardMaps& maps) {
    ptx::named_barrier_sync(kBarrierConsumers, 256);  // K and V are read
    if constexpr (kIsValues) {
      stage_gradient(1.0f / (1 << Config::kProbabilityShift), shared_.v);
    } else {
      stage_gradient(params_.attention.softmax_scale, shared_.k);
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierStaged + static_cast<int>(kRole), 128);
    if constexpr (Config::kIsGeneral) {
      // A copy of whole boxes would reach into the next sequence.
      const int block_row = rank_ * Config::kKeys, num_rows = shared_.block.num_rows - block_row;
      if (num_rows < Config::kKeys) {
        if constexpr (kIsValues) {
          this->store_rows(shared_.v, 0, block_row, num_rows, params_.attention.Hv, params_.dv);
        } else {
          this->store_rows(shared_.k, 0, block_row, num_rows, params_.attention.H, params_.dk);
        }
        return;
      }
    }
    if (thread_idx_ != 0) return;
#pragma unroll
    for (int slab = 0; slab < kFeatures / 64; ++slab) {
      ptx::tma_store(kIsValues ? &maps.dv : &maps.dk,
                     kIsValues ? shared_.v.slabs[slab] : shared_.k.slabs[slab], 64 * slab,
                     shared_.block.key_row() + rank_ * Config::kKeys, shared_.block.kv_head,
                     shared_.block.batch);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }

  // This warp's 16 keys, rounded.
  template <class Tile>
  __device__ __forceinline__ void stage_gradient(float factor, const Tile& tile) const {
#pragma unroll
    for (int j = 0; j < kFeatures / 8; j += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] = ptx::pack<Element>(gradient_[4 * j + 2 * i] * factor,
                                      gradient_[4 * j + 2 * i + 1] * factor);
      }
      ptx::stmatrix_x4(tile.chunk_address(16 * warp_idx_ + lane_idx_ % 16, j + lane_idx_ / 16),
                       pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }

  const bool is_reversed_;
  const int rank_, first_key_;
  Ring<Config::kStagesDout> dout_ring_;     // the stage of ring_ is the parity of the step
  int64_t previous_index_ = 0;              // of the step whose dQ is missing, in the workspace
  int previous_head_, previous_tile_ = -1;  // none yet
  float gradient_[kFeatures / 2];           // keys x features: dV or dK
};

}  // namespace jaxflash::fa3_sm90
