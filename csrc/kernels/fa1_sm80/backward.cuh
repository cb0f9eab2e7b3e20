// FlashAttention backward (arXiv:2205.14135, Algorithm 4; with a block mask Algorithm 5) with
// mma.sync and cp.async.
//
// The outer loop goes over the column blocks of K and V, the inner one over the row tiles of every
// query head that reads them; dK and dV stay on chip across the inner loop. One CTA owns all column
// blocks of a KV head, and then dQ is read, added to and rewritten in HBM, in a fixed order; or one
// column block, and then dQ is added with atomics. The 8 warps split the columns:
//
//   for j: K, V <- HBM                                  load_keys             line 7
//     for i that sees j: Q, dO, lse, D <- HBM           load                      10
//       S = Q K^T, P = exp(S - lse)   [rows, own columns]                      11-13
//       dV += P^T dO                  [own columns, head dim]                     16
//       dP = dO V^T, dS = P (dP - D)  [rows, own columns]                      17-20
//       dQ += dS K                    [16 rows, a quarter of the head dim]        21
//       dK += dS^T Q                  [own columns, head dim]                     22
//
// P and dS pass through shared memory: P and dS of a warp's own columns come back transposed, dQ
// needs dS of all columns.
//
//   copy q, dout (step i + 1)  ================================ cp.async, other stage
//   S, dP, P, dS               ===========
//   dV, dK                                ===========
//   dQ                                                |========
//                                                     B        A of step i + 1
//
// barrier   protects
// A         tile i has arrived for everybody; of step i - 1, the stage's tiles and dS are read
// B         dS is written by everybody
//
// Limits: H, Hv <= kHeadDim; T, S < 2^30; see Features for what the plain instance leaves out.
#pragma once

#include "kernels/fa1_sm80/backward_products.cuh"
#include "kernels/fa1_sm80/backward_rows.cuh"
#include "kernels/fa1_sm80/load.cuh"
#include "kernels/fa1_sm80/row_tiles.cuh"

namespace jaxflash::fa1_sm80 {

template <class Config>
class BackwardBlock {
  using Element = typename Config::Element;
  using Storage = typename Config::SharedStorage;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kBlockQ = Config::kBlockQ, kBlockKV = Config::kBlockKV;

 public:
  __device__ __forceinline__ BackwardBlock(const BackwardParams& params,
                                           const SequenceInputs& inputs,
                                           const BackwardWorkspace& workspace, int batch,
                                           int kv_head, bool is_alone, Storage* shared)
      : params_(params),
        workspace_(workspace),
        shared_(*shared),
        kv_head_(kv_head),
        is_alone_(is_alone),
        lane_idx_(threadIdx.x % 32),
        warp_idx_(threadIdx.x / 32) {
    if (threadIdx.x == 0) {
      shared_.place = device::locate_tile<false, kBlockKV>(params.attention, inputs, batch, 0);
    }
    __syncthreads();  // what thread 0 wrote is visible to all
  }

  // The gradients of column blocks [begin, end).
  __device__ __forceinline__ void run(int begin, int end) {
    for (int block = begin; block < end; ++block) {
      const int column = block * kBlockKV;
      dk_.clear();
      dv_.clear();
      bool has_keys = false;
      const int group_size = static_cast<int>(params_.attention.group_size);
      for (int head = kv_head_ * group_size; head < (kv_head_ + 1) * group_size; ++head) {
        start_head(head);
        RowTiles<Config> tiles(shared_.see, {0, 1, 0}, block, block + 1, &shared_.tiles);
        while (tiles.advance()) {
          const int item = tiles.find(0);
          if (item == tiles.end()) continue;
          tiles.start_run(item);
          if (!has_keys) load_keys(column);
          has_keys = true;
          visit_rows(tiles, item, column);
        }
      }
      store_gradients(column);
    }
  }

