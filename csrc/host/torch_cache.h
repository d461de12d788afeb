// The boxed operators of torch_cache.cpp, for registration.
#pragma once

#include <cstdint>

#include "host/torch_shim.h"

namespace flash_attn {

void decode(StableIValue* stack, uint64_t, uint64_t);
void decode_output(StableIValue* stack, uint64_t, uint64_t);
void kvcache(StableIValue* stack, uint64_t, uint64_t);
void kvcache_output(StableIValue* stack, uint64_t, uint64_t);
void rotary(StableIValue* stack, uint64_t, uint64_t);
void append(StableIValue* stack, uint64_t, uint64_t);

}  // namespace flash_attn
