// Steps the two backward kernels share: the row statistics and the gradient of the logits.
//
//   P = exp(x - lse - lse_low)   dP = (dout . v) * keep   dS = P * (dP - delta)
#pragma once

#include "kernels/cpu/matmul.h"
#include "kernels/cpu/panel.h"

namespace jaxflash::cpu::JF_CPU_ISA {

// Sum of the products of two rows of count elements, in an order that depends on count alone.
inline float dot_rows(const void* left, const void* right, DataType dtype, int64_t count) {
  float sums[kPanelLanes] = {}, a[kPanelLanes], b[kPanelLanes];
  for (int64_t feature = 0; feature < count; feature += kPanelLanes) {
    const int64_t width = clamp(count - feature, 0, kPanelLanes);
    row_to_float(element_address(left, dtype, feature), dtype, width, a);
    row_to_float(element_address(right, dtype, feature), dtype, width, b);
    for (int64_t i = 0; i < width; ++i) sums[i] += a[i] * b[i];
  }
  for (int64_t half = kPanelLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

// Statistics of 64 query rows, along the lanes when queries are owned, else along the stream.
struct RowStatistics {
  float* lse;
  float* lse_low;  // what float32 lse could not hold
  float* delta;
};

// lse and delta = sum(dout * out) - dlse (Algorithm 2, line 4) of query rows [begin, begin + count)
// of one head, and which of them take part: padding rows and rows that see no key (lse -inf) must
// add nothing, so their q and dout are read as zeros and their lse as +inf, which makes every P
// zero. Entries up to 64 are filled. Every pass computes delta anew: it costs one product in 64.
inline void load_statistics(const BackwardParams& params, const Sequence& sequence, int64_t head,
                            const int32_t* query_ids, int64_t begin, int64_t count, bool* valid,
                            const RowStatistics& statistics) {
  const AttentionParams& attention = params.attention;
  const int64_t stride = attention.N;
  const int64_t offset = statistics_offset(attention, sequence, head) + begin * stride;
  const RowsOf out = query_rows(attention, sequence, params.out, head, attention.Hv);
  const RowsOf dout = query_rows(attention, sequence, params.dout, head, attention.Hv);
  fill_valid(query_ids, begin, count, valid);
  for (int64_t i = 0; i < kPanelLanes; ++i) {
    statistics.lse[i] = kInfinity;
    statistics.lse_low[i] = 0.0f;
    statistics.delta[i] = 0.0f;
    if (i >= count || !valid[i]) continue;
    const float lse = params.lse[offset + i * stride];
    valid[i] = lse != -kInfinity;
    if (!valid[i]) continue;
    statistics.lse[i] = lse;
    statistics.lse_low[i] = params.lse_low[offset + i * stride];
    const int64_t row = (begin + i) * out.row_stride;
    statistics.delta[i] =
        dot_rows(element_address(out.data, out.dtype, row),
                 element_address(dout.data, dout.dtype, row), out.dtype, out.features);
    if (params.dlse != nullptr) statistics.delta[i] -= params.dlse[offset + i * stride];
  }
}

struct GradientTile {
  float* scores;        // [stream][lane] q.k times the folded scale; becomes P * keep
  float* dscores;       // [stream][lane] dout.v; becomes dS
  const float* adjust;  // nullptr = nothing masked, no bias
  const float* keep;    // nullptr = no dropout
  RowStatistics rows;   // [lane] when queries are owned, else [stream]
  float soft_cap;
};

// Which side of the soft cap dS is wanted for: the bias is added after it, q and k act before it.
enum class GradientOf { kCapped, kUncapped };

template <Owned kOwned, GradientOf kGradientOf>
inline void logits_gradient(const GradientTile& tile, int64_t stream_rows, int64_t num_vectors) {
  for (int64_t s = 0; s < stream_rows; ++s) {
    for (int64_t v = 0; v < num_vectors; ++v) {
      const int64_t place = s * kPanelLanes + v * kLanes;
      const bool owns_queries = kOwned == Owned::kQueries;
      const Vector lse = owns_queries ? load(tile.rows.lse + v * kLanes) : splat(tile.rows.lse[s]);
      const Vector low =
          owns_queries ? load(tile.rows.lse_low + v * kLanes) : splat(tile.rows.lse_low[s]);
      const Vector delta =
          owns_queries ? load(tile.rows.delta + v * kLanes) : splat(tile.rows.delta[s]);
      Vector x = load(tile.scores + place);
      Vector slope = splat(1.0f);
      if (tile.soft_cap > 0.0f) {
        const Vector t = tanh(x);
        x = tile.soft_cap * t;
        if (kGradientOf == GradientOf::kUncapped) slope = 1.0f - t * t;
      }
      if (tile.adjust != nullptr) x = apply_adjust(x, load(tile.adjust + place));
      const Vector p = exp(x - lse - low);
      Vector dp = load(tile.dscores + place);
      Vector kept = p;
      if (tile.keep != nullptr) {
        const Vector keep = load(tile.keep + place);
        dp *= keep;
        kept *= keep;
      }
      store(tile.scores + place, kept);
      store(tile.dscores + place, p * (dp - delta) * slope);
    }
  }
}

}  // namespace jaxflash::cpu::JF_CPU_ISA
