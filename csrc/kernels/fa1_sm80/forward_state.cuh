// The rows of one head in the FlashAttention-1 forward: O, m and l, which live in HBM between
// column blocks, and the step that merges a column block into them.
//
// In a step 8 adjacent threads own the rows t / 8 + 16 i: they copy the row's O from HBM
// to shared memory ahead of time, merge and write it back, and never meet other threads' rows.
#pragma once

#include "device/row_result.cuh"
#include "kernels/fa1_sm80/load.cuh"
#include "kernels/fa1_sm80/row_tiles.cuh"
#include "ptx/math.cuh"

namespace jaxflash::fa1_sm80 {

using device::kInfinity;

// Scratch of a forward call; need not be initialised.
struct ForwardWorkspace {
  RowState* rows;       // [B, N, padded_rows]
  float* output;        // [B, N, padded_rows, padded head dim], normalised (the paper's O)
  int64_t padded_rows;  // T in whole kRowUnits
  int splits;           // CTAs that share the row tiles of a head
  int log2_group;       // of tiles that stay together
};

template <class Config>
class HeadState {
 protected:
  using Element = typename Config::Element;
  using Storage = typename Config::SharedStorage;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kOwnRows = Config::kBlockQ / 16;         // of a thread
  static constexpr int kRowThreads = 8;                         // that own a row
  static constexpr int kRowParts = kHeadDim / 4 / kRowThreads;  // of 4 floats, of a thread

  __device__ __forceinline__ HeadState(const ForwardParams& params, const RowShare& share,
                                       Storage* shared)
      : params_(params), shared_(*shared), share_(share) {}

  __device__ __forceinline__ static int part_column(int part) {
    return (static_cast<int>(threadIdx.x) % kRowThreads + part * kRowThreads) * 4;
  }
  __device__ __forceinline__ static int own_row(int i) {
    return 16 * i + static_cast<int>(threadIdx.x) / kRowThreads;
  }
  // O of a row in HBM.
  __device__ __forceinline__ float* output_of(int row) const {
    return shared_.all_output + static_cast<int64_t>(row) * kHeadDim;
  }
  // First row of the n-th row tile of this CTA; T or more where it has no such tile.
  __device__ __forceinline__ int row_of(int n) const { return share_.tile(n) * Config::kBlockQ; }

  // Whether an earlier column block wrote O of the CTA's n-th tile.
  __device__ __forceinline__ bool was_visited(int n) const {
    return (shared_.visited[n / 32] >> n % 32 & 1) != 0;
  }

  // Line 2 of Algorithm 1: no row has seen a key.
  __device__ __forceinline__ void clear_rows() {
    for (int i = threadIdx.x; i < Config::kMaxTiles / 32; i += Config::kNumThreads) {
      shared_.visited[i] = 0;
    }
    for (int n = 0; row_of(n) < params_.attention.T; ++n) {
      if (threadIdx.x < Config::kBlockQ) {
        shared_.all_rows[row_of(n) + threadIdx.x] = {-kInfinity, 0.0f};
      }
    }
  }

  // Starts copying O, m and l of a row tile (line 8). O is left out where nobody has written it.
  __device__ __forceinline__ void load_state(int first_row, bool has_output, int stage,
                                             int row_stage) {
    if (threadIdx.x < Config::kBlockQ / 2) {
      const RowState* source = shared_.all_rows + first_row + 2 * threadIdx.x;
      ptx::cp_async_16(ptx::shared_address(&shared_.rows[row_stage][2 * threadIdx.x]), source,
                       true);
    }
    if (!has_output) return;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const int row = own_row(i);
      const float* source = output_of(first_row + row);
#pragma unroll
      for (int part = 0; part < kRowParts; ++part) {
        const int column = part_column(part);
        ptx::cp_async_16(ptx::shared_address(&shared_.output[stage][row][column]), source + column,
                         true);
      }
    }
  }

