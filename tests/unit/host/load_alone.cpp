// Loads the host library whose path is the first argument, beside a libtorch that does nothing, and says what it says of
// itself. For processors that are emulated: no Python and no torch of that processor is needed.
#include <dlfcn.h>

#include <cstdio>

namespace {

template <typename Function>
Function symbol(void* library, const char* name) {
  void* const address = dlsym(library, name);
  if (address == nullptr) printf("%s: %s\n", name, dlerror());
  return reinterpret_cast<Function>(address);
}

}  // namespace

int main(int, char** arguments) {
  void* const library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) {
    printf("%s\n", dlerror());
    return 1;
  }
  char text[512] = "";
  const auto version = symbol<const char* (*)()>(library, "flash_attn_version");
  const auto count = symbol<int (*)(char*, size_t)>(library, "flash_attn_device_count");
  const auto registered = symbol<const int*>(RTLD_DEFAULT, "registered_operators");
  if (version == nullptr || count == nullptr || registered == nullptr) return 1;
  const int devices = count(text, sizeof text);  // throws inside, and catches
  printf("%s\n%d\n%d %s\n", version(), *registered, devices, text);
  return 0;
}