 private:
  __device__ __forceinline__ void start_head(int head) {
    __syncthreads();  // what is known of the head before is no longer read
    if (threadIdx.x == 0) {
      const AttentionParams& attention = params_.attention;
      const int batch = shared_.place.batch;
      const int64_t first_row = (batch * attention.N + head) * workspace_.padded_rows;
      shared_.queries = head_rows(attention.q, batch, attention.T, attention.N, head, attention.H);
      shared_.douts = head_rows(params_.dout, batch, attention.T, attention.N, head, attention.Hv);
      shared_.all_rows = workspace_.rows + first_row;
      shared_.all_sums = workspace_.dq + first_row * kHeadDim;
      shared_.see = device::make_visibility(params_.attention, shared_.place, head);
      shared_.dropout = device::make_dropout(params_.attention, shared_.place, head);
    }
    __syncthreads();  // what thread 0 wrote is visible to all
  }

  // The inner loop.
  __device__ __forceinline__ void visit_rows(const RowTiles<Config>& tiles, int tile, int column) {
    load(tiles.row_of(tile), 0);
    for (int stage = 0; tile != tiles.end(); stage ^= 1) {
      const int next = tiles.next(tile);
      ptx::cp_async_wait<0>();
      __syncthreads();  // A
      if (next != tiles.end()) load(tiles.row_of(next), stage ^ 1);
      visit(tiles.row_of(tile), column, tiles.is_partial(tile), stage);
      tile = next;
    }
  }

  // --- Copies -----------------------------------------------------------------------------------

  // Starts copying a row tile. Rows that take no part, because they are padding or see no key,
  // become zeros: NaN in them must not reach dK and dV.
  __device__ __forceinline__ void load(int first_row, int stage) {
    const RowStatistics* statistics = shared_.all_rows + first_row;
    // Without other masks the rows that see a key are an interval.
    const int low = -shared_.see.window_high;
    const int high = min(shared_.see.query_len, shared_.see.kv_len - shared_.see.window_low);
    const auto is_valid = [&](int row) {
      if constexpr (Config::kIsGeneral) {
        return statistics[row - first_row].lse_log2 != device::kInfinity;
      }
      return row >= low;
    };
    load_rows<Config::kIsGeneral, Config::kNumThreads>(shared_.queries, first_row, high, is_valid,
                                                       shared_.q[stage]);
    load_rows<Config::kIsGeneral, Config::kNumThreads>(shared_.douts, first_row, high, is_valid,
                                                       shared_.dout[stage]);
    if (threadIdx.x < kBlockQ / 2) {
      ptx::cp_async_16(ptx::shared_address(&shared_.rows[stage][2 * threadIdx.x]),
                       statistics + 2 * threadIdx.x, true);
    }
    ptx::cp_async_commit();
  }

  // Starts copying a column block; keys of padding become zeros.
  __device__ __forceinline__ void load_keys(int column) {
    const AttentionParams& attention = params_.attention;
    const int batch = shared_.place.batch;
    const auto is_valid = [&](int key) {
      if constexpr (Config::kIsGeneral) return device::is_key_valid(shared_.see, key);
      return true;
    };
    load_rows<Config::kIsGeneral, Config::kNumThreads>(
        head_rows(attention.k, batch, attention.S, attention.K, kv_head_, attention.H), column,
        shared_.see.kv_len, is_valid, shared_.k);
    load_rows<Config::kIsGeneral, Config::kNumThreads>(
        head_rows(attention.v, batch, attention.S, attention.K, kv_head_, attention.Hv), column,
        shared_.see.kv_len, is_valid, shared_.v);
  }

  // --- One step ---------------------------------------------------------------------------------

