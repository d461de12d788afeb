#include "host/error.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace flash_attn {

namespace {

constexpr char kCut[] = "...";

// vsnprintf that marks a cut text; returns the length written.
size_t format_into(char* to, size_t size, const char* format, va_list arguments) {
  const int length = vsnprintf(to, size, format, arguments);
  if (length < 0) {
    to[0] = 0;
    return 0;
  }
  if (static_cast<size_t>(length) < size) return static_cast<size_t>(length);
  if (size >= sizeof(kCut)) memcpy(to + size - sizeof(kCut), kCut, sizeof(kCut));
  return size - 1;
}

}  // namespace

void fail(const char* format, ...) {
  char message[8192] = "flash_attn: ";
  const size_t prefix = strlen(message);
  va_list arguments;
  va_start(arguments, format);
  format_into(message + prefix, sizeof(message) - prefix, format, arguments);
  va_end(arguments);
  throw std::runtime_error(message);
}

void Text::add(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  used_ += format_into(buffer_ + used_, sizeof(buffer_) - used_, format, arguments);
  va_end(arguments);
}

void copy_text(char* to, size_t size, const char* from) {
  if (to == nullptr || size == 0) return;
  const size_t length = strlen(from);
  const size_t kept = length < size ? length : size - 1;
  memcpy(to, from, kept);
  to[kept] = 0;
}

}  // namespace flash_attn
