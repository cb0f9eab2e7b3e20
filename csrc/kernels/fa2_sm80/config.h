// Tiles, shared memory and instances of the FlashAttention-2 forward.
//
// Facts only: the kernel, its launch and its instantiations all derive from here.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/dropout.cuh"
#include "device/visibility.cuh"
#include "mma/shared_tile.cuh"

namespace jaxflash::fa2_sm80 {

// What an instance can do. Plain covers window (causal is one), lengths and packed sequences with
// H % 8 == Hv % 8 == 0 and a positive scale; its logits stay unscaled until the exponential.
// General adds bias, mask, block mask, segment ids, soft cap, dropout and any head dim or scale.
enum class Features { kPlain, kGeneral };

// kHeadDim is the padded head dim: both H and Hv are at most this.
template <class ElementType, int kPaddedHeadDim, Features kInstanceFeatures>
struct ForwardConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kPaddedHeadDim;
  static constexpr Features kFeatures = kInstanceFeatures;
  static constexpr bool kIsGeneral = kFeatures == Features::kGeneral;

  static constexpr int kNumWarps = 4;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr bool kIsFloat = std::is_same_v<Element, float>;
  // Output accumulators take kWarpRows * kHeadDim / 32 of a thread's 255 registers. A float takes
  // twice the shared memory, and as an operand four times the registers.
  static constexpr int kBlockQ = kHeadDim <= (kIsFloat ? 64 : 128) ? 128 : 64;
  static constexpr int kBlockKV = kIsFloat                      ? (kHeadDim > 128 ? 16 : 32)
                                  : kHeadDim > 128              ? 32
                                  : kHeadDim > 64 || kIsGeneral ? 64
                                                                : 128;
  static constexpr int kWarpRows = kBlockQ / kNumWarps;
  static constexpr int kTilesM = kWarpRows / 16;    // 16-row fragments of a warp
  static constexpr int kScoreTiles = kBlockKV / 8;  // 8-key fragments of a K/V tile
  // Q stays in registers where shared-memory reads are the bottleneck and registers are left.
  static constexpr bool kKeepsQueries = !kIsFloat && kHeadDim > 128;
  static constexpr int kOutputTiles = kHeadDim / 8;  // 8-feature fragments of its output
  static constexpr int kNumStages = 2;               // K/V tiles in shared memory
  static constexpr int kMinBlocksPerSM = kIsFloat && kHeadDim > 128 ? 1 : 2;

  using Stored = std::conditional_t<kIsFloat, float, uint16_t>;  // an element in shared memory
  using QTile = mma::SharedTile<Stored, kBlockQ, kHeadDim>;
  using KvTile = mma::SharedTile<Stored, kBlockKV, kHeadDim>;

  struct Nothing {};
  struct SharedStorage {
    device::SequenceTile place;
    int head;
    std::conditional_t<kIsGeneral, device::Visibility, device::Window> see;
    std::conditional_t<kIsGeneral, device::DropoutStream, Nothing> dropout;
    QTile q;  // [kBlockQ, H]; each warp stages its output in its rows
    KvTile k[kNumStages];
    KvTile v[kNumStages];
  };

  static_assert(kWarpRows % 16 == 0, "a warp owns whole mma.sync fragments");
  static_assert(kScoreTiles % 4 == 0 || kScoreTiles < 4, "dropout draws 32 columns at a time");
  static_assert(kMinBlocksPerSM * (sizeof(SharedStorage) + 1024) <= 228 * 1024,
                "two CTAs must fit one multiprocessor of compute capability 9.0");
  static_assert(sizeof(SharedStorage) <= 163 * 1024,
                "a CTA must fit one multiprocessor of compute capability 8.0");
};

// See Features: what the plain instance leaves out.
inline Features features_needed(const AttentionParams& params) {
  const bool is_general = params.bias.data != nullptr || params.mask.data != nullptr ||
                          params.block_mask.data != nullptr ||
                          params.query_segment_ids.data != nullptr ||
                          params.logits_soft_cap > 0.0f || params.dropout_threshold > 0 ||
                          params.H % 8 != 0 || params.Hv % 8 != 0 || !(params.softmax_scale > 0.0f);
  return is_general ? Features::kGeneral : Features::kPlain;
}

// Padded head dim of the instance that runs H and Hv; 0 where none does.
constexpr int padded_head_dim(int64_t H, int64_t Hv) {
  const int64_t larger = H > Hv ? H : Hv;
  return larger <= 64 ? 64 : larger <= 128 ? 128 : larger <= 256 ? 256 : 0;
}

}  // namespace jaxflash::fa2_sm80
