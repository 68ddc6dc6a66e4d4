#include "cuda_torch.hpp"

#include <dlfcn.h>

#include "flashqla/error.hpp"

namespace flashqla::bindings {
namespace {

using CurrentStream = AOTITorchError (*)(std::int32_t device, void** stream);

/// Torch's function of that name is part of its stable C interface, but lies in libtorch_cuda, which a torch for the CPU lacks.
/// It is looked up by name and not linked, so that this library can be built, loaded and asked for its reasons beside any torch.
/// Importing torch has loaded libtorch_cuda if there is one, out of the scope where symbols are found by themselves.
CurrentStream find_current_stream() {
  void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<CurrentStream>(
      dlsym(library == nullptr ? RTLD_DEFAULT : library, "aoti_torch_get_current_cuda_stream"));
}

CurrentStream found() {
  static const CurrentStream function = find_current_stream();
  return function;
}

}  // namespace

std::string missing_in_torch() { return found() != nullptr ? "" : "the installed torch is built without CUDA"; }

Stream current_stream(int device) {
  if (found() == nullptr) throw DeviceError(missing_in_torch());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(found()(device, &stream));
  return {stream};
}

}  // namespace flashqla::bindings
