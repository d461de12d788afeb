// Errors of the host library: every failure is one complete sentence in a std::runtime_error, which libtorch hands
// on to Python as a RuntimeError.
#pragma once

#include <cstddef>

namespace flash_attn {

// Throws std::runtime_error with the text "flash_attn: " + the formatted message.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A text of limited length, built piece by piece without allocating. What does not fit is cut and ends in "...".
class Text {
 public:
  void add(const char* format, ...) __attribute__((format(printf, 2, 3)));
  const char* c_str() const { return buffer_; }
  bool empty() const { return used_ == 0; }

 private:
  char buffer_[6144] = {0};
  size_t used_ = 0;
};

// Copies `from` into `to`, which holds `size` bytes, cutting it where it is too long. Null and 0 are accepted.
void copy_text(char* to, size_t size, const char* from);

}  // namespace flash_attn
