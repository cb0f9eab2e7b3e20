// FlashAttention-2 forward for few queries and many keys: one part of the keys, then a merge
// (forward_combine.cuh). Also known as Flash-Decoding.
//
// A few query rows cannot keep a GPU busy if one CTA walks all the keys. So the keys are cut into
// chunks (split_config.h); a CTA owns a chunk and a tile of rows. To read each key and value once,
// the rows of a tile are all query heads of one KV head at all positions: row = t * tile_heads + g.
//
// The warps that own the same 16 rows share out the keys of every tile (kKeyWarps; with 64 rows a
// warp is alone with its 16 and takes all keys). Per tile and warp:
//
//   S     = Q K^T                        compute_scores
//   S     = masked, capped, biased S     finish_scores
//   m     = running row maximum          update_row_max      a reference, see forward_rows.cuh
//   P     = exp2(S - m); l += sum P      exponentiate        unnormalised
//   O    += P V                          accumulate_output
//
// and once at the end the warps' (m, l, O) of a row become the chunk's (store_partial). This is
// bound by memory, so copies of kNumStages - 1 tiles are under way while one is computed:
//
//   copy  | T0 T1 | T2 | T3 | ...
//   math  |       | T0 | T1 | ...      one barrier per tile
//
// Heads share a tile only where they see the same: with dropout, or a mask, bias or block mask that
// differs between heads, tile_heads is 1.
//
// Limits: those of forward.cuh, nothing packed.
#pragma once

#include <type_traits>

#include "device/block_word.cuh"
#include "device/dropout.cuh"
#include "device/visibility.cuh"
#include "kernels/fa2_sm80/load.cuh"
#include "kernels/fa2_sm80/split_config.h"
#include "kernels/fa2_sm80/split_rows.cuh"
#include "mma/multiply.cuh"
#include "ptx/math.cuh"

namespace jaxflash::fa2_sm80 {

template <class Config>
class SplitTile : SplitRows<Config> {
  using Base = SplitRows<Config>;
  using Base::kChunk, Base::kHeadDim;
  using Base::key_warp_, Base::output_;
  using Base::params_, Base::plan_, Base::shared_, Base::lane_idx_, Base::warp_row_;
  using typename Base::Element;
  using typename Base::Scores;
  using typename Base::Storage;
  static constexpr int kBlockKV = Config::kBlockKV;
  static constexpr int kNumStages = Config::kNumStages;

 public:
  // place.row_begin counts rows of the tile's heads, not positions.
  __device__ __forceinline__ SplitTile(const ForwardParams& params, const SplitPlan& plan,
                                       const device::SequenceTile& place, int head, Storage* shared)
      : Base(params, plan, shared), see_(make_see(params.attention, place, head, shared)) {
    const AttentionParams& attention = params.attention;
    if (threadIdx.x == 0) {  // read after a barrier
      shared_.place = place;
      shared_.head = head;
    }
    const int kv_head = head / static_cast<int>(attention.group_size);
    const int64_t first_key = place.batch * attention.S;
    k_ = this->rows_of(attention.k, first_key, attention.K, kv_head, attention.H);
    v_ = this->rows_of(attention.v, first_key, attention.K, kv_head, attention.Hv);
    const int end_row = min(place.row_begin + Config::kBlockQ, place.query_rows * plan.tile_heads);
    first_position_ = place.row_begin / plan.tile_heads;
    end_position_ = (end_row - 1) / plan.tile_heads + 1;
    for (int r = 0; r < 2; ++r) {
      const int row = place.row_begin + warp_row_ + 8 * r + lane_idx_ / 4;
      position_[r] = row / plan.tile_heads;
    }
  }

  __device__ __forceinline__ void run(const device::SequenceTile& place, int head, int chunk) {
    this->clear();
    int kv_begin, kv_end;
    device::kv_range(see_, first_position_, end_position_, &kv_begin, &kv_end);
    kv_begin = max(kv_begin, chunk * plan_.chunk_keys);
    kv_end = min(kv_end, (chunk + 1) * plan_.chunk_keys);
    end_tile_ = (kv_end + kBlockKV - 1) / kBlockKV;
    device::Tile kind;
    int tile = next_visible(kv_begin / kBlockKV, &kind);
    int next = tile;                                  // to be loaded
    if (tile < end_tile_) load_queries(place, head);  // part of the first tile's group of copies
    for (int stage = 0; stage < kNumStages - 1; ++stage) load_next(&next, stage);
    bool has_queries = false;
    for (int stage = 0; tile < end_tile_; stage = stage + 1 == kNumStages ? 0 : stage + 1) {
      ptx::cp_async_wait<kNumStages - 2>();
      // This tile's copies are visible to all, and all are done with the stage before it.
      __syncthreads();
      load_next(&next, stage == 0 ? kNumStages - 1 : stage - 1);
      if (!has_queries) {
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) {
          shared_.q.load_a(warp_row_, 16 * step, lane_idx_, queries_[step]);
        }
        has_queries = true;
      }
      attend(tile * kBlockKV + key_warp_ * Config::kWarpKeys, kind, stage);
      tile = next_visible(tile + 1, &kind);
    }
    this->store_partial(chunk);
  }