  __device__ __forceinline__ void visit(int first_row, int column, bool is_partial, int stage) {
    const int lane_idx = ptx::opaque(lane_idx_);
    const int warp_column = warp_idx_ * Config::kWarpKeys;
    const StepTile<Config>&q = shared_.q[stage], &dout = shared_.dout[stage];
#pragma unroll 1
    for (int row = 0; row < kBlockQ; row += 16 * Config::kChunkTiles) {
      StepScores<Config> p, ds;
      compute_scores<Config>(q, shared_.k, row, warp_column, lane_idx, &p);
      compute_scores<Config>(dout, shared_.v, row, warp_column, lane_idx, &ds);
      finish_scores<Config>(params_.attention, shared_.see, first_row + row, column + warp_column,
                            is_partial, lane_idx, &p);
      compute_gradient<Config>(shared_.dropout, first_row + row, column + warp_column,
                               shared_.rows[stage] + row, lane_idx, &p, &ds);
      store_scores<Config>(p, row, warp_column, lane_idx, &shared_.p);
      store_scores<Config>(ds, row, warp_column, lane_idx, &shared_.ds);
    }
    __syncwarp();  // P and dS of this warp's columns are written
    // This warp's part of dQ. Each lane owns its elements, from one column block to the next too.
    const int dq_tile = warp_idx_ % Config::kTilesM, quarter = warp_idx_ / Config::kTilesM;
    float* sums = shared_.all_sums + static_cast<int64_t>(first_row) * kHeadDim +
                  sums_offset<kHeadDim>(dq_tile, quarter * Config::kTilesDQ, lane_idx);
    float dq[Config::kTilesDQ][4] = {};
    if (is_alone_) {
#pragma unroll
      for (int j = 0; j < Config::kTilesDQ; ++j) {
        *reinterpret_cast<float4*>(dq[j]) = *reinterpret_cast<const float4*>(sums + 128 * j);
      }
    }
    accumulate<Config>(shared_.p, dout, warp_column, lane_idx, &dv_);
    accumulate<Config>(shared_.ds, q, warp_column, lane_idx, &dk_);
    __syncthreads();  // B
    add_query_gradient<Config>(shared_.ds, shared_.k, 16 * dq_tile,
                               quarter * Config::kWarpColumnsDQ, lane_idx, dq);
#pragma unroll
    for (int j = 0; j < Config::kTilesDQ; ++j) {
      if (is_alone_) {
        *reinterpret_cast<float4*>(sums + 128 * j) = *reinterpret_cast<const float4*>(dq[j]);
      } else {
        add_atomically(sums + 128 * j, dq[j]);
      }
    }
  }

  // dK and dV (line 24). The sums of keys of padding are zeros, as their gradients should be.
  __device__ __forceinline__ void store_gradients(int column) {
    const AttentionParams& attention = params_.attention;
    const int H = static_cast<int>(attention.H), Hv = static_cast<int>(attention.Hv);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key =
          column + warp_idx_ * Config::kWarpKeys + mma::fragment_row(lane_idx_, 2 * half);
      if (key >= attention.S) continue;
      const int64_t index = (shared_.place.batch * attention.S + key) * attention.K + kv_head_;
      Element* dk = static_cast<Element*>(params_.dk) + index * H;
      Element* dv = static_cast<Element*>(params_.dv) + index * Hv;
#pragma unroll
      for (int j = 0; j < Config::kGradientTiles; ++j) {
        const int feature = 8 * j + mma::fragment_column(lane_idx_, 0);
        const float* pair = dk_.values[0][j] + 2 * half;
        store_pair(attention.softmax_scale * pair[0], attention.softmax_scale * pair[1], feature, H,
                   dk);
        pair = dv_.values[0][j] + 2 * half;
        store_pair(pair[0], pair[1], feature, Hv, dv);
      }
    }
  }

  const BackwardParams& params_;
  const BackwardWorkspace& workspace_;
  Storage& shared_;
  const int kv_head_;
  const bool is_alone_;  // no other CTA adds to dQ of these query heads
  const int lane_idx_, warp_idx_;
  WarpGradient<Config> dk_, dv_;
};

// Grid: (batch entry, KV head, share of the column blocks), shares fastest: they read the same Q.
template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocksPerSM)
    backward_kernel(const __grid_constant__ BackwardParams params,
                    const __grid_constant__ SequenceInputs inputs,
                    const __grid_constant__ BackwardWorkspace workspace,
                    const __grid_constant__ int num_blocks, const __grid_constant__ int shares) {
  extern __shared__ __align__(128) char shared_bytes[];
  const int K = static_cast<int>(params.attention.K);
  const int share = blockIdx.x % shares, entry = blockIdx.x / shares;
  auto* shared = reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  BackwardBlock<Config> block(params, inputs, workspace, entry / K, entry % K, shares == 1, shared);
  if (shares == 1) {
    block.run(0, num_blocks);
  } else {
    block.run(share, share + 1);
  }
}

}  // namespace jaxflash::fa1_sm80
