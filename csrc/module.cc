// Python module jaxflash._C: capsules of the FFI handlers and facts about the build.
#include <nanobind/nanobind.h>

#include "ffi/handlers.h"
#include "launch/cpu.h"

namespace nb = nanobind;

namespace {

nb::capsule handler_capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

nb::dict registrations() {
  nb::dict handlers;
  handlers["jaxflash_cpu_forward_v1"] = handler_capsule(jaxflash_cpu_forward_v1);
  handlers["jaxflash_cpu_backward_v1"] = handler_capsule(jaxflash_cpu_backward_v1);
  return handlers;
}

nb::dict build_info() {
  nb::dict info;
  info["version"] = JAXFLASH_VERSION;
  info["compiler"] = JAXFLASH_COMPILER;
  info["ffi_api_version"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  info["cuda"] = JAXFLASH_CUDA_STATE;
  return info;
}

nb::tuple cpu_workspace_floats(int64_t head_dim, int64_t value_head_dim) {
  return nb::make_tuple(jaxflash::launch::cpu_forward_slot_floats(head_dim, value_head_dim),
                        jaxflash::launch::cpu_backward_slot_floats(head_dim, value_head_dim));
}

}  // namespace

NB_MODULE(_C, module) {
  module.def("registrations", &registrations, "FFI target name -> handler capsule.");
  module.def("build_info", &build_info,
             "version, compiler, ffi_api_version (major, minor) of the headers, and cuda: why the "
             "CUDA kernels are not in this build.");
  module.def("cpu_isa", &jaxflash::launch::cpu_isa, "Instruction set the CPU kernels run on.");
  module.def("cpu_workspace_floats", &cpu_workspace_floats, nb::arg("head_dim"),
             nb::arg("value_head_dim"),
             "(forward, backward) floats that one worker's workspace slot needs.");
}
