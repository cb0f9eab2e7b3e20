// Python module jaxflash._C: capsules of the FFI handlers and facts about the build.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "ffi/handlers.h"
#include "launch/cpu.h"
#if defined(JAXFLASH_HAS_CUDA)
#include "launch/fa1.h"
#include "launch/fa2.h"
#include "launch/fa3.h"
#endif

namespace nb = nanobind;

namespace {

nb::tuple handler(XLA_FFI_Handler* handler, const char* platform) {
  return nb::make_tuple(nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET"),
                        platform);
}

nb::dict registrations() {
  nb::dict handlers;
  handlers["jaxflash_cpu_forward_v1"] = handler(jaxflash_cpu_forward_v1, "cpu");
  handlers["jaxflash_cpu_backward_v1"] = handler(jaxflash_cpu_backward_v1, "cpu");
#if defined(JAXFLASH_HAS_CUDA)
  handlers["jaxflash_fa1_forward_v1"] = handler(jaxflash_fa1_forward_v1, "CUDA");
  handlers["jaxflash_fa1_backward_v1"] = handler(jaxflash_fa1_backward_v1, "CUDA");
  handlers["jaxflash_fa2_forward_v1"] = handler(jaxflash_fa2_forward_v1, "CUDA");
  handlers["jaxflash_fa2_backward_v1"] = handler(jaxflash_fa2_backward_v1, "CUDA");
  handlers["jaxflash_fa3_forward_v1"] = handler(jaxflash_fa3_forward_v1, "CUDA");
  handlers["jaxflash_fa3_backward_v1"] = handler(jaxflash_fa3_backward_v1, "CUDA");
#endif
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

#if defined(JAXFLASH_HAS_CUDA)
nb::tuple cuda_workspace_floats(const std::string& implementation, int64_t B, int64_t T, int64_t S,
                                int64_t N, int64_t K, int64_t H, int64_t Hv, int64_t num_sequences,
                                int64_t dbias_elements, bool is_deterministic) {
  const jaxflash::launch::WorkspaceSizes sizes = {
      B, T, S, N, K, H, Hv, num_sequences, dbias_elements, is_deterministic};
  if (implementation == "fa1") {
    return nb::make_tuple(jaxflash::launch::fa1_forward_workspace_floats(sizes),
                          jaxflash::launch::fa1_backward_workspace_floats(sizes));
  }
  if (implementation == "fa2") {
    return nb::make_tuple(jaxflash::launch::fa2_forward_workspace_floats(sizes),
                          jaxflash::launch::fa2_backward_workspace_floats(sizes));
  }
  if (implementation == "fa3") {
    return nb::make_tuple(jaxflash::launch::fa3_forward_workspace_floats(sizes),
                          jaxflash::launch::fa3_backward_workspace_floats(sizes));
  }
  throw nb::value_error(("no implementation " + implementation).c_str());
}
#endif

}  // namespace

NB_MODULE(_C, module) {
  module.def("registrations", &registrations, "FFI target name -> (handler capsule, platform).");
  module.def(
      "build_info", &build_info,
      "version, compiler, ffi_api_version (major, minor) of the headers, and cuda: the toolkit "
      "and architectures of the CUDA kernels, or why they are not in this build.");
  module.def("cpu_isa", &jaxflash::launch::cpu_isa, "Instruction set the CPU kernels run on.");
  module.def("cpu_workspace_floats", &cpu_workspace_floats, nb::arg("head_dim"),
             nb::arg("value_head_dim"),
             "(forward, backward) floats that one worker's workspace slot needs.");
#if defined(JAXFLASH_HAS_CUDA)
  module.def("cuda_workspace_floats", &cuda_workspace_floats, nb::arg("implementation"),
             nb::arg("B"), nb::arg("T"), nb::arg("S"), nb::arg("N"), nb::arg("K"), nb::arg("H"),
             nb::arg("Hv"), nb::arg("num_sequences"), nb::arg("dbias_elements"),
             nb::arg("is_deterministic"),
             "(forward, backward) floats of workspace that a GPU implementation needs.");
#endif
}
