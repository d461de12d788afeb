#include "host/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <mutex>

#include "host/error.h"

// glibc 2.34 moved these functions from libdl into libc under a new symbol version. Asking for the version they always
// had keeps the library loadable on glibc 2.28, whatever glibc it was linked on; libdl.so.2 is linked for the old ones.
#if defined(__GLIBC__) && defined(__x86_64__)
#define FLASH_ATTN_DL_VERSION "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define FLASH_ATTN_DL_VERSION "GLIBC_2.17"
#endif
#ifdef FLASH_ATTN_DL_VERSION
__asm__(".symver dlopen, dlopen@" FLASH_ATTN_DL_VERSION);
__asm__(".symver dlsym, dlsym@" FLASH_ATTN_DL_VERSION);
__asm__(".symver dlerror, dlerror@" FLASH_ATTN_DL_VERSION);
__asm__(".symver dladdr, dladdr@" FLASH_ATTN_DL_VERSION);
#endif

namespace flash_attn {

namespace {

template <typename Function>
void bind(void* library, const char* symbol, Function& function) {
  void* const address = dlsym(library, symbol);
  if (address == nullptr) {
    fail("the NVIDIA driver (libcuda.so.1) has no %s; it is too old, CUDA 12 or newer is needed.", symbol);
  }
  function = reinterpret_cast<Function>(address);
}

void load(Driver& cuda) {
  // Never closed: a driver cannot be unloaded, and a second dlopen after a failure only counts a reference.
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    fail("no NVIDIA driver: libcuda.so.1 cannot be loaded (%s). A GPU and its driver are needed to run kernels.",
         why != nullptr ? why : "no reason given");
  }
  bind(library, "cuInit", cuda.cuInit);
  bind(library, "cuDriverGetVersion", cuda.cuDriverGetVersion);
  bind(library, "cuGetErrorName", cuda.cuGetErrorName);
  bind(library, "cuGetErrorString", cuda.cuGetErrorString);
  bind(library, "cuDeviceGetCount", cuda.cuDeviceGetCount);
  bind(library, "cuDeviceGet", cuda.cuDeviceGet);
  bind(library, "cuDeviceGetName", cuda.cuDeviceGetName);
  bind(library, "cuDeviceGetAttribute", cuda.cuDeviceGetAttribute);
  bind(library, "cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain);
  bind(library, "cuCtxGetCurrent", cuda.cuCtxGetCurrent);
  bind(library, "cuCtxPushCurrent_v2", cuda.cuCtxPushCurrent);
  bind(library, "cuCtxPopCurrent_v2", cuda.cuCtxPopCurrent);
  bind(library, "cuThreadExchangeStreamCaptureMode", cuda.cuThreadExchangeStreamCaptureMode);
  bind(library, "cuModuleLoadDataEx", cuda.cuModuleLoadDataEx);
  bind(library, "cuModuleUnload", cuda.cuModuleUnload);
  bind(library, "cuModuleGetFunction", cuda.cuModuleGetFunction);
  bind(library, "cuFuncGetAttribute", cuda.cuFuncGetAttribute);
  bind(library, "cuFuncSetAttribute", cuda.cuFuncSetAttribute);
  bind(library, "cuMemsetD32Async", cuda.cuMemsetD32Async);
  bind(library, "cuTensorMapEncodeTiled", cuda.cuTensorMapEncodeTiled);
  bind(library, "cuLaunchKernel", cuda.cuLaunchKernel);
  bind(library, "cuLaunchKernelEx", cuda.cuLaunchKernelEx);
  check(cuda, cuda.cuInit(0), "initialising the NVIDIA driver");
  int version = 0;
  check(cuda, cuda.cuDriverGetVersion(&version), "reading the driver's version");
  cuda.overlaps_launches = version >= 12030;
}

std::mutex load_mutex;
std::atomic<bool> loaded{false};
Driver loaded_driver;

}  // namespace

const Driver& driver() {
  if (!loaded.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(load_mutex);
    if (!loaded.load(std::memory_order_relaxed)) {
      load(loaded_driver);
      loaded.store(true, std::memory_order_release);
    }
  }
  return loaded_driver;
}

ErrorText::ErrorText(const Driver& cuda, CUresult error) {
  const char* name = nullptr;
  const char* description = nullptr;
  if (cuda.cuGetErrorName(error, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown CUDA error";
  if (cuda.cuGetErrorString(error, &description) != CUDA_SUCCESS || description == nullptr) description = "?";
  snprintf(text_, sizeof(text_), "%s (%d, %s)", name, error, description);
}

void check(const Driver& cuda, CUresult error, const char* what) {
  if (__builtin_expect(error != CUDA_SUCCESS, 0)) fail("%s failed: %s.", what, ErrorText(cuda, error).c_str());
}

DeviceFacts device_facts(const Driver& cuda, int ordinal) {
  DeviceFacts facts = {};
  int count = 0;
  check(cuda, cuda.cuDeviceGetCount(&count), "counting the GPUs");
  if (ordinal < 0 || ordinal >= count) fail("there is no device %d; the driver sees %d GPU(s).", ordinal, count);
  facts.ordinal = ordinal;
  check(cuda, cuda.cuDeviceGet(&facts.handle, ordinal), "opening the GPU");
  check(cuda, cuda.cuDeviceGetName(facts.name, sizeof(facts.name), facts.handle), "reading the GPU's name");
  const auto attribute = [&](int which) {
    int value = 0;
    check(cuda, cuda.cuDeviceGetAttribute(&value, which, facts.handle), "reading the GPU's attributes");
    return value;
  };
  facts.major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  facts.minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  facts.multiprocessors = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  facts.shared_bytes = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  return facts;
}

const char* library_path() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&library_path), &info) == 0) return nullptr;
  return info.dli_fname;
}

}  // namespace flash_attn
