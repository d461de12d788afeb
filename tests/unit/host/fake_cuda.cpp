// A stand-in for libcuda.so.1: describes GPUs as told by environment variables, writes every call that matters to a log,
// and can run the kernels' mathematics on host memory. It checks what a driver would check.
//
//   FAKE_CUDA_DEVICES  "9.0:232448:NVIDIA H200;8.9:101376:RTX" capability, shared memory of a block, name; ";" between
//   FAKE_CUDA_LOG      file to append to
//   FAKE_CUDA_FAIL     "cuLaunchKernel=700": the function returns that error
//   FAKE_CUDA_REFUSE   "86,80": archs whose images hold no code for the GPU
//   FAKE_CUDA_CAPTURE  1: a stream is being captured, loading is refused in any but the relaxed mode
//   FAKE_CUDA_THREADS, FAKE_CUDA_STATIC_SMEM  attributes of every function
//   FAKE_CUDA_MULTIPROCESSORS  of every GPU; 132 if not set
//   FAKE_CUDA_DRIVER_VERSION   12040 if not set
//   FAKE_CUDA_COMPUTE  1: a launch computes
//
// An image is the text "fake <key> <arch> <block_m> <block_n> <split>". Real cubins and PTX are taken too: their key is
// "fwd-real" or "bwd-real", by the entry points in them, and their arch what they say. They cannot compute.
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "fake_cache_kernels.h"
#include "params.h"

using flash_attn::BwdParams;
using flash_attn::FwdParams;

namespace {

constexpr int kInvalidValue = 1, kInvalidContext = 201, kNoBinary = 209, kNotFound = 500, kCaptureUnsupported = 900;

std::mutex fake_mutex;
thread_local std::vector<void*> contexts;
thread_local int capture_mode = 0;

std::string env(const char* name) {
  const char* const value = getenv(name);
  return value != nullptr ? value : "";
}

void log(const char* format, ...) {
  const std::string path = env("FAKE_CUDA_LOG");
  if (path.empty()) return;
  FILE* const file = fopen(path.c_str(), "a");
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fputc('\n', file);
  fclose(file);
}

int failure(const char* function) {
  const std::string told = env("FAKE_CUDA_FAIL");
  const size_t equals = told.find('=');
  if (equals == std::string::npos || told.substr(0, equals) != function) return 0;
  return atoi(told.c_str() + equals + 1);
}

struct Gpu {
  int major, minor, shared_bytes;
  std::string name;
};

std::vector<Gpu> gpus() {
  std::vector<Gpu> found;
  const std::string all = env("FAKE_CUDA_DEVICES");
  for (size_t at = 0; at < all.size();) {
    size_t end = all.find(';', at);
    if (end == std::string::npos) end = all.size();
    const std::string one = all.substr(at, end - at);
    Gpu gpu = {};
    char name[128] = {0};
    sscanf(one.c_str(), "%d.%d:%d:%127[^\n]", &gpu.major, &gpu.minor, &gpu.shared_bytes, name);
    gpu.name = name;
    found.push_back(gpu);
    at = end + 1;
  }
  return found;
}

int attribute(const char* name, int otherwise) {
  const std::string value = env(name);
  return value.empty() ? otherwise : atoi(value.c_str());
}

void* context_of(int device) { return reinterpret_cast<void*>(static_cast<uintptr_t>(0x1000 + device)); }
int device_of(void* context) { return static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 0x1000; }

struct Module {
  std::string key, arch;
  fake::Tile tile;
  void* context;
};
struct Function {
  Module* module;
  std::string entry;
  int dynamic_smem = 48 * 1024;
};

}  // namespace

// Key and arch of a real image; false where it is none.
static bool describe_real(const void* image, char* key, char* arch) {
  const unsigned char* const bytes = static_cast<const unsigned char*>(image);
  const char* const text = static_cast<const char*>(image);
  size_t size = 0;
  if (memcmp(bytes, "\177ELF", 4) == 0) {
    uint64_t sections = 0;
    memcpy(&sections, bytes + 40, sizeof(sections));  // e_shoff: names and code come before
    size = sections;
    sprintf(arch, "%d", bytes[8] >= 8 ? bytes[49] : bytes[48]);  // e_flags, of the ABI before and since CUDA 12.8
  } else if (const char* const target = strstr(text, ".target sm_")) {
    size = strlen(text);
    sprintf(arch, "ptx%d", atoi(target + strlen(".target sm_")));
  } else {
    return false;
  }
  const bool bwd = memmem(image, size, "flash_bwd_preprocess", strlen("flash_bwd_preprocess")) != nullptr;
  strcpy(key, bwd ? "bwd-real" : "fwd-real");
  return true;
}

