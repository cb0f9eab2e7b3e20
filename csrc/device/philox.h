// Philox4x32 with 7 rounds: the counter-based generator behind dropout.
//
// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, which
// also reports that 7 rounds pass BigCrush. Stateless, so that forward, backward, any tiling and
// any sharding draw the same bits for the same element.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define JF_HOST_DEVICE __host__ __device__
#else
#define JF_HOST_DEVICE
#endif

namespace jaxflash::device {

struct PhiloxWords {
  uint32_t x, y, z, w;
};

// Internal linkage and forced inlining: this header is compiled for several instruction sets, and
// a shared copy could carry instructions that the running CPU lacks.
[[gnu::always_inline]] JF_HOST_DEVICE static inline PhiloxWords philox4x32_7(PhiloxWords counter,
                                                                             uint32_t key0,
                                                                             uint32_t key1) {
  constexpr uint32_t kMultiplierX = 0xD2511F53, kMultiplierZ = 0xCD9E8D57;
  constexpr uint32_t kWeylX = 0x9E3779B9, kWeylZ = 0xBB67AE85;
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 7
#endif
  for (int round = 0; round < 7; ++round) {
    const uint64_t product_x = uint64_t{kMultiplierX} * counter.x;
    const uint64_t product_z = uint64_t{kMultiplierZ} * counter.z;
    counter = {static_cast<uint32_t>(product_z >> 32) ^ counter.y ^ key0,
               static_cast<uint32_t>(product_z),
               static_cast<uint32_t>(product_x >> 32) ^ counter.w ^ key1,
               static_cast<uint32_t>(product_x)};
    key0 += kWeylX;
    key1 += kWeylZ;
  }
  return counter;
}

}  // namespace jaxflash::device

#undef JF_HOST_DEVICE
