// The one run-time choice of an instruction set.
#pragma once

#include "kernels/cpu/kernels.h"

namespace jaxflash::launch {

// Chosen at the first call and kept for the life of the process.
const cpu::Kernels& cpu_kernels();

}  // namespace jaxflash::launch
