// What an instance of fa3 can do.
#pragma once

#include "params.h"

namespace jaxflash::fa3_sm90 {

// Plain covers window (causal is one), lengths and sinks. General adds soft cap, segment ids, block
// masks and packed sequences.
enum class Features { kPlain, kGeneral };

inline Features features_needed(const AttentionParams& params, const SequenceInputs& inputs) {
  const bool is_plain = !(params.logits_soft_cap > 0.0f) &&
                        params.query_segment_ids.data == nullptr &&
                        params.block_mask.data == nullptr && inputs.query_offsets.data == nullptr;
  return is_plain ? Features::kPlain : Features::kGeneral;
}

}  // namespace jaxflash::fa3_sm90