 private:
  // What is rarely read lives in shared memory; a window alone takes few registers.
  using See = std::conditional_t<Config::kIsGeneral, const device::Visibility&, device::Window>;

  __device__ __forceinline__ static See make_see(const AttentionParams& attention,
                                                 const device::SequenceTile& place, int head,
                                                 Storage* shared) {
    if constexpr (Config::kIsGeneral) {
      if (threadIdx.x == 0) {
        shared->see = device::make_visibility(attention, place, head);
        shared->dropout = device::make_dropout(attention, place, head);
      }
      __syncthreads();  // what thread 0 wrote is visible to all
      return shared->see;
    } else {
      return device::make_window(attention, place);
    }
  }

  // The first tile at or after `tile` with something to see, or one from end_tile_ on. Every warp
  // finds the same.
  __device__ __forceinline__ int next_visible(int tile, device::Tile* kind) {
    const auto box_of = [&](int tile) -> device::Box {
      return {first_position_, end_position_, tile * kBlockKV, (tile + 1) * kBlockKV};
    };
    if constexpr (Config::kIsGeneral) {
      return device::first_visible(see_, box_of, tile, end_tile_, lane_idx_, &block_word_, kind);
    } else {
      const bool is_full = device::is_inside_window<true>(see_, box_of(tile));
      *kind = is_full ? device::Tile::kFull : device::Tile::kPartial;
      return tile;
    }
  }

  // --- Copies -----------------------------------------------------------------------------------

  // Rows of the tile; those of padding become zeros.
  __device__ __forceinline__ void load_queries(const device::SequenceTile& place, int first_head) {
    const AttentionParams& attention = params_.attention;
    constexpr int kRowChunks = kHeadDim / kChunk;
    const int features = static_cast<int>(attention.H);
    for (int i = threadIdx.x; i < Config::kBlockQ * kRowChunks; i += Config::kNumThreads) {
      const int row = i / kRowChunks, chunk = i % kRowChunks;
      const int position = (place.row_begin + row) / plan_.tile_heads;
      const int head = first_head + (place.row_begin + row) % plan_.tile_heads;
      const int64_t index = (place.batch * attention.T + position) * attention.N + head;
      const Element* source =
          static_cast<const Element*>(attention.q) + index * features + chunk * kChunk;
      const bool is_read = position < see_.query_len && chunk * kChunk < features;
      if (!Config::kIsGeneral || this->is_aligned()) {
        ptx::cp_async_16(shared_.q.address_of(row, chunk), source, is_read);
        continue;
      }
      uint16_t* destination = shared_.q.chunk_at(row, chunk);
      for (int e = 0; e < kChunk; ++e) {
        const bool is_inside = is_read && chunk * kChunk + e < features;
        destination[e] = is_inside ? reinterpret_cast<const uint16_t*>(source)[e] : 0;
      }
    }
  }

  // Starts the copies of tile *next, if there is one, and moves *next on. One cp.async group.
  __device__ __forceinline__ void load_next(int* next, int stage) {
    if (*next < end_tile_) {
      load(k_, *next * kBlockKV, &shared_.stages.k[stage]);
      load(v_, *next * kBlockKV, &shared_.stages.v[stage]);
      device::Tile kind;
      *next = next_visible(*next + 1, &kind);
    }
    ptx::cp_async_commit();
  }

  // Keys of padding become zeros: 0 * NaN would reach the output.
  template <class Tile>
  __device__ __forceinline__ void load(const Rows<Element>& rows, int begin, Tile* tile) {
    const int end = see_.kv_len;
    if constexpr (Config::kIsGeneral) {
      const auto is_valid = [&](int key) { return device::is_key_valid(see_, key); };
      if (this->is_aligned()) {
        load_rows_async<Config::kNumThreads>(rows, begin, end, is_valid, tile);
      } else {
        load_rows_elementwise<Config::kNumThreads>(rows, begin, end, is_valid, tile);
      }
    } else {
      load_rows_async<Config::kNumThreads>(rows, begin, end, [](int) { return true; }, tile);
    }
  }

  // --- One line of the algorithm each -----------------------------------------------------------

