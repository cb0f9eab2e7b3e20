// Tiles, shared memory, barriers and registers of the FlashAttention-3 forward.
//
// Facts only: the kernel, its launch and its instantiations all derive from here.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/visibility.cuh"
#include "kernels/fa3_sm90/features.h"
#include "kernels/fa3_sm90/forward_blocks.cuh"
#include "kernels/fa3_sm90/ring.cuh"
#include "mma/wgmma_tile.cuh"

namespace jaxflash::fa3_sm90 {

// What a CTA works on: a block of query rows of one head. Positions count inside the batch entry.
struct WorkTile {
  int row_begin;  // first query row, -1 = no more work
  int head, batch, kv_head;
  int block_begin, block_end;  // blocks of kBlockKV keys that any of the rows sees, may be empty
  device::Window see;
};

// Padded head dims: of queries and keys, at least H, and of values and output, at least Hv.
template <class ElementType, int kPaddedHeadDim, int kPaddedHeadDimV, Features kInstanceFeatures>
struct ForwardConfig {
  using Element = ElementType;
  static constexpr bool kIsGeneral = kInstanceFeatures == Features::kGeneral;
  static constexpr int kHeadDim = kPaddedHeadDim, kHeadDimV = kPaddedHeadDimV;

  // Warpgroups of 64 query rows each. Measured on an H200, 2026-11-30, at head dim 64, bf16, 16k
  // tokens, not causal, in TFLOP/s at 2k and 16k: three with blocks of 128 keys 533 and 612, two
  // 472 and 515, two with 192 keys 436 and 507; two stages instead of three 530 and 610. The
  // general instance takes two all the same: blocks of a mask are mostly of 128 rows, and 192 rows
  // meet up to twice as many of them.
  static constexpr int kNumConsumers = kHeadDim == 64 && !kIsGeneral ? 3 : 2;
  static constexpr int kBlockQ = 64 * kNumConsumers;
  static constexpr int kBlockKV = kHeadDimV <= 128 ? 128 : kHeadDim <= 192 ? 112 : 80;
  static constexpr int kNumStages = kHeadDim > 64 ? 2 : kIsGeneral ? 4 : 3;  // of K and of V
  // With one, the queries of a tile are fetched when the output of the tile before it has left.
  static constexpr int kNumQueryBuffers = kHeadDim <= 128 ? 2 : 1;
  static constexpr int kNumTileSlots = 2;  // tile being worked on, and the next
  static constexpr int kNumThreads = 128 * (kNumConsumers + 1);
  // Of each thread. The launch allots 168 (128 with three consumers); the producer gives away.
  static constexpr int kProducerRegisters = kNumConsumers == 3 ? 32 : kIsGeneral ? 40 : 24;
  static constexpr int kConsumerRegisters = kNumConsumers == 3 ? 160 : kIsGeneral ? 232 : 240;
  // What benchmarks/ablation.cu turns off, one at a time (docs/kernels/fa3_sm90.md, Ablation).
  static constexpr bool kTakesTurns = kHeadDim <= 128;  // the consumers issue in turns (ping-pong)
  static constexpr bool kOverlaps = true;   // a softmax runs under its own consumer's P V
  static constexpr bool kHoldsWait = true;  // the wait for P V stays below the exponentials

  using QueryTile = mma::WgmmaTile<64, kHeadDim>;
  using KeyTile = mma::WgmmaTile<kBlockKV, kHeadDim>;
  using ValueTile = mma::WgmmaTile<kBlockKV, kHeadDimV>;
  using Tile = std::conditional_t<kIsGeneral, MaskedTile<kNumConsumers>, WorkTile>;

  // Of the general instance alone: what its scheduler tells the others.
  static constexpr int kNumWords = 4;
  // Blocks of a batch entry whose segments are kept.
  static constexpr int kNumKnownIds = kHeadDim <= 192 ? 512 : 128;
  using WordRing = Ring<kNumWords>;
  struct BlockWords {
    device::IdRange key_ids[kNumKnownIds];  // the scheduler's own
    BlockWord<kNumConsumers> words[kNumWords];
    uint64_t word_full[kNumWords], word_empty[kNumWords];
  };
  struct Nothing {};

  // The barrier table is in forward.cuh.
  struct SharedStorage : std::conditional_t<kIsGeneral, BlockWords, Nothing> {
    // The output of a finished tile leaves through its queries' place.
    QueryTile q[kNumQueryBuffers][kNumConsumers];
    KeyTile k[kNumStages];
    ValueTile v[kNumStages];
    Tile tiles[kNumTileSlots];
    uint64_t tile_full[kNumTileSlots], tile_empty[kNumTileSlots];
    uint64_t q_full[kNumQueryBuffers][kNumConsumers];
    uint64_t output_staged[kNumQueryBuffers][kNumConsumers];
    uint64_t k_full[kNumStages], k_empty[kNumStages];
    uint64_t v_full[kNumStages], v_empty[kNumStages];
  };

  static_assert(kHeadDimV <= kHeadDim, "the output leaves through the queries' place");
  static_assert(kBlockKV % 16 == 0, "P is consumed 16 keys at a time");
  static_assert(kBlockKV <= 256, "a box of a tensor map has at most 256 rows");
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "one CTA must fit one multiprocessor");
};

// Named barriers, by consumer warpgroup; 0 is __syncthreads.
enum class NamedBarrier : int {
  kTurn = 1,   // + consumer: it may issue its products now
  kGroup = 4,  // + consumer: its four warps among themselves
};

}  // namespace jaxflash::fa3_sm90