// ---- The driver's functions ----

#define FAKE_FAILURE(name) \
  if (const int told = failure(#name)) return told

extern "C" {

int cuInit(unsigned) {
  FAKE_FAILURE(cuInit);
  return gpus().empty() ? 100 : 0;
}

// NVRTC asks for tables of the driver's tools.
int cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return kNotFound;
}

int cuDriverGetVersion(int* version) {
  *version = attribute("FAKE_CUDA_DRIVER_VERSION", 12040);
  return 0;
}

int cuGetErrorName(int error, const char** text) {
  static const std::map<int, const char*> names = {
      {1, "CUDA_ERROR_INVALID_VALUE"},      {2, "CUDA_ERROR_OUT_OF_MEMORY"},     {100, "CUDA_ERROR_NO_DEVICE"},
      {200, "CUDA_ERROR_INVALID_IMAGE"},    {201, "CUDA_ERROR_INVALID_CONTEXT"}, {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {500, "CUDA_ERROR_NOT_FOUND"},        {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
      {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  const auto found = names.find(error);
  *text = found != names.end() ? found->second : nullptr;
  return found != names.end() ? 0 : kInvalidValue;
}

int cuGetErrorString(int error, const char** text) {
  *text = error == 700 ? "an illegal memory access was encountered" : "a description";
  return 0;
}

int cuDeviceGetCount(int* count) {
  FAKE_FAILURE(cuDeviceGetCount);
  *count = static_cast<int>(gpus().size());
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}

int cuDeviceGetName(char* name, int length, int device) {
  snprintf(name, static_cast<size_t>(length), "%s", gpus().at(static_cast<size_t>(device)).name.c_str());
  return 0;
}

int cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = size_t{80} << 30;
  return 0;
}

int cuDeviceGetAttribute(int* value, int which, int device) {
  const Gpu gpu = gpus().at(static_cast<size_t>(device));
  switch (which) {
    case 16: *value = attribute("FAKE_CUDA_MULTIPROCESSORS", 132); return 0;
    case 75: *value = gpu.major; return 0;
    case 76: *value = gpu.minor; return 0;
    case 97: *value = gpu.shared_bytes; return 0;
    default: return kInvalidValue;
  }
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  FAKE_FAILURE(cuDevicePrimaryCtxRetain);
  log("retain device=%d", device);
  *context = context_of(device);
  return 0;
}

int cuCtxGetCurrent(void** context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  FAKE_FAILURE(cuCtxPushCurrent_v2);
  contexts.push_back(context);
  log("push device=%d", device_of(context));
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  log("pop device=%d", device_of(*context));
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  const int old = capture_mode;
  capture_mode = *mode;
  *mode = old;
  return 0;
}

int cuModuleLoadDataEx(void** module, const void* image, unsigned count, int* options, void** values) {
  std::lock_guard<std::mutex> lock(fake_mutex);
  char key[64], arch[16];
  fake::Tile tile = {};
  const int fields =
      sscanf(static_cast<const char*>(image), "fake %63s %15s %d %d %d", key, arch, &tile.block_m, &tile.block_n, &tile.split);
  if (fields != 5 && !describe_real(image, key, arch)) {
    return 200;
  }
  void* context = nullptr;
  cuCtxGetCurrent(&context);
  log("load key=%s arch=%s device=%d mode=%d", key, arch, device_of(context), capture_mode);
  if (context == nullptr) return kInvalidContext;
  if (env("FAKE_CUDA_CAPTURE") == "1" && capture_mode != 2) return kCaptureUnsupported;
  if (("," + env("FAKE_CUDA_REFUSE") + ",").find("," + std::string(arch) + ",") != std::string::npos) return kNoBinary;
  if (const int told = failure("cuModuleLoadDataEx")) {
    for (unsigned i = 0; i + 1 < count; ++i) {
      if (options[i] == 5) snprintf(static_cast<char*>(values[i]), reinterpret_cast<size_t>(values[i + 1]), "ptxas says no");
    }
    return told;
  }
  *module = new Module{key, arch, tile, context};
  return 0;
}

int cuModuleUnload(void* module) {
  log("unload key=%s", static_cast<Module*>(module)->key.c_str());
  delete static_cast<Module*>(module);
  return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  FAKE_FAILURE(cuModuleGetFunction);
  static const std::map<std::string, std::string> entries = {
      {"fwd", "flash_fwd"},
      {"bwd", "flash_bwd_preprocess flash_bwd flash_bwd_postprocess"},
      {"decode", "flash_decode flash_combine"},
      {"rotary", "flash_rotary"},
      {"round", "flash_round_sums flash_round_largest flash_round"}};
  const std::string& key = static_cast<Module*>(module)->key;
  const bool values = key.find("fwd-sm90-e4m3-") == 0 && std::string(name) == "flash_transpose_v";
  const auto of_op = entries.find(key.substr(0, key.find('-')));
  if (of_op == entries.end() ||
      (!values && (" " + of_op->second + " ").find(" " + std::string(name) + " ") == std::string::npos)) {
    return kNotFound;
  }
  *function = new Function{static_cast<Module*>(module), name};
  return 0;
}

int cuFuncGetAttribute(int* value, int attribute_id, void*) {
  FAKE_FAILURE(cuFuncGetAttribute);
  *value = attribute_id == 0 ? attribute("FAKE_CUDA_THREADS", 1024) : attribute("FAKE_CUDA_STATIC_SMEM", 0);
  return 0;
}

int cuFuncSetAttribute(void* function, int attribute_id, int value) {
  FAKE_FAILURE(cuFuncSetAttribute);
  if (attribute_id != 8) return kInvalidValue;
  static_cast<Function*>(function)->dynamic_smem = value;
  return 0;
}

// The map keeps what it was made of.
int cuTensorMapEncodeTiled(void* map, int data_type, unsigned rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const unsigned* box, const unsigned* steps, int, int swizzle, int, int) {
  log("map type=%d rank=%u sizes=%llu,%llu,%llu,%llu strides=%llu,%llu,%llu box=%u,%u,%u,%u swizzle=%d", data_type, rank,
      static_cast<unsigned long long>(sizes[0]), static_cast<unsigned long long>(sizes[1]),
      static_cast<unsigned long long>(sizes[2]), static_cast<unsigned long long>(sizes[3]),
      static_cast<unsigned long long>(strides[0]), static_cast<unsigned long long>(strides[1]),
      static_cast<unsigned long long>(strides[2]), box[0], box[1], box[2], box[3], swizzle);
  FAKE_FAILURE(cuTensorMapEncodeTiled);
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0 || reinterpret_cast<uintptr_t>(map) % 64 != 0) return kInvalidValue;
  for (unsigned i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || box[i] == 0 || box[i] > 256 || steps[i] != 1) return kInvalidValue;
    if (i + 1 < rank && (strides[i] == 0 || strides[i] % 16 != 0 || strides[i] >= uint64_t{1} << 40)) return kInvalidValue;
  }
  fake::Map made = {address, {}, {}, {}, data_type};
  memcpy(made.sizes, sizes, sizeof(made.sizes));
  memcpy(made.strides, strides, sizeof(made.strides));
  memcpy(made.box, box, sizeof(made.box));
  memcpy(map, &made, sizeof(made));
  return 0;
}

int cuMemsetD32Async(unsigned long long address, unsigned value, size_t count, void* stream) {
  void* context = nullptr;
  cuCtxGetCurrent(&context);
  log("memset value=%08x count=%zu stream=%p device=%d", value, count, stream, device_of(context));
  FAKE_FAILURE(cuMemsetD32Async);
  if (env("FAKE_CUDA_COMPUTE") != "1") return 0;
  for (size_t i = 0; i < count; ++i) memcpy(reinterpret_cast<char*>(address) + 4 * i, &value, 4);
  return 0;
}

// What both kinds of launch do; `early`: it may begin while the launch before it ends.
int launch_kernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra, bool early) {
  const Function& f = *static_cast<Function*>(function);
  void* context = nullptr;
  cuCtxGetCurrent(&context);
  if (f.entry == "flash_decode" || f.entry == "flash_combine" || f.entry == "flash_rotary" ||
      f.entry == "flash_transpose_v" || f.entry.rfind("flash_round", 0) == 0) {
    log("launch key=%s arch=%s entry=%s grid=%u,%u block=%u smem=%u stream=%p device=%d early=%d", f.module->key.c_str(),
        f.module->arch.c_str(), f.entry.c_str(), grid_x, grid_y, block_x, shared_bytes, stream, device_of(context), early);
  } else if (f.entry == "flash_fwd") {
    // Also of the family with tensor maps, whose parameters begin with these.
    FwdParams p;
    memcpy(&p, parameters[0], sizeof(p));
    int heads_per_group = 0;
    const int* counter = nullptr;
    if (f.module->key.rfind("fwd-sm90-", 0) == 0) {
      const size_t at = offsetof(flash_attn::FwdTmaParams, heads_per_group);
      memcpy(&heads_per_group, static_cast<const char*>(parameters[0]) + at, sizeof(heads_per_group));
      const size_t next_tile = offsetof(flash_attn::FwdTmaParams, next_tile);
      memcpy(&counter, static_cast<const char*>(parameters[0]) + next_tile, sizeof(counter));
    }
    log("launch key=%s arch=%s entry=%s grid=%u block=%u smem=%u stream=%p device=%d batch=%d heads=%d heads_kv=%d group=%d "
        "seqlen_q=%d seqlen_k=%d head_dim=%d head_dim_v=%d blocks_m=%d scale=%.6f scale_log2=%.6f heads_per_group=%d "
        "counter=%d early=%d",
        f.module->key.c_str(), f.module->arch.c_str(), f.entry.c_str(), grid_x, block_x, shared_bytes, stream,
        device_of(context), p.batch, p.heads, p.heads_kv, p.group, p.seqlen_q, p.seqlen_k, p.head_dim,
        p.head_dim_v, p.blocks_m, static_cast<double>(p.scale), static_cast<double>(p.scale_log2), heads_per_group,
        counter != nullptr, early);
  } else {
    BwdParams p;
    memcpy(&p, parameters[0], sizeof(p));
    log("launch key=%s arch=%s entry=%s grid=%u block=%u smem=%u stream=%p device=%d batch=%d heads=%d heads_kv=%d group=%d "
        "seqlen_q=%d seqlen_k=%d head_dim=%d blocks_m=%d blocks_n=%d total_tiles=%d deterministic=%d "
        "scale_log2=%.6f lse_log2=%lld delta=%lld semaphore=%lld finished=%lld early=%d",
        f.module->key.c_str(), f.module->arch.c_str(), f.entry.c_str(), grid_x, block_x, shared_bytes, stream,
        device_of(context), p.batch, p.heads, p.heads_kv, p.group, p.seqlen_q, p.seqlen_k, p.head_dim, p.blocks_m,
        p.blocks_n, p.total_tiles, p.deterministic, static_cast<double>(p.scale_log2), static_cast<long long>(p.lse_log2 - p.dq_accum),
        static_cast<long long>(p.delta - p.dq_accum),
        static_cast<long long>(reinterpret_cast<float*>(p.dq_semaphore) - p.dq_accum),
        static_cast<long long>(reinterpret_cast<float*>(p.dq_finished) - p.dq_accum), early);
  }
  if (early && atoi(f.module->arch.c_str()) < 90) return kInvalidValue;
  if (context != f.module->context) return kInvalidContext;
  if (grid_x == 0 || (grid_y != 1 && f.entry != "flash_rotary")) return kInvalidValue;
  if (grid_z != 1 || block_y != 1 || block_z != 1 || extra != nullptr) return kInvalidValue;
  if (static_cast<int>(shared_bytes) > f.dynamic_smem) return kInvalidValue;
  if (env("FAKE_CUDA_COMPUTE") == "1") {
    fake::compute(f.module->key, f.entry, f.module->tile, {grid_x, grid_y, block_x}, parameters[0]);
  }
  return 0;
}

int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra) {
  FAKE_FAILURE(cuLaunchKernel);
  return launch_kernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters, extra,
                       false);
}

// As the driver declares them.
struct LaunchAttribute {
  int id;
  char padding[4];
  int value[16];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** parameters, void** extra) {
  FAKE_FAILURE(cuLaunchKernelEx);
  bool early = false;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const LaunchAttribute& attribute = config->attributes[i];
    if (attribute.id != 6) return kInvalidValue;  // programmatic stream serialization
    early = attribute.value[0] == 1;
  }
  const unsigned* const grid = config->grid;
  const unsigned* const block = config->block;
  return launch_kernel(function, grid[0], grid[1], grid[2], block[0], block[1], block[2], config->shared_bytes,
                       config->stream, parameters, extra, early);
}

}  // extern "C"
