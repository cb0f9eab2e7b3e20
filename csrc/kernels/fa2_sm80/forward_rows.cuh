// The query rows of one warp in the FlashAttention-2 forward: their running maximum, denominator
// and unnormalised output, the online softmax on them, and the results.
//
// A lane holds 2 * kTilesM rows (ownership: ptx/mma.cuh) and a quarter of each; r / 2 is the 16-row
// fragment and r % 2 its half. The maximum is a reference, not exact: it moves only when a logit
// exceeds it by more than kRescaleThreshold, so that P stays below 2^8 and O is rarely rescaled.
#pragma once

#include "device/dropout.cuh"
#include "device/row_result.cuh"
#include "device/visibility.cuh"
#include "kernels/fa2_sm80/config.h"
#include "kernels/fa2_sm80/load.cuh"
#include "mma/multiply.cuh"
#include "ptx/math.cuh"

namespace jaxflash::fa2_sm80 {

using device::kInfinity;

constexpr unsigned kAllLanes = 0xFFFFFFFF;

template <class Config>
class WarpRows {
 protected:
  using Element = typename Config::Element;
  using Storage = typename Config::SharedStorage;
  using Scores = mma::Accumulator<Config::kTilesM, Config::kScoreTiles>;  // of a K/V tile
  static constexpr bool kIsFloat = std::is_same_v<Element, float>;
  static constexpr int kTilesM = Config::kTilesM;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kChunk = Config::QTile::kChunk;
  // Logits are in log2 units in the plain instance and natural in the general one, where the most
  // negative finite bias must survive.
  static constexpr float kRescaleThreshold = Config::kIsGeneral ? 5.5f : 8.0f;

  __device__ __forceinline__ WarpRows(const ForwardParams& params, Storage* shared)
      : params_(params),
        shared_(*shared),
        lane_idx_(threadIdx.x % 32),
        warp_row_(threadIdx.x / 32 * Config::kWarpRows % Config::kBlockQ) {}

  __device__ __forceinline__ void clear() {
    output_.clear();
#pragma unroll
    for (int r = 0; r < 2 * kTilesM; ++r) {
      row_max_[r] = -kInfinity;
      row_sum_[r] = 0.0f;
    }
  }

  __device__ __forceinline__ static Rows<Element> rows_of(const void* data, int64_t row,
                                                          int64_t num_heads, int64_t head,
                                                          int64_t features) {
    return {static_cast<const Element*>(data) + (row * num_heads + head) * features,
            num_heads * features, static_cast<int>(features)};
  }

  // Row inside the sequence of this lane's rows: r / 2 is the 16-row fragment, r % 2 its half.
  __device__ __forceinline__ int row_of(int r) const {
    return shared_.place.row_begin + warp_row_ + r / 2 * 16 + r % 2 * 8 + lane_idx_ / 4;
  }

  __device__ __forceinline__ float scale_log2() const {
    return params_.attention.softmax_scale * device::kLog2E;
  }
  __device__ __forceinline__ bool has_dropout() const {
    return params_.attention.dropout_threshold > 0;
  }
  __device__ __forceinline__ bool is_aligned() const {
    return params_.attention.H % kChunk == 0 && params_.attention.Hv % kChunk == 0;
  }

  // Raises the reference of the rows where P would otherwise exceed 2^8.
  __device__ __forceinline__ void update_row_max(const Scores& scores) {
    const float to_units = Config::kIsGeneral ? 1.0f : scale_log2();
    float lane_max[2 * kTilesM];
    bool has_grown = false;
#pragma unroll
    for (int r = 0; r < 2 * kTilesM; ++r) {
      lane_max[r] = -kInfinity;
#pragma unroll
      for (int j = 0; j < Config::kScoreTiles; ++j) {
        const float* pair = &scores.values[r / 2][j][r % 2 * 2];
        lane_max[r] = fmaxf(lane_max[r], fmaxf(pair[0], pair[1]));
      }
      lane_max[r] *= to_units;
      has_grown |= lane_max[r] > row_max_[r] + kRescaleThreshold;
    }
    if (__any_sync(kAllLanes, has_grown)) raise_row_max(lane_max);
  }

