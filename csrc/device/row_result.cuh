// What the online softmax leaves of one row, turned into its results.
#pragma once

#include "device/visibility.cuh"

namespace jaxflash::device {

struct RowResult {
  float lse;      // natural log, -inf for a row that sees nothing
  float lse_low;  // what float32 lse could not hold
  float factor;   // on the unnormalised output, 0 for a row that sees no key or is padding
};

// The sum of exp(logit) is exp(row_max) * row_sum over the keys, and the sink's exp on top.
// row_max: in log2 units or natural ones, -inf where the row sees no key (row_sum is then 0) or
// only NaN. sink: -inf = none.
__device__ __forceinline__ RowResult finish_softmax(float row_max, float row_sum, float sink,
                                                    bool is_log2) {
  const bool sees_keys = row_max != -kInfinity || row_sum != 0.0f;
  if (!sees_keys && sink == -kInfinity) return {-kInfinity, 0.0f, 0.0f};
  float top = is_log2 ? row_max * kLn2 : row_max;
  float top_low = sees_keys && is_log2 ? fmaf(row_max, kLn2, -top) + row_max * kLn2Low : 0.0f;
  float share = 1.0f;
  if (sink != -kInfinity) {
    const bool is_sink_larger = !sees_keys || sink > top;
    share = !sees_keys ? 0.0f : is_sink_larger ? expf(top - sink + top_low) : 1.0f;
    const float sink_share = is_sink_larger ? 1.0f : expf(sink - top - top_low);
    row_sum = (sees_keys ? row_sum * share : 0.0f) + sink_share;
    if (is_sink_larger) {
      top = sink;
      top_low = 0.0f;
    }
  }
  const float log_sum = logf(row_sum);
  const float lse = top + log_sum;
  return {lse, (log_sum - (lse - top)) + top_low, share / row_sum};
}

}  // namespace jaxflash::device
