// Tiles, shared memory and instances of FlashAttention-1.
//
// Facts only: the kernels, their launches and their instantiations all derive from here.
#pragma once

#include <cstdint>

#include "device/dropout.cuh"
#include "device/visibility.cuh"
#include "kernels/fa1_sm80/load.cuh"
#include "mma/shared_tile.cuh"

namespace jaxflash::fa1_sm80 {

// What an instance can do. Plain covers window (causal is one), lengths and block mask with
// H % 8 == Hv % 8 == 0. General adds mask, segment ids, dropout and any head dim.
enum class Features { kPlain, kGeneral };

// Rows of the scratch are counted in units of this; every kBlockQ divides it.
constexpr int kRowUnit = 32;

// State of one query row between two column blocks (the paper's m and l).
struct RowState {
  float max;  // log2 domain
  float sum;  // of exp2(logit - max); 0 = has seen no key; kDone = out and lse are written
};
constexpr float kDone = -1.0f;

// What the backward needs of a query row, as its prepare kernel leaves it.
struct RowStatistics {
  float lse_log2;  // lse * log2(e); +inf for rows that take no part
  float delta;
};

// Row tiles that one list of RowTiles holds at a time.
constexpr int kListWords = 32;
struct RowTileList {
  uint32_t visible[kListWords];  // bit i of word w: whether tile 32 w + i is visited
  uint32_t partial[kListWords];  // whether masks must be consulted in it
};

// kHeadDim is the padded head dim: both H and Hv are at most this. kBlockKV is the number of
// columns of a block (the paper's Bc).
template <class ElementType, int kPaddedHeadDim, int kColumns, Features kInstanceFeatures>
struct ForwardConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kPaddedHeadDim;
  static constexpr int kBlockKV = kColumns;
  static constexpr bool kListsOneBlock = false;  // RowTiles
  static constexpr Features kFeatures = kInstanceFeatures;
  static constexpr bool kIsGeneral = kFeatures == Features::kGeneral;

  static constexpr int kNumWarps = 4;
  static constexpr int kNumThreads = 32 * kNumWarps;
  // Rows of a step (Br). A warp holds K and V of its share of the columns in 128 registers of a
  // lane and meets 16 rows; where two warps hold all columns, the others take 16 more rows.
  static constexpr int kBlockQ = kBlockKV * kHeadDim < 128 * 128 ? 32 : 16;
  static constexpr int kWarpsM = kBlockQ / 16;
  static constexpr int kWarpsN = kNumWarps / kWarpsM;
  static constexpr int kWarpKeys = kBlockKV / kWarpsN;
  static_assert(kWarpKeys * kHeadDim == 64 * 64, "K and V of a warp take 128 registers of a lane");
  static constexpr int kScoreTiles = kWarpKeys / 8;  // 8-key fragments of a warp
  static constexpr int kOutputTiles = kHeadDim / 8;  // 8-feature fragments of its output
  static constexpr int kMinBlocksPerSM = 2;
  static constexpr int kMaxTiles = 4096;  // of a CTA; more CTAs share a longer head
  // Floats between rows of a warp's output in shared memory: 8 more than it holds, so that the
  // fragments of a warp are stored without bank conflicts.
  static constexpr int kRowPitch = kHeadDim + 8;

  struct KeysAndValues {
    Tile16<kBlockKV, kHeadDim> k;  // [kBlockKV, H]
    Tile16<kBlockKV, kHeadDim> v;  // [kBlockKV, Hv]
  };
  // What the warps hand each other in one step.
  struct Exchange {
    alignas(16) float output[kWarpsN][kBlockQ][kRowPitch];  // exp2(S - max) V of a warp's keys
    RowState rows[kWarpsN][kBlockQ];
  };
  struct SharedStorage {
    device::SequenceTile place;
    int head;
    HeadRows queries;    // of the head
    RowState* all_rows;  // m and l of the head in HBM, [padded_rows]
    float* all_output;   // O of the head in HBM, [padded_rows, kHeadDim]
    device::Visibility see;
    device::DropoutStream dropout;
    RowTileList tiles;
    uint32_t visited[kMaxTiles / 32];                // bit n: O of the CTA's n-th tile is in HBM
    Tile16<kBlockQ, kHeadDim> q[2];                  // [kBlockQ, H]
    alignas(16) float output[2][kBlockQ][kHeadDim];  // O of the steps, as read from HBM
    alignas(16) RowState rows[3][kBlockQ];           // m and l of the steps
    union {
      KeysAndValues kv;      // on their way into registers
      Exchange exchange[2];  // while rows are visited
    };
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kWarpKeys % 32 == 0, "dropout draws 32 columns at a time");
  static_assert(kRowUnit % kBlockQ == 0, "the scratch holds whole row tiles");
  static_assert(kMinBlocksPerSM * (kSharedBytes + 1024) <= 228 * 1024,
                "two CTAs must fit one multiprocessor of compute capability 9.0");
  static_assert(kSharedBytes <= 163 * 1024,
                "a CTA must fit one multiprocessor of compute capability 8.0");
};

