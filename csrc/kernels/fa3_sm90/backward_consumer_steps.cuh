// What the consumer warpgroups of both backward kernels do around the products: which step comes
// next, and which pairs, rows and keys count.
#pragma once

#include <type_traits>

#include "kernels/fa3_sm90/backward_producer.cuh"
#include "kernels/fa3_sm90/backward_scores.cuh"
#include "ptx/named_barrier.cuh"

namespace jaxflash::fa3_sm90 {

// Zeroes the rows of a tile of shared memory that is_hidden, from all threads of both consumers.
template <class Config, class Tile, class IsHidden>
__device__ __forceinline__ void clear_rows(const IsHidden& is_hidden, Tile& tile) {
  constexpr int kChunks = Tile::kNumRows * 8;
  for (int i = threadIdx.x - 128; i < kChunks; i += 128 * Config::kConsumers) {
    if (!is_hidden(i / 8)) continue;
#pragma unroll
    for (int slab = 0; slab < Tile::kNumSlabs; ++slab) {
      reinterpret_cast<uint4*>(tile.slabs[slab])[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

// Derived has step<StepKind>(head, tile), which goes from q_full to ring_.advance(), then
// clear_keys(is_hidden), which zeroes those keys of the block, and dout_ring(), the place of dout.
template <class Config, class Derived>
class StepConsumer {
 public:
  __device__ __forceinline__ StepConsumer(const BackwardParams& params,
                                          const BackwardWorkspace& workspace,
                                          typename Config::SharedStorage& shared)
      : params_(params),
        workspace_(workspace),
        shared_(shared),
        c_(__shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0) - 1),
        thread_idx_(threadIdx.x % 128),
        lane_idx_(threadIdx.x % 32),
        warp_idx_(threadIdx.x / 32 % 4) {}

 protected:
  using Element = typename Config::Element;

  // Line 7: every step, once K and V are there.
  __device__ __forceinline__ void run_steps() {
    if constexpr (Config::kIsGeneral) {
      run_visits();
    } else {
      if (shared_.block.first_head < shared_.block.end_head) wait_for_keys();
#pragma unroll 1
      for (int head = shared_.block.first_head; head < shared_.block.end_head; ++head) {
        run_head(head);
      }
    }
  }

  // Low word of the left operand that picks one statistic: its core, and no others.
  __device__ __forceinline__ uint32_t selector(int row) const {
    constexpr int kRowBytes = sizeof(shared_.selectors[0]);
    return mma::descriptor_low(ptx::shared_address(shared_.selectors[row]),
                               (kSelectNothing - row) * kRowBytes);
  }

  // Rows of padding, NaN included, count as zeros in every product. In a general instance any row
  // may take no part, in a plain step too (all its logits are -inf); `rows` tells.
  // NOTE: without this branch in its plain steps ptxas passes every operand of their products
  // through vector registers (120 R2UR a step at head dim 128).
  __device__ __forceinline__ void clear_hidden_rows(int tile, const RowStatistics* rows) {
    const auto& block = shared_.block;
    if constexpr (Config::kIsGeneral) {
      if (!block.loaded[ring_.stage].has_idle_rows) return;
      clear_queries([&](int row) { return rows[row].lse == device::kInfinity; });
    } else {
      if (!block.has_hidden_rows(tile, static_cast<int>(params_.attention.T))) return;
      const int first = tile * Config::kBlockQ;
      const int begin = block.first_row - first, end = block.end_row - first;
      clear_queries([&](int row) { return row < begin || row >= end; });
    }
  }

  template <class IsHidden>
  __device__ __forceinline__ void clear_queries(const IsHidden& is_hidden) {
    const auto& dout_ring = derived().dout_ring();
    ptx::mbarrier_wait(&shared_.dout_full[dout_ring.stage], dout_ring.phase);
    clear_rows<Config>(is_hidden, shared_.q[ring_.stage]);
    clear_rows<Config>(is_hidden, shared_.dout[dout_ring.stage]);
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierConsumers, 128 * Config::kConsumers);
  }

  // Whether every pair of an extreme step is visible.
  __device__ __forceinline__ bool is_full() const {
    if constexpr (Config::kIsGeneral) return shared_.block.loaded[ring_.stage].is_full;
    return false;
  }

  // Which pairs of this lane are visible.
  __device__ __forceinline__ void find_pairs(int head, int first_key, int first_query,
                                             VisibleBits<Config>& visible) const {
    const auto& block = shared_.block;
    if (is_full()) {
#pragma unroll
      for (uint32_t& word : visible) word = 0xFFFFFFFF;
      return;
    }
    find_visible<Config>(QueriesOfKeys(block.see, first_key, first_query), visible);
    if constexpr (Config::kIsGeneral) {
      clear_masked<Config>(block.masks_of(head), first_key, first_query, visible);
    }
  }

  // Statistics in float32 of a tile's rows.
  __device__ __forceinline__ const RowStatistics* rows_of(int head, int tile) const {
    return workspace_.rows + index_of(head, tile) * Config::kBlockQ;
  }

  // The same as an extreme step reads them: a general instance has loaded them.
  __device__ __forceinline__ const RowStatistics* extreme_rows(const RowStatistics* rows) const {
    if constexpr (Config::kIsGeneral) {
      return reinterpret_cast<const RowStatistics*>(shared_.statistics[ring_.stage]);
    }
    return rows;
  }

  // Calls form(which Cap, as a type; the soft cap).
  template <class Form>
  __device__ __forceinline__ void with_soft_cap(const Form& form) const {
    const float cap = params_.attention.logits_soft_cap;
    const device::SoftCap soft_cap(params_.attention.softmax_scale, cap);
    if constexpr (Config::kIsGeneral) {
      if (cap > device::SoftCap::kMaxSmallCap) {
        form(std::integral_constant<Cap, Cap::kLarge>(), soft_cap);
        return;
      }
      if (cap > 0.0f) {
        form(std::integral_constant<Cap, Cap::kSmall>(), soft_cap);
        return;
      }
    }
    form(std::integral_constant<Cap, Cap::kNone>(), soft_cap);
  }

  __device__ __forceinline__ int64_t index_of(int head, int tile) const {
    return workspace_.index_of(params_.attention.N, shared_.block.batch, head,
                               shared_.block.slot(tile));
  }

  // num_rows rows of a gradient, from tile_row of its tile and block_row of the block on; one
  // warpgroup. data: [B, S, K, features]
  template <class Tile>
  __device__ __forceinline__ void store_rows(Tile& tile, int tile_row, int block_row, int num_rows,
                                             int64_t features, void* data) const {
    const AttentionParams& attention = params_.attention;
    const int chunks = static_cast<int>(features) / 8;
    const int64_t first = shared_.block.batch * attention.S + shared_.block.key_row() + block_row;
#pragma unroll 1
    for (int i = thread_idx_; i < num_rows * chunks; i += 128) {
      const int row = i / chunks, chunk = i % chunks;
      const int64_t place = (first + row) * attention.K + shared_.block.kv_head;
      static_cast<uint4*>(data)[place * chunks + chunk] = *tile.chunk_at(tile_row + row, chunk);
    }
  }

  const BackwardParams& params_;
  const BackwardWorkspace& workspace_;
  typename Config::SharedStorage& shared_;
  const int c_, thread_idx_, lane_idx_, warp_idx_;  // c_: of the consumers
  Ring<Config::kStages> ring_;

 private:
  __device__ __forceinline__ Derived& derived() { return static_cast<Derived&>(*this); }

  template <StepKind kKind>
  __device__ __forceinline__ void step_of(int head, int tile) {
    derived().template step<kKind>(head, tile);
  }

  // A copy of the step for each kind: as a condition inside one, the compiler turns the mask into
  // selects that every step pays for.
  __device__ __forceinline__ void run_head(int head) {
    const bool is_extreme = has_extreme_row(head);
    int tile = shared_.block.first_tile;
    while (tile < shared_.block.end_tile) {
      int end = shared_.block.end_tile;
      if (is_extreme) {
#pragma unroll 1
        for (; tile < end; ++tile) step_of<StepKind::kExtreme>(head, tile);
        return;
      }
      const bool is_plain = tile >= shared_.block.first_plain && tile < shared_.block.end_plain;
      if (is_plain) {
        end = min(end, shared_.block.end_plain);
#pragma unroll 1
        for (; tile < end; ++tile) step_of<StepKind::kPlain>(head, tile);
      } else {
        if (tile < shared_.block.first_plain) end = min(end, shared_.block.first_plain);
#pragma unroll 1
        for (; tile < end; ++tile) step_of<StepKind::kMasked>(head, tile);
      }
    }
  }

  // The steps that the loader found.
  __device__ __forceinline__ void run_visits() {
    Visit visit = next_visit();
    if (visit.kind != StepKind::kNone) wait_for_keys();
    while (visit.kind != StepKind::kNone) {
#pragma unroll 1
      for (; visit.kind == StepKind::kPlain; visit = next_visit()) {
        step_of<StepKind::kPlain>(visit.head, visit.tile);
      }
#pragma unroll 1
      for (; visit.kind == StepKind::kMasked; visit = next_visit()) {
        step_of<StepKind::kMasked>(visit.head, visit.tile);
      }
#pragma unroll 1
      for (; visit.kind == StepKind::kExtreme; visit = next_visit()) {
        step_of<StepKind::kExtreme>(visit.head, visit.tile);
      }
    }
  }

  // q of the next step has arrived.
  __device__ __forceinline__ Visit next_visit() const {
    ptx::mbarrier_wait(&shared_.q_full[ring_.stage], ring_.phase);
    return shared_.block.loaded[ring_.stage];
  }

  // K and V have arrived; keys of padding, NaN included, count as zeros.
  __device__ __forceinline__ void wait_for_keys() {
    ptx::mbarrier_wait(&shared_.k_full, 0);
    ptx::mbarrier_wait(&shared_.v_full, 0);
    const auto& block = shared_.block;
    const int num_keys = block.see.kv_len - block.first_key;
    const int32_t* ids = nullptr;
    if constexpr (Config::kIsGeneral) ids = block.masks.kv_ids;
    if (num_keys >= Config::kBlockKV && ids == nullptr) return;
    const auto is_hidden = [&](int key) {
      return key >= num_keys || (ids != nullptr && ids[block.first_key + key] < 0);
    };
    derived().clear_keys(is_hidden);
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierConsumers, 128 * Config::kConsumers);
  }

  // The same answer in every warp.
  __device__ __forceinline__ bool has_extreme_row(int head) const {
    const int* marks =
        workspace_.marks + workspace_.index_of(params_.attention.N, shared_.block.batch, head, 0);
    int found = 0;
    for (int tile = shared_.block.first_tile + lane_idx_; tile < shared_.block.end_tile;
         tile += 32) {
      found |= marks[tile];
    }
    return __any_sync(0xFFFFFFFF, found != 0);
  }
};

}  // namespace jaxflash::fa3_sm90
