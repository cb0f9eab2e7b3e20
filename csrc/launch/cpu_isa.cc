#include "launch/cpu_isa.h"

#include <cstdlib>
#include <cstring>

#include "launch/cpu.h"

namespace jaxflash::launch {
namespace {

#if defined(JAXFLASH_X86_64_LEVELS)
bool has_x86_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

bool has_x86_v4() {
  return has_x86_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

const cpu::Kernels& choose_kernels() {
#if defined(JAXFLASH_X86_64_LEVELS)
  __builtin_cpu_init();
  const char* requested = std::getenv("JAXFLASH_CPU_ISA");
  const auto may_use = [&](const cpu::Kernels& kernels) {
    return requested == nullptr || std::strcmp(requested, kernels.isa) == 0;
  };
  if (has_x86_v4() && may_use(cpu::kKernelsX86V4)) return cpu::kKernelsX86V4;
  if (has_x86_v3() && may_use(cpu::kKernelsX86V3)) return cpu::kKernelsX86V3;
#endif
  return cpu::kKernelsBaseline;
}

}  // namespace

const cpu::Kernels& cpu_kernels() {
  static const cpu::Kernels& kernels = choose_kernels();
  return kernels;
}

const char* cpu_isa() { return cpu_kernels().isa; }

}  // namespace jaxflash::launch
