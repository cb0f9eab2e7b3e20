// What decides how much scratch a GPU implementation needs: static sizes alone, so that Python can
// ask before the call.
#pragma once

#include <cstdint>

namespace jaxflash::launch {

struct WorkspaceSizes {
  int64_t B, T, S, N, K, H, Hv;
  int64_t num_sequences;   // of a packed batch entry, -1 where nothing is packed
  int64_t dbias_elements;  // of a bias gradient that is wanted and either not float32 or
                           // deterministic, else 0
  bool is_deterministic;
};

}  // namespace jaxflash::launch