// One CTA owns column blocks of a KV head; its 8 warps split the keys of a block.
template <class ElementType, int kPaddedHeadDim, Features kInstanceFeatures>
struct BackwardConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kPaddedHeadDim;
  static constexpr Features kFeatures = kInstanceFeatures;
  static constexpr bool kIsGeneral = kFeatures == Features::kGeneral;

  static constexpr int kNumWarps = 8;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kBlockKV = 128;
  static constexpr bool kListsOneBlock = true;  // RowTiles
  static constexpr int kBlockQ = 32;
  static constexpr int kWarpKeys = kBlockKV / kNumWarps;
  static constexpr int kTilesM = kBlockQ / 16;
  // Two CTAs where dK and dV leave them the registers. Then P and dS have room for 16 rows at a
  // time.
  static constexpr int kMinBlocksPerSM = kHeadDim <= 64 && !kIsGeneral ? 2 : 1;
  static constexpr int kChunkTiles = kMinBlocksPerSM == 2 ? 1 : kTilesM;  // 16-row fragments
  static constexpr int kScoreTiles = kWarpKeys / 8;
  static constexpr int kGradientTiles = kHeadDim / 8;  // 8-feature fragments of a warp's dK and dV
  // The product dQ: a warp forms 16 rows and a quarter of the head dim.
  static constexpr int kWarpColumnsDQ = kHeadDim / 4;
  static constexpr int kTilesDQ = kWarpColumnsDQ / 8;
  static constexpr int kSumsPerTile = kBlockQ * kHeadDim;  // floats of dQ

  struct SharedStorage {
    device::SequenceTile place;
    HeadRows queries, douts;        // of the query head
    const RowStatistics* all_rows;  // of the query head, [padded_rows]
    float* all_sums;                // of the query head, [padded_rows / kBlockQ, kSumsPerTile]
    device::Visibility see;
    device::DropoutStream dropout;
    RowTileList tiles;
    Tile16<kBlockKV, kHeadDim> k;       // [kBlockKV, H]
    Tile16<kBlockKV, kHeadDim> v;       // [kBlockKV, Hv]
    Tile16<kBlockQ, kHeadDim> q[2];     // [kBlockQ, H]
    Tile16<kBlockQ, kHeadDim> dout[2];  // [kBlockQ, Hv]
    Tile16<kBlockQ, kBlockKV> p, ds;    // [kBlockQ, kBlockKV]
    alignas(16) RowStatistics rows[2][kBlockQ];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kBlockQ == kRowUnit, "the scratch holds dQ in tiles of kRowUnit rows");
  static_assert(kMinBlocksPerSM * (kSharedBytes + 1024) <= 164 * 1024,
                "the CTAs must fit one multiprocessor of compute capability 8.0");
};

// See Features: what the plain instance leaves out.
inline Features features_needed(const AttentionParams& params) {
  const bool is_general = params.mask.data != nullptr || params.query_segment_ids.data != nullptr ||
                          params.dropout_threshold > 0 || params.H % 8 != 0 || params.Hv % 8 != 0;
  return is_general ? Features::kGeneral : Features::kPlain;
}

// Padded head dim of the instance that runs H and Hv; 0 where none does.
constexpr int64_t padded_head_dim(int64_t H, int64_t Hv) {
  const int64_t larger = H > Hv ? H : Hv;
  return larger <= 64 ? 64 : larger <= 128 ? 128 : 0;
}

constexpr int64_t ceil_div(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

}  // namespace jaxflash::fa1_sm80
