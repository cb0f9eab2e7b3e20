// Tiles, shared memory, barriers and registers of the FlashAttention-3 forward.
//
// Facts only: the kernel, its launch and its instantiations all derive from here.
#pragma once

#include <cstdint>

#include "device/visibility.cuh"
#include "mma/wgmma_tile.cuh"

namespace jaxflash::fa3_sm90 {

// What a cluster works on: kCluster neighbouring blocks of query rows of one head. Positions count
// inside the batch entry. Written to the shared memory of every CTA of the cluster, 16 bytes at a
// time.
struct alignas(16) WorkTile {
  int row_begin;  // first query row of the cluster, -1 = no more work
  int head, batch, kv_head;
  int block_begin, block_end;  // blocks of kBlockKV keys that any of the rows sees, may be empty
  int unused[2];
  device::Window see;
};
static_assert(sizeof(WorkTile) == 48, "three 16-byte stores");

// kHeadDim is the padded head dim: both H and Hv are at most this.
template <class ElementType, int kPaddedHeadDim, int kClusterSize = 1>
struct ForwardConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kPaddedHeadDim;
  // CTAs that share every K/V tile: each fetches a part of it for all. Measured on an H200,
  // 2026-11-30, bf16, 16k tokens: pairs lose 2 to 23 % to single CTAs (docs/kernels/fa3_sm90.md).
  static constexpr int kCluster = kClusterSize;

  // Warpgroups of 64 query rows each. Measured there at head dim 64, not causal, in TFLOP/s at 2k
  // and 16k: three with blocks of 128 keys 533 and 612, two 472 and 515, two with 192 keys 436 and
  // 507; two stages instead of three 530 and 610.
  static constexpr int kNumConsumers = kHeadDim == 64 ? 3 : 2;
  static constexpr int kBlockQ = 64 * kNumConsumers;
  static constexpr int kBlockKV = 128;
  static constexpr int kNumStages = kHeadDim == 64 ? 3 : 2;  // of K and of V
  static constexpr int kNumTileSlots = 2;                    // tile being worked on, and the next
  static constexpr int kNumThreads = 128 * (kNumConsumers + 1);
  // Of each thread. The launch allots 168 (128 with three consumers); the producer gives away.
  static constexpr int kProducerRegisters = kNumConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kNumConsumers == 2 ? 240 : 160;

  using QueryTile = mma::WgmmaTile<64, kHeadDim>;
  using KVTile = mma::WgmmaTile<kBlockKV, kHeadDim>;

  // The barrier table is in forward.cuh.
  struct SharedStorage {
    // Of two tiles; the output of a finished tile leaves through its queries' place.
    QueryTile q[2][kNumConsumers];
    KVTile k[kNumStages];
    KVTile v[kNumStages];
    WorkTile tiles[kNumTileSlots];
    uint64_t tile_full[kNumTileSlots], tile_empty[kNumTileSlots];
    uint64_t q_full[2][kNumConsumers], q_empty[2][kNumConsumers];
    uint64_t k_full[kNumStages], k_empty[kNumStages];
    uint64_t v_full[kNumStages], v_empty[kNumStages];
  };

  static_assert(kCluster == 1 || kCluster == 2, "larger clusters are slower");
  static_assert(kBlockKV % 16 == 0, "P is consumed 16 keys at a time");
  static_assert(kBlockKV <= 256, "a box of a tensor map has at most 256 rows");
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "one CTA must fit one multiprocessor");
};

// Named barriers, by consumer warpgroup; 0 is __syncthreads.
enum class NamedBarrier : int {
  kTurn = 1,   // + consumer: it may issue its products now
  kGroup = 4,  // + consumer: its four warps among themselves
};

// Position in a ring of kStages buffers, and the parity of its phase.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The head dim of the instance that runs H and Hv; 0 where none does.
constexpr int padded_head_dim(int64_t H, int64_t Hv) {
  const int64_t larger = H > Hv ? H : Hv;
  return larger <= 64 ? 64 : larger <= 128 ? 128 : 0;
}

}  // namespace jaxflash::fa3_sm90
