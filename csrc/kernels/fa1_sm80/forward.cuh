// FlashAttention forward (arXiv:2205.14135, Algorithm 1; with a block mask Algorithm 5) with
// mma.sync and cp.async.
//
// A CTA owns one head, or every n-th row tile of it where heads do not fill the card. The outer
// loop goes over the column blocks of K and V, the inner one over the row tiles of Q. The 4 warps
// split the columns: each holds its K and V in registers across the inner loop, and what they find
// for a row crosses warps through shared memory. Between column blocks O, m and l live in HBM.
//
//   for j: K, V <- HBM                              load_keys               line 6
//     for i that sees j: Q, O, m, l <- HBM          load_queries, load_state     8
//       S = Q K^T, masked                           compute_scores, hide         9
//       m~ = rowmax(S), P = exp(S - m~), l~ = rowsum(P)   exponentiate          10
//       P V                                         multiply_values
//       m, l, O <- merged with m~, l~, P V          merge                    11-13
//
// m~, l~ and P V are each warp's own, relative to its own maximum, so that one exchange, and with
// it one barrier, does for all three. A step (S, P and PV by warps; M, merging, by rows):
//
//   copy  | Q0 O0 | Q1 O1        | Q2 O2        |
//   math  |       | S0 P0 PV0 M0 | S1 P1 PV1 M1 | ...
//                            ^ barrier: PV i is written, tile i + 1 has arrived
//
// Limits: H, Hv <= kHeadDim; T, S < 2^30; see Features for what the plain instance leaves out.
#pragma once

#include "kernels/fa1_sm80/forward_state.cuh"
#include "mma/multiply.cuh"

namespace jaxflash::fa1_sm80 {

constexpr unsigned kAllLanes = 0xFFFFFFFF;

template <class Config>
class ForwardHead : HeadState<Config> {
  using Base = HeadState<Config>;
  using Base::kHeadDim, Base::kOwnRows, Base::kRowParts;
  using Base::params_, Base::shared_, Base::share_;
  using typename Base::Element;
  using typename Base::Storage;
  using Scores = mma::Accumulator<1, Config::kScoreTiles>;
  using Output = mma::Accumulator<1, Config::kOutputTiles>;
  static constexpr int kSteps = kHeadDim / 16;            // of 16 features
  static constexpr int kPairs = Config::kScoreTiles / 2;  // of 16 keys

 public:
  // What is the same for all threads and rarely read lives in shared memory, not in registers.
  __device__ __forceinline__ ForwardHead(const ForwardParams& params, const SequenceInputs& inputs,
                                         const ForwardWorkspace& workspace, int batch, int head,
                                         int split, Storage* shared)
      : Base(params, {split, workspace.splits, workspace.log2_group}, shared),
        lane_idx_(threadIdx.x % 32),
        warp_row_(threadIdx.x / 32 / Config::kWarpsN * 16),
        warp_n_(threadIdx.x / 32 % Config::kWarpsN) {
    const AttentionParams& attention = params.attention;
    if (threadIdx.x == 0) {
      shared_.place = device::locate_tile<true, Config::kBlockQ>(attention, inputs, batch, 0);
      const int64_t first_row = (batch * attention.N + head) * workspace.padded_rows;
      shared_.head = head;
      shared_.queries = head_rows(attention.q, batch, attention.T, attention.N, head, attention.H);
      shared_.all_rows = workspace.rows + first_row;
      shared_.all_output = workspace.output + first_row * kHeadDim;
      shared_.see = device::make_visibility(attention, shared_.place, head);
      shared_.dropout = device::make_dropout(attention, shared_.place, head);
    }
    __syncthreads();  // what thread 0 wrote is visible to all
  }

  __device__ __forceinline__ void run() {
    this->clear_rows();
    const int num_blocks = (shared_.see.kv_len + Config::kBlockKV - 1) / Config::kBlockKV;
    RowTiles<Config> tiles(shared_.see, share_, 0, num_blocks, &shared_.tiles);
    int held_block = -1;
    while (tiles.advance()) {
      for (int item = tiles.find(0); item < tiles.end(); item = tiles.find(tiles.run_end())) {
        const int block = tiles.start_run(item);
        // O, m and l are written and what lies in shared memory is read.
        __syncthreads();
        if (block != held_block) load_keys(block * Config::kBlockKV);
        visit_rows(tiles, item, block * Config::kBlockKV, block != held_block);
        tiles.mark_run(item, shared_.visited);
        held_block = block;
      }
    }
    __syncthreads();  // O, m and l of every row are written
    this->finish_rows();
  }