  // Moves the reference of the rows that have outgrown it to their true maximum so far; a row's
  // bits depend on no other row. The four lanes of a quad share a row.
  __device__ __forceinline__ void raise_row_max(const float (&lane_max)[2 * kTilesM]) {
    const float to_log2 = Config::kIsGeneral ? device::kLog2E : 1.0f;
#pragma unroll
    for (int r = 0; r < 2 * kTilesM; ++r) {
      float top = fmaxf(lane_max[r], row_max_[r]);
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      if (!(top > row_max_[r] + kRescaleThreshold)) top = row_max_[r];
      const float rescale =
          top == -kInfinity ? 1.0f : ptx::exp2_approx((row_max_[r] - top) * to_log2);
      row_max_[r] = top;
      row_sum_[r] *= rescale;
#pragma unroll
      for (int j = 0; j < Config::kOutputTiles; ++j) {
        output_.values[r / 2][j][r % 2 * 2] *= rescale;
        output_.values[r / 2][j][r % 2 * 2 + 1] *= rescale;
      }
    }
  }

  // Turns the scores into unnormalised probabilities. float32 adds up a tile by itself first: the
  // sum of a long row then takes one rounding a tile.
  __device__ __forceinline__ void exponentiate(Scores* scores) {
    float tile_sum[2 * kTilesM] = {};
#pragma unroll
    for (int j = 0; j < Config::kScoreTiles; ++j) {
#pragma unroll
      for (int r = 0; r < 2 * kTilesM; ++r) {
        float* sum = kIsFloat ? &tile_sum[r] : &row_sum_[r];
        *sum += exponentiate_pair(r, &scores->values[r / 2][j][r % 2 * 2]);
      }
    }
    if constexpr (kIsFloat) {
#pragma unroll
      for (int r = 0; r < 2 * kTilesM; ++r) row_sum_[r] += tile_sum[r];
    }
  }

  // Returns the sum of the pair.
  __device__ __forceinline__ float exponentiate_pair(int r, float* pair) const {
    // A row that has seen no key yet keeps -inf; 0 stands in so that exp2 sees no NaN.
    const float reference = row_max_[r] == -kInfinity ? 0.0f : row_max_[r];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float exponent = Config::kIsGeneral ? (pair[e] - reference) * device::kLog2E
                                                : fmaf(pair[e], scale_log2(), -reference);
      pair[e] = ptx::exp2_approx(exponent);
    }
    return pair[0] + pair[1];
  }

  // output += P times the values of a tile, summed by itself first: as with the row sums.
  __device__ __forceinline__ void accumulate_tile_sums(const typename Config::KvTile& v,
                                                       const Scores& probabilities, int lane_idx) {
    constexpr int kSteps = Config::kBlockKV / 16;
    mma::Fragment<Element> a[kSteps][kTilesM];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) probabilities.template as_a<Element>(i, step, a[step][i]);
    }
