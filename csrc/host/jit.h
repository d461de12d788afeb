// Kernels that the kernel set lacks, compiled at their first use. The compiler is not here: Python registers a function
// that answers a request with an archive of one kernel, made by the code that made the kernel set.
#pragma once

#include <stdexcept>

#include "host/error.h"
#include "host/kernel_set.h"

// What is asked of the compiler. flash_attn/_jit.py declares the same fields. Texts live as long as the call.
struct flash_attn_compile_request {
  const char* op;        // "fwd"
  const char* dtype;     // "bf16"
  const char* mask;      // "causal"
  const char* families;  // those that may serve, the fastest first: "sm90,sm80"
  int head_dim;          // the kernel has this one or a larger one; 0: only whether this GPU can be compiled for
  int device;
  int capability;      // 10 * major + minor
  int shared_bytes;    // that a block may have
  int driver_version;  // 1000 * major + 10 * minor, of the newest CUDA that the driver serves
};

// Answers through flash_attn_compile_answer, once, before it returns. Called from any thread, without any lock held.
using flash_attn_compile_function = void (*)(const flash_attn_compile_request* request, void* answer);

namespace flash_attn {

// Thrown where the kernel set has nothing for a call; everything else that goes wrong is a plain std::runtime_error.
class MissingKernel : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws MissingKernel with the text "flash_attn: " + the formatted message.
[[noreturn]] void fail_missing(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The set of the one kernel that the request asks for, which the caller keeps for good. Throws `missing`, with what the
// compiler says, where there is none. It waits for Python's global lock: the caller must hold no lock at all.
const KernelSet& compile_kernel(const flash_attn_compile_request& request, const MissingKernel& missing);

// Whether a kernel can be compiled for the request's GPU; `how` is then a part of a sentence, or else why not. It stays
// empty where no compiler is registered. As compile_kernel, it waits for Python.
bool can_compile(const flash_attn_compile_request& request, Text* how);

}  // namespace flash_attn