 private:
  // The inner loop. has_new_keys: K and V are still on their way.
  __device__ __forceinline__ void visit_rows(const RowTiles<Config>& tiles, int tile, int column,
                                             bool has_new_keys) {
    int next = tiles.next(tile);
    load(tiles, tile, 0, 0);
    load(tiles, next, 1, 1);
    if (has_new_keys) {
      ptx::cp_async_wait<2>();
      __syncthreads();  // K and V have arrived
      take_keys();
    }
    ptx::cp_async_wait<1>();
    __syncthreads();  // the first tile has arrived, K and V have left what the exchange overwrites
    int stage = 0, row_stage = 0;
    while (tile != tiles.end()) {
      const int first_row = tiles.row_of(tile);
      visit(first_row, column, tiles.is_partial(tile), shared_.q[stage], &shared_.exchange[stage]);
      const int after_next = tiles.next(next);
      ptx::cp_async_wait<0>();
      // What the warps found is written, the next tile has arrived, Q of this one is read. The
      // other half of the exchange was read before the barrier by whoever passes it.
      __syncthreads();
      float4 output[kOwnRows][kRowParts];
      this->read_output(stage, output);
      const int last_stage = row_stage == 0 ? 2 : row_stage - 1;  // two ahead, modulo 3
      load(tiles, after_next, stage, last_stage);
      this->merge(first_row, is_last(first_row, column), stage, row_stage, output);
      tile = next;
      next = after_next;
      stage ^= 1;
      row_stage = row_stage == 2 ? 0 : row_stage + 1;
    }
  }

  // Whether no later column block meets the row tile, masks aside.
  __device__ __forceinline__ bool is_last(int first_row, int column) const {
    int begin, end;
    device::kv_range(shared_.see, first_row, first_row + Config::kBlockQ, &begin, &end);
    return end <= column + Config::kBlockKV;
  }

  // --- Copies -----------------------------------------------------------------------------------

  // Starts copying what a step needs; closes one cp.async group even where there is nothing left.
  __device__ __forceinline__ void load(const RowTiles<Config>& tiles, int tile, int stage,
                                       int row_stage) {
    if (tile != tiles.end()) {
      const int first_row = tiles.row_of(tile);
      load_queries(first_row, &shared_.q[stage]);
      this->load_state(first_row, this->was_visited(tiles.number_of(tile)), stage, row_stage);
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void load_queries(int first_row,
                                               Tile16<Config::kBlockQ, kHeadDim>* q) {
    load_rows<Config::kIsGeneral, Config::kNumThreads>(
        shared_.queries, first_row, shared_.see.query_len, [](int) { return true; }, *q);
  }

  // Starts copying a column block, in a cp.async group of its own. Keys of padding become zeros: 0
  // * NaN would reach the output.
  __device__ __forceinline__ void load_keys(int column) {
    const AttentionParams& attention = params_.attention;
    const int64_t kv_head = shared_.head / attention.group_size;
    const int batch = shared_.place.batch;
    const auto is_valid = [&](int key) {
      if constexpr (Config::kIsGeneral) return device::is_key_valid(shared_.see, key);
      return true;
    };
    load_rows<Config::kIsGeneral, Config::kNumThreads>(
        head_rows(attention.k, batch, attention.S, attention.K, kv_head, attention.H), column,
        shared_.see.kv_len, is_valid, shared_.kv.k);
    load_rows<Config::kIsGeneral, Config::kNumThreads>(
        head_rows(attention.v, batch, attention.S, attention.K, kv_head, attention.Hv), column,
        shared_.see.kv_len, is_valid, shared_.kv.v);
    ptx::cp_async_commit();
  }

  // Brings this warp's columns into its registers.
  __device__ __forceinline__ void take_keys() {
    const int first = warp_n_ * Config::kWarpKeys;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        shared_.kv.k.load_b(first + 16 * pair, 16 * step, lane_idx_, k_[pair][step]);
        shared_.kv.v.load_b_transposed(first + 16 * pair, 16 * step, lane_idx_, v_[pair][step]);
      }
    }
  }

  // --- One line of the algorithm each -----------------------------------------------------------

  // This warp's rows of a tile meet its columns.
  __device__ __forceinline__ void visit(int tile_row, int column, bool is_partial,
                                        const Tile16<Config::kBlockQ, kHeadDim>& q,
                                        typename Config::Exchange* exchange) {
    const int first_row = tile_row + warp_row_;
    const int first_key = column + warp_n_ * Config::kWarpKeys;
    Scores scores;
    compute_scores(q, &scores);
    if (is_partial) {
      hide<Config::kIsGeneral>(shared_.see, first_row, first_key, lane_idx_, scores.values[0]);
    }
    exponentiate(&scores, exchange->rows[warp_n_] + warp_row_);
    if constexpr (Config::kIsGeneral) drop(first_row, first_key, &scores);
    Output output;
    multiply_values(scores, &output);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* row = exchange->output[warp_n_][warp_row_ + 8 * half + lane_idx_ / 4];
#pragma unroll
      for (int j = 0; j < Config::kOutputTiles; ++j) {
        const float* pair = &output.values[0][j][2 * half];
        *reinterpret_cast<float2*>(row + 8 * j + lane_idx_ % 4 * 2) = make_float2(pair[0], pair[1]);
      }
    }
  }

