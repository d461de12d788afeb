// The C functions of libtorch's stable ABI that the library calls, declared here so that building it needs no torch.
//
// They are frozen by torch: a function is never changed, only superseded. All of them are in torch 2.10 except those
// marked weak, which are null where the running torch has none. tests/unit compiles this header together with torch's
// own ones, where any difference is an error.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
using AOTITorchError = int32_t;  // 0 is success

// A boxed value: the bytes of a tensor handle (owned by whoever holds the stack), double, int64_t or bool, zero padded. Of
// an optional: 0 for none, or the address of a boxed value made by `new`, which whoever holds the stack deletes.
using StableIValue = uint64_t;

// Registration.
AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* k, const char* file, uint32_t line,
                                            TorchLibraryHandle* ret_new_torch_lib);
AOTITorchError torch_library_impl(TorchLibraryHandle self, const char* name,
                                  void (*fn)(StableIValue*, uint64_t, uint64_t), uint64_t extension_build_version);
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle tlh);

// A tensor's facts. Sizes and strides are borrowed.
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* ret_dim);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** ret_sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** ret_strides);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* ret_dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* ret_device_type);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* ret_device_index);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** ret_data_ptr);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** ret_data_ptr);

// Making, copying and freeing tensors. New tensors are owned by the caller.
AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes_ptr, const int64_t* strides_ptr,
                                        int32_t dtype, int32_t device_type, int32_t device_index,
                                        AtenTensorHandle* ret_new_tensor);
AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle self, int64_t ndim, const int64_t* sizes_ptr,
                                              const int64_t* strides_ptr, int64_t storage_offset,
                                              AtenTensorHandle* ret_new_tensor);
AOTITorchError aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle src, int32_t non_blocking);
AOTITorchError aoti_torch_zero_(AtenTensorHandle self);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);

// Constants.
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();

// Null in a torch without CUDA. The stream is borrowed.
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

// Null before torch 2.13: the message of this thread's last exception inside torch.
__attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

}  // extern "C"

namespace flash_attn {

// The torch whose conventions the library follows, as torch packs it: major, minor, patch and tag from the top byte.
constexpr uint64_t kTorchTargetVersion = (uint64_t{2} << 56) | (uint64_t{10} << 48);

}  // namespace flash_attn
