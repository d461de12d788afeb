// The functions of torch_shim.h that torch 2.4 to 2.9 lack, made of what those versions have. Only the host library of
// a per-torch row holds this file; everything else of it is the same source as for torch >= 2.10.
//
//            registration                        zero_           data pointers
//   2.4, 2.5 here, on torch::Library             here, ATen      here
//   2.6      here, on torch::Library             torch's own     here
//   2.7-2.9  torch's, under an older name        torch's own     here
//
// For 2.4 to 2.6 the C++ API of exactly that minor version is used, with that version's headers and its
// _GLIBCXX_USE_CXX11_ABI. From 2.7 on there are C functions for all of it, so neither headers nor the ABI matter.
#include "host/torch_shim.h"

#ifndef FLASH_ATTN_TORCH
#error "the build defines FLASH_ATTN_TORCH, 206 for torch 2.6"
#endif
#if FLASH_ATTN_TORCH < 204 || FLASH_ATTN_TORCH > 209
#error "this file is for torch 2.4 to 2.9"
#endif

extern "C" {

AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** ret_data_ptr);

// These versions have one function for both. It makes a lazily cloned tensor own its memory, which only costs time.
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** ret_data_ptr) {
  void* data = nullptr;
  const AOTITorchError error = aoti_torch_get_data_ptr(tensor, &data);
  *ret_data_ptr = data;
  return error;
}

AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** ret_data_ptr) {
  return aoti_torch_get_data_ptr(tensor, ret_data_ptr);
}

}  // extern "C"

#if FLASH_ATTN_TORCH >= 207

extern "C" {

AOTITorchError aoti_torch_library_impl(TorchLibraryHandle self, const char* name,
                                       void (*fn)(StableIValue*, uint64_t, uint64_t));

// The stack of these versions holds tensors, numbers and bools, and optional ones, as 2.10's does.
AOTITorchError torch_library_impl(TorchLibraryHandle self, const char* name,
                                  void (*fn)(StableIValue*, uint64_t, uint64_t), uint64_t) {
  return aoti_torch_library_impl(self, name, fn);
}

}  // extern "C"

#else  // torch 2.4 to 2.6

#include <ATen/core/function_schema.h>
// Where this torch declares a function of torch_shim.h in another way, this file does not compile.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/library.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>

#include "host/error.h"

// libstdc++ asks this variable of glibc >= 2.32 whether it may count references without atomics. An own one that says no
// lets the library load into any glibc that its platform tag promises.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

namespace flash_attn {

namespace {

using BoxedFunction = void (*)(StableIValue*, uint64_t, uint64_t);

// More than any operator of the library has.
constexpr size_t kMaxValues = 32;

// A handle is an at::Tensor on the heap: aoti_torch_delete_tensor_object deletes one.
at::Tensor* tensor_of(AtenTensorHandle handle) { return reinterpret_cast<at::Tensor*>(handle); }

StableIValue bytes_of(const void* value, size_t size) {
  StableIValue slot = 0;
  memcpy(&slot, value, size);
  return slot;
}

// Calls a function that takes and leaves StableIValues, as torch 2.10 does.
class StableKernel final : public c10::OperatorKernel {
 public:
  explicit StableKernel(BoxedFunction function) : function_(function) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const size_t arguments = op.schema().arguments().size(), returns = op.schema().returns().size();
    if (arguments > kMaxValues || returns > kMaxValues) fail("an operator has more than %zu values.", kMaxValues);
    const size_t first = stack->size() - arguments;
    for (size_t i = 0; i < arguments; ++i) check_kind((*stack)[first + i]);
    StableIValue slots[kMaxValues];
    for (size_t i = 0; i < arguments; ++i) {
      const bool optional = op.schema().arguments()[i].type()->kind() == c10::TypeKind::OptionalType;
      slots[i] = optional ? take_optional((*stack)[first + i]) : take((*stack)[first + i]);
    }
    torch::jit::drop(*stack, arguments);
    function_(slots, arguments, returns);  // owns the tensors from here on, also where it throws
    for (size_t i = 0; i < returns; ++i) {
      AtenTensorHandle handle;
      memcpy(&handle, &slots[i], sizeof(handle));
      const std::unique_ptr<at::Tensor> tensor(tensor_of(handle));
      torch::jit::push(*stack, std::move(*tensor));
    }
  }

 private:
  // Asked before anything is taken, so that nothing is lost where it throws.
  static void check_kind(const c10::IValue& value) {
    if (!value.isTensor() && !value.isNone() && !value.isDouble() && !value.isInt() && !value.isBool()) {
      fail("an operator has an argument of another kind.");
    }
  }

  // None is 0; a value lies in a slot of its own, which whoever reads it deletes.
  static StableIValue take_optional(c10::IValue& value) {
    if (value.isNone()) return 0;
    const StableIValue* const slot = new StableIValue(take(value));
    return bytes_of(&slot, sizeof(slot));
  }

  static StableIValue take(c10::IValue& value) {
    if (value.isTensor()) {
      const at::Tensor* const tensor = new at::Tensor(std::move(value).toTensor());
      return bytes_of(&tensor, sizeof(tensor));
    }
    if (value.isDouble()) {
      const double number = value.toDouble();
      return bytes_of(&number, sizeof(number));
    }
    if (value.isInt()) {
      const int64_t number = value.toInt();
      return bytes_of(&number, sizeof(number));
    }
    const bool flag = value.toBool();
    return bytes_of(&flag, sizeof(flag));
  }

  BoxedFunction function_;
};

// Runs while the library is loaded or unloaded, where an exception would end the process: torch's C functions log too.
template <typename Action>
AOTITorchError without_exception(Action action) {
  try {
    action();
    return 0;
  } catch (const std::exception& error) {
    fprintf(stderr, "flash_attn: torch refused the registration of its operators: %s\n", error.what());
    return 1;
  }
}

}  // namespace

}  // namespace flash_attn

extern "C" {

AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* k, const char* file, uint32_t line,
                                            TorchLibraryHandle* ret_new_torch_lib) {
  return flash_attn::without_exception([&] {
    auto* const library = new torch::Library(torch::Library::IMPL, ns, c10::parseDispatchKey(k), file, line);
    *ret_new_torch_lib = reinterpret_cast<TorchLibraryHandle>(library);
  });
}

AOTITorchError torch_library_impl(TorchLibraryHandle self, const char* name,
                                  void (*fn)(StableIValue*, uint64_t, uint64_t), uint64_t) {
  return flash_attn::without_exception([&] {
    reinterpret_cast<torch::Library*>(self)->impl(
        name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<flash_attn::StableKernel>(fn)));
  });
}

AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle tlh) {
  return flash_attn::without_exception([&] { delete reinterpret_cast<torch::Library*>(tlh); });
}

#if FLASH_ATTN_TORCH < 206
// An exception of ATen says more than an error code could.
AOTITorchError aoti_torch_zero_(AtenTensorHandle self) {
  flash_attn::tensor_of(self)->zero_();
  return 0;
}
#endif

}  // extern "C"

#endif