  // Logits in log2 units.
  __device__ __forceinline__ void compute_scores(const Tile16<Config::kBlockQ, kHeadDim>& q,
                                                 Scores* scores) {
    scores->clear();
    const int lane_idx = ptx::opaque(lane_idx_);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      q.load_a(warp_row_, 16 * step, lane_idx, a);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const uint32_t (&b)[4] = k_[pair][step];
        mma::multiply<Element>(scores->values[0][2 * pair], a, b[0], b[1]);
        mma::multiply<Element>(scores->values[0][2 * pair + 1], a, b[2], b[3]);
      }
    }
    const float scale = params_.attention.softmax_scale * device::kLog2E;
#pragma unroll
    for (int j = 0; j < Config::kScoreTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores->values[0][j][e] *= scale;
    }
  }

  // scores -> P, relative to this warp's maximum of each row; both go to `rows`.
  __device__ __forceinline__ void exponentiate(Scores* scores, RowState* rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -kInfinity;
#pragma unroll
      for (int j = 0; j < Config::kScoreTiles; ++j) {
        const float* pair = &scores->values[0][j][2 * half];
        top = fmaxf(top, fmaxf(pair[0], pair[1]));
      }
      // The four lanes of a quad share a row.
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      // A row that sees no key here: 0 stands in, so that exp2 sees no NaN.
      const float reference = top == -kInfinity ? 0.0f : top;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < Config::kScoreTiles; ++j) {
        float* pair = &scores->values[0][j][2 * half];
        pair[0] = ptx::exp2_approx(pair[0] - reference);
        pair[1] = ptx::exp2_approx(pair[1] - reference);
        sum += pair[0] + pair[1];
      }
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (lane_idx_ % 4 == 0) rows[8 * half + lane_idx_ / 4] = {top, sum};
    }
  }

  // Zeroes the dropped probabilities; the row sums stay free of dropout.
  __device__ __forceinline__ void drop(int first_row, int first_key, Scores* scores) const {
    if (shared_.dropout.threshold <= 0) return;
    constexpr int kDraws = Config::kScoreTiles / 4;  // of 32 columns, for each of two rows
    uint32_t kept = 0;                               // one bit an element
#pragma unroll 1
    for (int n = 0; n < 2 * kDraws; ++n) {
      const int row = first_row + n / kDraws * 8 + lane_idx_ / 4;
      uint32_t words[4];
      device::draw_words(shared_.dropout, row, first_key + n % kDraws * 32, lane_idx_, words);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const bool is_kept = device::is_kept(shared_.dropout, words[e / 2], e % 2);
        kept |= static_cast<uint32_t>(is_kept) << (8 * n + e);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < Config::kScoreTiles; ++j) {
#pragma unroll
        for (int parity = 0; parity < 2; ++parity) {
          const int bit = half * 8 * kDraws + 2 * j + parity;
          if ((kept >> bit & 1) == 0) scores->values[0][j][2 * half + parity] = 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_values(const Scores& probabilities, Output* output) {
    output->clear();
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      uint32_t a[4];
      probabilities.template as_a<Element>(0, pair, a);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t (&b)[4] = v_[pair][step];
        mma::multiply<Element>(output->values[0][2 * step], a, b[0], b[1]);
        mma::multiply<Element>(output->values[0][2 * step + 1], a, b[2], b[3]);
      }
    }
  }

  const int lane_idx_;
  const int warp_row_;  // first of this warp's 16 rows of a tile
  const int warp_n_;    // its share of the columns
  // Fragments `b` of this warp's columns: [16 keys, 16 features] each.
  uint32_t k_[kPairs][kSteps][4], v_[kPairs][kSteps][4];
};

// Grid: B * N * splits CTAs along x, so that any number of heads fits; the CTAs of a head follow
// each other and share its K and V in L2.
template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocksPerSM)
    forward_kernel(const __grid_constant__ ForwardParams params,
                   const __grid_constant__ SequenceInputs inputs,
                   const __grid_constant__ ForwardWorkspace workspace) {
  extern __shared__ __align__(128) char shared_bytes[];
  const int N = static_cast<int>(params.attention.N);
  const int split = blockIdx.x % workspace.splits, entry = blockIdx.x / workspace.splits;
  auto* shared = reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  ForwardHead<Config>(params, inputs, workspace, entry / N, entry % N, split, shared).run();
}

}  // namespace jaxflash::fa1_sm80