  // This thread's share of O of a step, as it was before.
  __device__ __forceinline__ void read_output(int stage, float4 (&output)[kOwnRows][kRowParts]) {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
      for (int part = 0; part < kRowParts; ++part) {
        output[i][part] =
            *reinterpret_cast<const float4*>(&shared_.output[stage][own_row(i)][part_column(part)]);
      }
    }
  }

  // Lines 11 to 13: merges what the warps found into the rows of a tile and writes them back, or
  // writes out and lse where no later column block meets the tile.
  __device__ __forceinline__ void merge(int first_row, bool is_last, int stage, int row_stage,
                                        float4 (&output)[kOwnRows][kRowParts]) {
    const typename Config::Exchange& exchange = shared_.exchange[stage];
    const float dropout_scale =
        Config::kIsGeneral && shared_.dropout.threshold > 0 ? shared_.dropout.scale : 1.0f;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const int row = own_row(i);
      const RowState before = shared_.rows[row_stage][row];
      RowState found[Config::kWarpsN];
      RowState after = {before.max, 0.0f};
#pragma unroll
      for (int warp = 0; warp < Config::kWarpsN; ++warp) {
        found[warp] = exchange.rows[warp][row];
        after.max = fmaxf(after.max, found[warp].max);
      }
      // No key yet: any reference will do, and every weight is 0.
      const float reference = after.max == -kInfinity ? 0.0f : after.max;
      const float before_weight = before.sum * ptx::exp2_approx(before.max - reference);
      float weight[Config::kWarpsN];
      after.sum = before_weight;
#pragma unroll
      for (int warp = 0; warp < Config::kWarpsN; ++warp) {
        weight[warp] = ptx::exp2_approx(found[warp].max - reference);
        after.sum = fmaf(weight[warp], found[warp].sum, after.sum);
      }
      const float inverse = after.sum == 0.0f ? 0.0f : __fdividef(1.0f, after.sum);
#pragma unroll
      for (int warp = 0; warp < Config::kWarpsN; ++warp) weight[warp] *= inverse * dropout_scale;
#pragma unroll
      for (int part = 0; part < kRowParts; ++part) {
        const float keep = before_weight * inverse;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (before.sum != 0.0f) sum = scaled(keep, output[i][part]);
#pragma unroll
        for (int warp = 0; warp < Config::kWarpsN; ++warp) {
          add_scaled(
              weight[warp],
              *reinterpret_cast<const float4*>(&exchange.output[warp][row][part_column(part)]),
              &sum);
        }
        output[i][part] = sum;
      }
      const int position = first_row + row;
      if (is_last) {
        store_result(position, after, output[i]);
        after.sum = kDone;
      } else {
        float* destination = output_of(position);
#pragma unroll
        for (int part = 0; part < kRowParts; ++part) {
          *reinterpret_cast<float4*>(destination + part_column(part)) = output[i][part];
        }
      }
      if (threadIdx.x % kRowThreads == 0) shared_.all_rows[position] = after;
    }
  }

  // Writes out and lse of the rows whose last column block was hidden by a mask, of those that see
  // no key and of padding.
  __device__ __forceinline__ void finish_rows() {
    constexpr int kBatch = 4;  // rows of a thread whose reads are in flight together
    for (int n = 0; row_of(n / kOwnRows) < params_.attention.T; n += kBatch) {  // of 16 rows
      int position[kBatch];
      RowState state[kBatch];
      float4 output[kBatch][kRowParts];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int first_row = row_of((n + b) / kOwnRows);
        position[b] = first_row + own_row((n + b) % kOwnRows);
        state[b] = first_row < params_.attention.T ? shared_.all_rows[position[b]]
                                                   : RowState{-kInfinity, kDone};
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const float* source = output_of(position[b]);
#pragma unroll
        for (int part = 0; part < kRowParts; ++part) {
          output[b][part] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (state[b].sum != 0.0f && state[b].sum != kDone) {
            output[b][part] = *reinterpret_cast<const float4*>(source + part_column(part));
          }
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (state[b].sum != kDone) store_result(position[b], state[b], output[b]);
      }
    }
  }

 private:
  __device__ __forceinline__ static float4 scaled(float factor, const float4& x) {
    return make_float4(factor * x.x, factor * x.y, factor * x.z, factor * x.w);
  }
  __device__ __forceinline__ static void add_scaled(float factor, const float4& x, float4* sum) {
    sum->x = fmaf(factor, x.x, sum->x);
    sum->y = fmaf(factor, x.y, sum->y);
    sum->z = fmaf(factor, x.z, sum->z);
    sum->w = fmaf(factor, x.w, sum->w);
  }

  // out and lse = m + log l of a row; lse_low is what float32 lse could not hold. A row that sees
  // no key gets 0 and -inf.
  __device__ __forceinline__ void store_result(int row, const RowState& state,
                                               const float4 (&output)[kRowParts]) {
    const AttentionParams& attention = params_.attention;
    if (row >= attention.T) return;
    const int64_t index = (shared_.place.batch * attention.T + row) * attention.N + shared_.head;
    const int Hv = static_cast<int>(attention.Hv);
    Element* out = static_cast<Element*>(params_.out) + index * Hv;
    const bool sees_keys = state.sum != 0.0f;  // a sum of NaN is seen
#pragma unroll
    for (int part = 0; part < kRowParts; ++part) {
      const int column = part_column(part);
      const float4 x = sees_keys ? output[part] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (!Config::kIsGeneral || Hv % 4 == 0) {
        if (column >= Hv) continue;
        *reinterpret_cast<uint2*>(out + column) =
            make_uint2(ptx::pack<Element>(x.x, x.y), ptx::pack<Element>(x.z, x.w));
      } else {
        const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (column + e < Hv) out[column + e] = static_cast<Element>(values[e]);
        }
      }
    }
    if (threadIdx.x % kRowThreads != 0) return;
    const device::RowResult result = device::finish_softmax(state.max, state.sum, -kInfinity, true);
    params_.lse[index] = result.lse;
    params_.lse_low[index] = result.lse_low;
  }

 protected:
  const ForwardParams& params_;
  Storage& shared_;
  const RowShare share_;
};

}  // namespace jaxflash::fa1_sm80
