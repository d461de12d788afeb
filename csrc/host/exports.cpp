// The library's C functions, for Python's ctypes: what the machine and the kernel set can do. They need no GPU and no
// driver, never throw, and answer with a reason where something is missing.
#include <cstddef>
#include <exception>

#include "host/dispatch.h"
#include "host/driver.h"
#include "host/error.h"

#ifndef FLASH_ATTN_VERSION
#error "the build defines FLASH_ATTN_VERSION, a string"
#endif
#define FLASH_ATTN_EXPORT extern "C" __attribute__((visibility("default")))

// The package version this library was built for, "2.9.0".
FLASH_ATTN_EXPORT const char* flash_attn_version(void) { return FLASH_ATTN_VERSION; }

// The number of GPUs the driver sees, or -1 with the reason in `error` (n bytes): no driver, or one that fails.
FLASH_ATTN_EXPORT int flash_attn_device_count(char* error, size_t n) {
  flash_attn::copy_text(error, n, "");
  try {
    const flash_attn::Driver& cuda = flash_attn::driver();
    int count = 0;
    flash_attn::check(cuda, cuda.cuDeviceGetCount(&count), "counting the GPUs");
    return count;
  } catch (const std::exception& failure) {
    flash_attn::copy_text(error, n, failure.what());
    return -1;
  }
}

// 1 where kernels of the set can run on the device, or can be compiled for it at first use, else 0. `reason` (n bytes) says why, in either case.
FLASH_ATTN_EXPORT int flash_attn_supported(int device, char* reason, size_t n) {
  try {
    return flash_attn::supported(device, reason, n) ? 1 : 0;
  } catch (const std::exception& failure) {
    flash_attn::copy_text(reason, n, failure.what());
    return 0;
  }
}

// The device's compute capability as 10 * major + minor, or -1.
FLASH_ATTN_EXPORT int flash_attn_capability(int device) {
  try {
    return flash_attn::device_facts(flash_attn::driver(), device).capability();
  } catch (const std::exception&) {
    return -1;
  }
}
