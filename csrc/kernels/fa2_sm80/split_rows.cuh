// The query rows of one warp in the forward for short queries, and what their CTA leaves of a
// chunk.
//
// The warps that own the same rows have each seen other keys. At the end every warp writes its
// (m, l, O) of each row to shared memory; the CTA merges them and stores the chunk's.
#pragma once

#include "kernels/fa2_sm80/forward_rows.cuh"
#include "kernels/fa2_sm80/split_config.h"
#include "ptx/math.cuh"

namespace jaxflash::fa2_sm80 {

template <class Config>
class SplitRows : protected WarpRows<Config> {
 protected:
  using Base = WarpRows<Config>;
  using Base::kHeadDim;
  using Base::params_, Base::shared_, Base::lane_idx_, Base::warp_row_;
  using Base::row_max_, Base::row_sum_, Base::output_;
  using typename Base::Element;
  using typename Base::Scores;
  using typename Base::Storage;

  __device__ __forceinline__ SplitRows(const ForwardParams& params, const SplitPlan& plan,
                                       Storage* shared)
      : Base(params, shared),
        plan_(plan),
        key_warp_(threadIdx.x / 32 / (Config::kBlockQ / Config::kWarpRows)) {}

  __device__ __forceinline__ void store_partial(int chunk) {
    __syncthreads();  // all are done with the stages, which the exchange overwrites
    exchange_rows();
    __syncthreads();  // the exchange is complete
    const AttentionParams& attention = params_.attention;
    constexpr int kRowVectors = kHeadDim / 4;
    for (int i = threadIdx.x; i < Config::kBlockQ * kRowVectors; i += Config::kNumThreads) {
      const int row = i / kRowVectors, column = i % kRowVectors * 4;
      const int tile_row = shared_.place.row_begin + row;
      if (tile_row >= shared_.place.query_rows * plan_.tile_heads) break;
      const int64_t query = shared_.place.batch * attention.T + tile_row / plan_.tile_heads;
      const int64_t out_row = query * attention.N + shared_.head + tile_row % plan_.tile_heads;
      const int64_t index = out_row * plan_.num_chunks + chunk;
      float4 output;
      const RowPartial partial = merge_warps(row, column, &output);
      if (column == 0) plan_.partials[index] = partial;
      // The output of a chunk in which the row sees nothing is never read.
      if (partial.row_max == -kInfinity || column >= attention.Hv) continue;
      *reinterpret_cast<float4*>(plan_.outputs + index * kHeadDim + column) = output;
    }
  }

  __device__ __forceinline__ void exchange_rows() {
    auto& exchange = shared_.exchange;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row_ + 8 * r + lane_idx_ / 4;
      float total = row_sum_[r];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      if (lane_idx_ % 4 == 0) {
        exchange.row_max[key_warp_][row] = row_max_[r];
        exchange.row_sum[key_warp_][row] = total;
      }
#pragma unroll
      for (int j = 0; j < Config::kOutputTiles; ++j) {
        *reinterpret_cast<float2*>(&exchange.output[key_warp_][row][8 * j + lane_idx_ % 4 * 2]) =
            make_float2(output_.values[0][j][2 * r], output_.values[0][j][2 * r + 1]);
      }
    }
  }

  // What the warps know about a row and four of its output columns, relative to one maximum.
  __device__ __forceinline__ RowPartial merge_warps(int row, int column, float4* output) const {
    const auto& exchange = shared_.exchange;
    const float to_log2 = Config::kIsGeneral ? device::kLog2E : 1.0f;
    RowPartial total = {-kInfinity, 0.0f};
#pragma unroll
    for (int warp = 0; warp < Config::kKeyWarps; ++warp) {
      total.row_max = fmaxf(total.row_max, exchange.row_max[warp][row]);
    }
    *output = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (total.row_max == -kInfinity) {  // no key, or nothing but NaN
      for (int warp = 0; warp < Config::kKeyWarps; ++warp) {
        total.row_sum += exchange.row_sum[warp][row];
      }
      return total;
    }
#pragma unroll
    for (int warp = 0; warp < Config::kKeyWarps; ++warp) {
      const float weight =
          ptx::exp2_approx((exchange.row_max[warp][row] - total.row_max) * to_log2);
      const float4 part = *reinterpret_cast<const float4*>(&exchange.output[warp][row][column]);
      total.row_sum += weight * exchange.row_sum[warp][row];
      output->x += weight * part.x;
      output->y += weight * part.y;
      output->z += weight * part.z;
      output->w += weight * part.w;
    }
    return total;
  }

  const SplitPlan& plan_;
  const int key_warp_;  // which of the warps that share these rows
};

}  // namespace jaxflash::fa2_sm80