  // first_key: of this warp's part of the tile.
  __device__ __forceinline__ void attend(int first_key, device::Tile kind, int stage) {
    Scores scores;
    compute_scores(shared_.stages.k[stage], &scores);
    finish_scores(first_key, kind, &scores);
    this->update_row_max(scores);
    this->exponentiate(&scores);
    this->drop(first_key, &scores);
    accumulate_output(shared_.stages.v[stage], scores);
  }

  __device__ __forceinline__ void compute_scores(const typename Config::KvTile& k,
                                                 Scores* scores) const {
    scores->clear();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
      for (int j = 0; j < Config::kScoreTiles; j += 2) {
        uint32_t b[4];
        k.load_b(key_warp_ * Config::kWarpKeys + 8 * j, 16 * step, lane_idx_, b);
        mma::multiply<Element>(scores->values[0][j], queries_[step], b[0], b[1]);
        mma::multiply<Element>(scores->values[0][j + 1], queries_[step], b[2], b[3]);
      }
    }
  }

  // Brings the scores to final logits (general: natural units; plain: still to be scaled).
  __device__ __forceinline__ void finish_scores(int first_key, device::Tile kind,
                                                Scores* scores) const {
    const bool is_partial = kind == device::Tile::kPartial;
    if constexpr (Config::kIsGeneral) {
      const float scale = params_.attention.softmax_scale;
      const float cap = params_.attention.logits_soft_cap;
      for_each(scores, [&](int, int, float x) { return x * scale; });
      if (cap > 0.0f) {
        for_each(scores, [&](int, int, float x) { return cap * tanhf(x / cap); });
      }
      if (!is_partial) return;
      for_each(scores, [&](int position, int column, float x) {
        return device::adjust_logit(see_, position, first_key + column, x);
      });
    } else if (is_partial) {
      for_each(scores, [&](int position, int column, float x) {
        const int key = first_key + column;
        const bool is_hidden = (key >= see_.kv_len) | (key < position + see_.window_low) |
                               (key > position + see_.window_high);
        return is_hidden ? -kInfinity : x;
      });
    }
  }

  // scores = function(position, column in the warp's part, score).
  template <class Function>
  __device__ __forceinline__ void for_each(Scores* scores, const Function& function) const {
#pragma unroll
    for (int j = 0; j < Config::kScoreTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float* score = &scores->values[0][j][e];
        *score = function(position_[e / 2], 8 * j + mma::fragment_column(lane_idx_, e), *score);
      }
    }
  }

  __device__ __forceinline__ void accumulate_output(const typename Config::KvTile& v,
                                                    const Scores& probabilities) {
#pragma unroll
    for (int step = 0; step < Config::kWarpKeys / 16; ++step) {
      uint32_t a[4];
      probabilities.template as_a<Element>(0, step, a);
#pragma unroll
      for (int j = 0; j < Config::kOutputTiles; j += 2) {
        uint32_t b[4];
        v.load_b_transposed(key_warp_ * Config::kWarpKeys + 16 * step, 8 * j, lane_idx_, b);
        mma::multiply<Element>(output_.values[0][j], a, b[0], b[1]);
        mma::multiply<Element>(output_.values[0][j + 1], a, b[2], b[3]);
      }
    }
  }

  const See see_;
  Rows<Element> k_, v_;
  int first_position_, end_position_;  // query positions of the tile
  int position_[2];                    // of this lane's rows
  int end_tile_;                       // of the chunk's keys
  std::conditional_t<Config::kIsGeneral, device::BlockWord, typename Config::Nothing> block_word_;
  uint32_t queries_[kHeadDim / 16][4];  // fragments `a`
};

// Grid: row tiles x (N / tile_heads) x B CTAs along x, chunks along y, so that the CTAs that run
// together read neighbouring heads of the same keys.
template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocksPerSM)
    forward_split_kernel(const __grid_constant__ ForwardParams params,
                         const __grid_constant__ SequenceInputs inputs,
                         const __grid_constant__ SplitPlan plan, int row_tiles) {
  extern __shared__ __align__(128) char shared_bytes[];
  const AttentionParams& attention = params.attention;
  const int head_blocks = static_cast<int>(attention.N) / plan.tile_heads;
  const int entry = blockIdx.x / row_tiles;
  const int head = entry % head_blocks * plan.tile_heads;
  device::SequenceTile place =
      device::locate_tile<true, Config::kBlockQ>(attention, inputs, entry / head_blocks, 0);
  place.row_begin = blockIdx.x % row_tiles * Config::kBlockQ;
  auto* shared = reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  SplitTile<Config>(params, plan, place, head, shared).run(place, head, blockIdx.y);
}

}  // namespace jaxflash::fa2_sm80
