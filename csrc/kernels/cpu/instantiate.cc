// The CPU kernels for one instruction set; CMake compiles this file once per set and names the
// namespace (JF_CPU_ISA), the table (JF_CPU_TABLE) and the label (JF_CPU_LABEL).
#include "kernels/cpu/backward.h"
#include "kernels/cpu/bias_gradient.h"
#include "kernels/cpu/forward.h"
#include "kernels/cpu/kernels.h"

namespace jaxflash::cpu {

extern const Kernels JF_CPU_TABLE = {
    JF_CPU_LABEL,
    &JF_CPU_ISA::forward_task,
    &JF_CPU_ISA::backward_task<JF_CPU_ISA::Owned::kQueries>,
    &JF_CPU_ISA::backward_task<JF_CPU_ISA::Owned::kKeys>,
    &JF_CPU_ISA::bias_gradient_task,
};

}  // namespace jaxflash::cpu
