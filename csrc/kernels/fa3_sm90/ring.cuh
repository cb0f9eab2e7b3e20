// Position in a ring of stages in shared memory.
#pragma once

#include <cstdint>

namespace jaxflash::fa3_sm90 {

// One of kStages buffers, and the parity of the phase that its barriers are in.
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

}  // namespace jaxflash::fa3_sm90