#pragma unroll
    for (int j = 0; j < Config::kOutputTiles; j += 2) {
      mma::Accumulator<kTilesM, 2> sums;
      sums.clear();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        mma::Fragment<Element> b;
        v.load_b_transposed(16 * step, 8 * j, lane_idx, b);
#pragma unroll
        for (int i = 0; i < kTilesM; ++i) {
          mma::multiply<Element>(sums.values[i][0], a[step][i], b[0], b[1]);
          mma::multiply<Element>(sums.values[i][1], a[step][i], b[2], b[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) output_.values[i][j + n][e] += sums.values[i][n][e];
        }
      }
    }
  }

  // Zeroes the dropped probabilities of keys first_key..; the row sum stays free of dropout.
  __device__ __forceinline__ void drop(int first_key, Scores* scores) const {
    if (!Config::kIsGeneral || !has_dropout()) return;
    if constexpr (Config::kIsGeneral) {
      constexpr int kTiles = Config::kScoreTiles < 4 ? Config::kScoreTiles : 4;  // of one draw
#pragma unroll
      for (int r = 0; r < 2 * kTilesM; ++r) {
#pragma unroll
        for (int j = 0; j < Config::kScoreTiles; j += kTiles) {
          uint32_t words[4];
          device::draw_words(shared_.dropout, row_of(r), first_key + 8 * j, lane_idx_, words);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            float* pair = &scores->values[r / 2][j + n][r % 2 * 2];
            if (!device::is_kept(shared_.dropout, words[n], 0)) pair[0] = 0.0f;
            if (!device::is_kept(shared_.dropout, words[n], 1)) pair[1] = 0.0f;
          }
        }
      }
    }
  }

  __device__ __forceinline__ bool is_row_valid(int row) const {
    if constexpr (Config::kIsGeneral) return device::is_query_valid(shared_.see, row);
    return row < shared_.see.query_len;
  }

  // Writes lse of row r and returns the factor on its output, 0 for a row that sees no key.
  __device__ __forceinline__ float finish_row(int r, float sink) {
    const int row = row_of(r);
    float total = row_sum_[r];
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    device::RowResult result = {-kInfinity, 0.0f, 0.0f};
    if (is_row_valid(row)) {
      result = device::finish_softmax(row_max_[r], total, sink, !Config::kIsGeneral);
      if constexpr (Config::kIsGeneral) {
        if (has_dropout()) result.factor *= shared_.dropout.scale;
      }
    }
    if (lane_idx_ % 4 == 0 && row < shared_.place.query_rows) {
      const AttentionParams& attention = params_.attention;
      const int64_t index =
          (shared_.place.batch * attention.T + shared_.place.query_begin + row) * attention.N +
          shared_.head;
      params_.lse[index] = result.lse;
      params_.lse_low[index] = result.lse_low;
    }
    return result.factor;
  }

  // Each warp normalises its rows, stages them in its own part of sQ and writes them out.
  __device__ __forceinline__ void store_output() {
    const float* sinks =
        device::batch_data<float>(params_.sinks, params_.attention, shared_.place.batch);
    const float sink =
        sinks == nullptr ? -kInfinity : sinks[shared_.head * params_.sinks.head_stride];
    // The other lanes of this warp may still read its rows of sQ.
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2 * kTilesM; ++r) {
      const float factor = finish_row(r, sink);
      const int row = warp_row_ + r / 2 * 16 + r % 2 * 8 + lane_idx_ / 4;
#pragma unroll
      for (int j = 0; j < Config::kOutputTiles; ++j) {
        const float* pair = &output_.values[r / 2][j][r % 2 * 2];
        const bool is_zero = factor == 0.0f;  // whatever the accumulator holds
        const ptx::Pair<Element> packed = ptx::pack<Element>(is_zero ? 0.0f : pair[0] * factor,
                                                             is_zero ? 0.0f : pair[1] * factor);
        *reinterpret_cast<ptx::Pair<Element>*>(&shared_.q.at(row, 8 * j + lane_idx_ % 4 * 2)) =
            packed;
      }
    }
    // The warp's rows of sQ hold its output.
    __syncwarp();
    const AttentionParams& attention = params_.attention;
    const int64_t first_row = shared_.place.batch * attention.T + shared_.place.query_begin;
    const Rows<Element> out =
        rows_of(params_.out, first_row, attention.N, shared_.head, attention.Hv);
    store_rows(out);
  }

  __device__ __forceinline__ void store_rows(const Rows<Element>& out) {
    using Stored = typename Config::Stored;
    constexpr int kRowChunks = Config::QTile::kRowChunks;
    Stored* data = reinterpret_cast<Stored*>(const_cast<Element*>(out.data));
    for (int i = lane_idx_; i < Config::kWarpRows * kRowChunks; i += 32) {
      const int shared_row = warp_row_ + i / kRowChunks, chunk = i % kRowChunks;
      const int row = shared_.place.row_begin + shared_row;
      if (row >= shared_.place.query_rows || chunk * kChunk >= out.features) continue;
      Stored* destination = data + row * out.row_stride + chunk * kChunk;
      const Stored* source = shared_.q.chunk_at(shared_row, chunk);
      if (!Config::kIsGeneral || is_aligned()) {
        *reinterpret_cast<uint4*>(destination) = *reinterpret_cast<const uint4*>(source);
      } else {
        const int width = min(kChunk, out.features - chunk * kChunk);
        for (int element = 0; element < width; ++element) destination[element] = source[element];
      }
    }
  }

  const ForwardParams& params_;
  Storage& shared_;
  const int lane_idx_, warp_row_;
  mma::Accumulator<kTilesM, Config::kOutputTiles> output_;  // unnormalised
  float row_max_[2 * kTilesM];  // reference of each of this lane's rows, the same in its quad
  float row_sum_[2 * kTilesM];  // this lane's share
};

}  // namespace jaxflash::fa2_sm80
