// More of fake_torch_gpu.cpp for torch before 2.7, where the library registers its operators by the C++ API: what it
// registers for "CUDA" goes to CPU tensors. Built with that torch's _GLIBCXX_USE_CXX11_ABI.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

namespace c10 {

enum class DispatchKey : uint16_t;

DispatchKey parseDispatchKey(const std::string& k) {
  const char* const name = _GLIBCXX_USE_CXX11_ABI
                               ? "_ZN3c1016parseDispatchKeyERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
                               : "_ZN3c1016parseDispatchKeyERKSs";
  void* const c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  void* const address = c10 != nullptr ? dlsym(c10, name) : nullptr;
  if (address == nullptr) abort();
  const auto real = reinterpret_cast<DispatchKey (*)(const std::string&)>(address);
  Dl_info caller;
  const bool ours = dladdr(__builtin_return_address(0), &caller) != 0 && strstr(caller.dli_fname, "libflash_attn.so");
  return real(ours && k == "CUDA" ? "CPU" : k);
}

}  // namespace c10
