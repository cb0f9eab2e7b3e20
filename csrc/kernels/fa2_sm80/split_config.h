// Tiles, shared memory, chunks and workspace of the forward for short queries (forward_split.cuh).
//
// Facts only: the kernels, their launch and the workspace's size all derive from here.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/dropout.cuh"
#include "device/visibility.cuh"
#include "kernels/fa2_sm80/config.h"
#include "mma/shared_tile.cuh"

namespace jaxflash::fa2_sm80 {

constexpr int64_t kSplitMaxT = 16;
constexpr int64_t kSplitMinChunk = 256;  // keys

// How the keys are cut. Only sizes of one sequence and one KV head count, neither the batch nor the
// number of KV heads nor the device, so that a shard computes the same bits as the whole.
struct SplitSizes {
  int64_t chunk_keys;
  int64_t num_chunks;  // 0 = another kernel's problem
};

// head_dim: padded. The figures were chosen on an H200, 2026-11-30, bf16.
inline SplitSizes split_sizes(int64_t T, int64_t S, int64_t group_size, int64_t head_dim,
                              bool is_packed) {
  // For 16 queries the merge does not pay below 256 keys; for one it does from the start.
  if (T > kSplitMaxT || S < 16 * T || is_packed) return {};
  // Small chunks cost: each leaves a float32 copy of the output of all rows, and pays its start.
  // Large ones leave a GPU idle where there are few heads. A size that grows like the root of S
  // loses least on either side.
  const int64_t scale = T * group_size > 8 || head_dim > 128 ? 64 : 16;
  int64_t chunk_keys = kSplitMinChunk;
  while (4 * chunk_keys * chunk_keys <= scale * S) chunk_keys *= 2;
  return {chunk_keys, (S + chunk_keys - 1) / chunk_keys};
}

// What one chunk leaves of one row; its output, relative to row_max, lies apart.
struct RowPartial {
  float row_max;  // reference of the sum, -inf = the row sees no key of the chunk
  float row_sum;
};

// One call's cut and its workspace. Row r of the B * T * N is that of out: (b * T + t) * N + n.
struct SplitPlan {
  int chunk_keys, num_chunks;
  int tile_heads;        // query heads that share a tile: a KV head's, or 1
  RowPartial* partials;  // [B * T * N, num_chunks]
  float* outputs;        // [B * T * N, num_chunks, padded head dim], unnormalised
};

// Floats of the workspace: for each chunk of each row a pair of statistics and an output.
inline int64_t split_workspace_floats(int64_t num_rows, int64_t num_chunks, int64_t head_dim) {
  return num_rows * num_chunks * (head_dim + 2);
}

// kRows query rows a CTA. Each warp owns 16; the warps that own the same rows split the keys of
// every tile, and meet once at the end.
template <class ElementType, int kPaddedHeadDim, Features kInstanceFeatures, int kRows>
struct SplitConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kPaddedHeadDim;
  static constexpr Features kFeatures = kInstanceFeatures;
  static constexpr bool kIsGeneral = kFeatures == Features::kGeneral;

  static constexpr int kNumWarps = 4;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kBlockQ = kRows;
  static constexpr int kWarpRows = 16;
  static constexpr int kTilesM = 1;
  static constexpr int kKeyWarps = kNumWarps * kWarpRows / kBlockQ;  // that share their rows
  static constexpr int kBlockKV = kHeadDim == 64 ? 128 : kHeadDim == 256 && kRows == 64 ? 32 : 64;
  static constexpr int kWarpKeys = kBlockKV / kKeyWarps;
  static constexpr int kScoreTiles = kWarpKeys / 8;  // 8-key fragments of a warp
  static constexpr int kOutputTiles = kHeadDim / 8;  // 8-feature fragments of its output
  // K/V tiles in shared memory, about 96 KiB: copies of up to 64 KiB a CTA are under way.
  static constexpr int kNumStages = kHeadDim == 256 ? 2 : 3;
  static constexpr int kMinBlocksPerSM = kHeadDim == 256 && kRows == 16 ? 1 : 2;

  using QTile = mma::SharedTile<uint16_t, kBlockQ, kHeadDim>;
  using KvTile = mma::SharedTile<uint16_t, kBlockKV, kHeadDim>;
  struct Nothing {};
  struct Stages {
    KvTile k[kNumStages];
    KvTile v[kNumStages];
  };
  // Where the warps leave their rows at the end. The 8 extra columns keep banks apart.
  struct Exchange {
    float row_max[kKeyWarps][kBlockQ];
    float row_sum[kKeyWarps][kBlockQ];
    float output[kKeyWarps][kBlockQ][kHeadDim + 8];
  };
  struct SharedStorage {
    device::SequenceTile place;  // row_begin counts rows of the tile, see forward_split.cuh
    int head;                    // the first of the tile's heads
    std::conditional_t<kIsGeneral, device::Visibility, device::Window> see;
    std::conditional_t<kIsGeneral, device::DropoutStream, Nothing> dropout;
    QTile q;
    union {
      Stages stages;
      Exchange exchange;
    };
  };

  static_assert(kKeyWarps >= 1 && kWarpKeys % 16 == 0, "a warp multiplies 16 keys at a time");
  static_assert(kSplitMinChunk % kBlockKV == 0, "a chunk must hold whole tiles");
  static_assert(kMinBlocksPerSM * (sizeof(SharedStorage) + 1024) <= 228 * 1024,
                "the CTAs must fit one multiprocessor of compute capability 9.0");
  static_assert(sizeof(SharedStorage) <= 163 * 1024,
                "a CTA must fit one multiprocessor of compute capability 8.0");
};

}  // namespace jaxflash::fa2_sm80
