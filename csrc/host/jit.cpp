#include "host/jit.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>

#define FLASH_ATTN_EXPORT extern "C" __attribute__((visibility("default")))

namespace flash_attn {

namespace {

std::atomic<flash_attn_compile_function> compiler{nullptr};

// What the compiler said.
struct Answer {
  bool possible = false;
  const KernelSet* set = nullptr;
  Text text;
};

// False where no compiler is registered.
bool ask(const flash_attn_compile_request& request, Answer* answer) {
  const flash_attn_compile_function function = compiler.load(std::memory_order_acquire);
  if (function == nullptr) return false;
  function(&request, answer);
  if (!answer->possible && answer->text.empty()) answer->text.add("the compiler gave no answer.");
  return true;
}

}  // namespace

void fail_missing(const char* format, ...) {
  char message[8192] = "flash_attn: ";
  const size_t prefix = strlen(message);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message + prefix, sizeof(message) - prefix, format, arguments);
  va_end(arguments);
  throw MissingKernel(message);
}

const KernelSet& compile_kernel(const flash_attn_compile_request& request, const MissingKernel& missing) {
  Answer answer;
  if (!ask(request, &answer)) throw missing;
  if (answer.set != nullptr) return *answer.set;
  Text text;
  text.add("%s It was not compiled at first use either: %s", missing.what(), answer.text.c_str());
  throw std::runtime_error(text.c_str());
}

bool can_compile(const flash_attn_compile_request& request, Text* how) {
  Answer answer;
  if (!ask(request, &answer)) return false;
  how->add("%s", answer.text.c_str());
  return answer.possible;
}

}  // namespace flash_attn

// Registers the function that compiles; null takes it back. It is called until the process ends.
FLASH_ATTN_EXPORT void flash_attn_set_compiler(flash_attn_compile_function function) {
  flash_attn::compiler.store(function, std::memory_order_release);
}

// The compiler's answer: whether it can, then the archive (`size` bytes, copied) for a kernel, and a text: why not, or
// what it compiles with.
FLASH_ATTN_EXPORT void flash_attn_compile_answer(void* to, int possible, const void* archive, size_t size,
                                                 const char* text) {
  auto& answer = *static_cast<flash_attn::Answer*>(to);
  try {
    if (archive != nullptr) answer.set = new flash_attn::KernelSet("compiled at first use", archive, size);
    answer.possible = possible != 0;
    answer.text.add("%s", text);
  } catch (const std::exception& error) {
    answer.text.add("%s", error.what());
  }
}
