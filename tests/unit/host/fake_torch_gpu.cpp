// Preloaded into a Python with a CPU-only torch, makes CPU tensors pass for tensors on cuda:0, so that the built library
// itself runs: its operators are registered for CPU tensors, and the fake driver computes on their memory.
//
// Everything else goes to the real libtorch. FAKE_TORCH_FAIL names a function that fails as torch does: error code 1.
// Memory that the library allocates begins as NaN. fake_torch_live() counts the tensors made by the library, and not freed
// by it, since fake_torch_forget().
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "host/torch_shim.h"

namespace {

template <typename Function>
Function real(const char* name) {
  void* const library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void* const address = library != nullptr ? dlsym(library, name) : nullptr;
  if (address == nullptr) abort();
  return reinterpret_cast<Function>(address);
}

bool told_to_fail(const char* name) {
  const char* const told = getenv("FAKE_TORCH_FAIL");
  return told != nullptr && strcmp(told, name) == 0;
}

// What was on the GPU before: NaN, in every floating-point dtype.
void poison(AtenTensorHandle tensor, int64_t ndim, const int64_t* sizes, int32_t dtype) {
  void* data = nullptr;
  // The older name, which torch before 2.10 has too.
  if (real<AOTITorchError (*)(AtenTensorHandle, void**)>("aoti_torch_get_data_ptr")(tensor, &data) != 0) abort();
  size_t bytes = dtype == real<int32_t (*)()>("aoti_torch_dtype_float32")()         ? 4
                 : dtype == real<int32_t (*)()>("aoti_torch_dtype_float8_e4m3fn")() ? 1
                                                                                    : 2;
  for (int64_t i = 0; i < ndim; ++i) bytes *= static_cast<size_t>(sizes[i]);
  if (bytes > 0) memset(data, 0xff, bytes);
}

// Calls come from several threads.
std::mutex live_mutex;
std::set<AtenTensorHandle>& live() {
  static std::set<AtenTensorHandle> handles;
  return handles;
}

void made(AtenTensorHandle tensor) {
  const std::lock_guard<std::mutex> lock(live_mutex);
  live().insert(tensor);
}

}  // namespace

extern "C" {

// torch frees what it was given back by itself, and may use the address again: call this before each operator.
void fake_torch_forget() {
  const std::lock_guard<std::mutex> lock(live_mutex);
  live().clear();
}
int fake_torch_live() {
  const std::lock_guard<std::mutex> lock(live_mutex);
  return static_cast<int>(live().size());
}

AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* k, const char* file, uint32_t line,
                                            TorchLibraryHandle* ret_new_torch_lib) {
  if (strcmp(ns, "flash_attn") == 0 && strcmp(k, "CUDA") == 0) k = "CPU";
  return real<decltype(&aoti_torch_library_init_impl)>("aoti_torch_library_init_impl")(ns, k, file, line,
                                                                                       ret_new_torch_lib);
}

int32_t aoti_torch_device_type_cuda() {
  return real<decltype(&aoti_torch_device_type_cuda)>("aoti_torch_device_type_cpu")();
}

AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* ret_device_index) {
  *ret_device_index = 0;
  return 0;
}

AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes_ptr, const int64_t* strides_ptr, int32_t dtype,
                                        int32_t device_type, int32_t, AtenTensorHandle* ret_new_tensor) {
  if (told_to_fail("aoti_torch_empty_strided")) return 1;
  const AOTITorchError error = real<decltype(&aoti_torch_empty_strided)>("aoti_torch_empty_strided")(
      ndim, sizes_ptr, strides_ptr, dtype, device_type, -1, ret_new_tensor);
  if (error == 0) {
    made(*ret_new_tensor);
    poison(*ret_new_tensor, ndim, sizes_ptr, dtype);
  }
  return error;
}

AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle self, int64_t ndim, const int64_t* sizes_ptr,
                                              const int64_t* strides_ptr, int64_t storage_offset,
                                              AtenTensorHandle* ret_new_tensor) {
  const AOTITorchError error = real<decltype(&aoti_torch__reinterpret_tensor)>("aoti_torch__reinterpret_tensor")(
      self, ndim, sizes_ptr, strides_ptr, storage_offset, ret_new_tensor);
  if (error == 0) made(*ret_new_tensor);
  return error;
}

AOTITorchError aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle src, int32_t non_blocking) {
  if (told_to_fail("aoti_torch_copy_")) return 1;
  return real<decltype(&aoti_torch_copy_)>("aoti_torch_copy_")(self, src, non_blocking);
}

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor) {
  {
    const std::lock_guard<std::mutex> lock(live_mutex);
    live().erase(tensor);
  }
  return real<decltype(&aoti_torch_delete_tensor_object)>("aoti_torch_delete_tensor_object")(tensor);
}

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream) {
  *ret_stream = reinterpret_cast<void*>(static_cast<uintptr_t>(0x500 + device_index));
  return 0;
}

}  // extern "C"
