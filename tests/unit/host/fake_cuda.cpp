// A stand-in for libcuda.so.1: describes GPUs as told by environment variables, writes every call that matters to a log,
// and can run the kernels' mathematics on host memory. It checks what a driver would check.
//
//   FAKE_CUDA_DEVICES  "9.0:232448:NVIDIA H200;8.9:101376:RTX" capability, shared memory of a block, name; ";" between
//   FAKE_CUDA_LOG      file to append to
//   FAKE_CUDA_FAIL     "cuLaunchKernel=700": the function returns that error
//   FAKE_CUDA_REFUSE   "86,80": archs whose images hold no code for the GPU
//   FAKE_CUDA_CAPTURE  1: a stream is being captured, loading is refused in any but the relaxed mode
//   FAKE_CUDA_THREADS, FAKE_CUDA_STATIC_SMEM  attributes of every function
//   FAKE_CUDA_COMPUTE  1: a launch computes
//
// An image is the text "fake <key> <arch>". Real cubins and PTX are taken too: their key is "fwd-real" or "bwd-real", by
// the entry points in them, and their arch what they say. They cannot compute.
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "params.h"

using flash_attn::BwdParams;
using flash_attn::FwdParams;
using flash_attn::Strides;

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
  void* context;
};
struct Function {
  Module* module;
  std::string entry;
  int dynamic_smem = 48 * 1024;
};

// ---- The kernels' mathematics ----

float from_half(uint16_t bits, bool bf16) {
  if (bf16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  _Float16 value;
  memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}

uint16_t to_half(float value, bool bf16) {
  if (bf16) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}

struct Rows {
  const void* data;
  Strides stride;
  bool bf16;
  float at(long long b, long long s, long long h, long long d) const {
    const uint16_t* const values = static_cast<const uint16_t*>(data);
    return from_half(values[b * stride.batch + s * stride.row + h * stride.head + d], bf16);
  }
  void set(long long b, long long s, long long h, long long d, float value) const {
    uint16_t* const values = static_cast<uint16_t*>(const_cast<void*>(data));
    values[b * stride.batch + s * stride.row + h * stride.head + d] = to_half(value, bf16);
  }
};

// Rows that the real kernels load in pieces of 16 bytes.
void require_aligned(const void* data, const Strides& stride) {
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0 || stride.batch % 8 != 0 || stride.row % 8 != 0 || stride.head % 8 != 0) {
    fprintf(stderr, "fake_cuda: misaligned tensor %p (%lld, %lld, %lld)\n", data, stride.batch, stride.row, stride.head);
    abort();
  }
}

template <typename Params>
bool visible(const Params& p, bool causal, long long i, long long j) {
  return !causal || j <= i + p.seqlen_k - p.seqlen_q;
}

template <typename Params>
float score(const Params& p, const Rows& q, const Rows& k, int b, int h, int i, int j) {
  float sum = 0;
  for (int d = 0; d < p.head_dim; ++d) sum += q.at(b, i, h, d) * k.at(b, j, h / p.group, d);
  return sum * p.scale;
}

void compute_fwd(const FwdParams& p, bool bf16, bool causal) {
  const Rows q{p.q, p.q_stride, bf16}, k{p.k, p.k_stride, bf16}, v{p.v, p.v_stride, bf16}, out{p.out, p.out_stride, bf16};
  for (const Rows* rows : {&q, &k, &v, &out}) require_aligned(rows->data, rows->stride);
  for (int b = 0; b < p.batch; ++b) {
    for (int h = 0; h < p.heads; ++h) {
      for (int i = 0; i < p.seqlen_q; ++i) {
        float max = -std::numeric_limits<float>::infinity(), sum = 0;
        for (int j = 0; j < p.seqlen_k; ++j) {
          if (visible(p, causal, i, j)) max = fmaxf(max, score(p, q, k, b, h, i, j));
        }
        std::vector<float> row(static_cast<size_t>(p.head_dim), 0.f);
        for (int j = 0; j < p.seqlen_k; ++j) {
          if (!visible(p, causal, i, j)) continue;
          const float weight = expf(score(p, q, k, b, h, i, j) - max);
          sum += weight;
          for (int d = 0; d < p.head_dim; ++d) row[static_cast<size_t>(d)] += weight * v.at(b, j, h / p.group, d);
        }
        for (int d = 0; d < p.head_dim; ++d) out.set(b, i, h, d, sum > 0 ? row[static_cast<size_t>(d)] / sum : 0.f);
        p.lse[(static_cast<long long>(b) * p.heads + h) * p.seqlen_q + i] = max + logf(sum);
      }
    }
  }
}

long long padded_rows(const BwdParams& p, int block_m) { return static_cast<long long>(p.blocks_m) * block_m; }

void compute_preprocess(const BwdParams& p, int block_m, int head_dim_built, bool bf16) {
  const Rows dout{p.dout, p.dout_stride, bf16}, out{p.out, p.out_stride, bf16};
  const long long rows = padded_rows(p, block_m), heads = static_cast<long long>(p.batch) * p.heads;
  for (long long x = 0; x < heads * rows * head_dim_built; ++x) p.dq_accum[x] = 0;
  for (long long x = 0; x < heads * p.blocks_m; ++x) p.dq_semaphore[x] = 0;
  for (int b = 0; b < p.batch; ++b) {
    for (int h = 0; h < p.heads; ++h) {
      for (int i = 0; i < rows; ++i) {
        const long long head = static_cast<long long>(b) * p.heads + h;
        float delta = 0;
        for (int d = 0; d < p.head_dim && i < p.seqlen_q; ++d) delta += dout.at(b, i, h, d) * out.at(b, i, h, d);
        const float lse = i < p.seqlen_q ? p.lse[head * p.seqlen_q + i] : -INFINITY;
        p.delta[head * rows + i] = delta;
        p.lse_log2[head * rows + i] = std::isinf(lse) ? INFINITY : lse * 1.44269504f;
      }
    }
  }
}

void compute_bwd(const BwdParams& p, int block_m, int head_dim_built, bool bf16, bool causal) {
  const Rows q{p.q, p.q_stride, bf16}, k{p.k, p.k_stride, bf16}, v{p.v, p.v_stride, bf16}, dout{p.dout, p.dout_stride, bf16};
  const Rows dk{p.dk, p.dk_stride, bf16}, dv{p.dv, p.dv_stride, bf16};
  for (const Rows* rows : {&q, &k, &v, &dout, &dk, &dv}) require_aligned(rows->data, rows->stride);
  const long long rows = padded_rows(p, block_m);
  for (int b = 0; b < p.batch; ++b) {
    for (int hk = 0; hk < p.heads_kv; ++hk) {
      for (int j = 0; j < p.seqlen_k; ++j) {
        std::vector<float> sum_dk(static_cast<size_t>(p.head_dim), 0.f), sum_dv(static_cast<size_t>(p.head_dim), 0.f);
        for (int h = hk * p.group; h < (hk + 1) * p.group; ++h) {
          for (int i = 0; i < p.seqlen_q; ++i) {
            if (!visible(p, causal, i, j)) continue;
            const long long row = (static_cast<long long>(b) * p.heads + h) * rows + i;
            const float weight = exp2f(score(p, q, k, b, h, i, j) * 1.44269504f - p.lse_log2[row]);
            float dp = 0;
            for (int d = 0; d < p.head_dim; ++d) dp += dout.at(b, i, h, d) * v.at(b, j, hk, d);
            const float ds = weight * (dp - p.delta[row]) * p.scale;
            for (int d = 0; d < p.head_dim; ++d) {
              sum_dv[static_cast<size_t>(d)] += weight * dout.at(b, i, h, d);
              sum_dk[static_cast<size_t>(d)] += ds * q.at(b, i, h, d);
              p.dq_accum[row * head_dim_built + d] += ds * k.at(b, j, hk, d);
            }
          }
        }
        for (int d = 0; d < p.head_dim; ++d) {
          dk.set(b, j, hk, d, sum_dk[static_cast<size_t>(d)]);
          dv.set(b, j, hk, d, sum_dv[static_cast<size_t>(d)]);
        }
      }
    }
  }
}

void compute_postprocess(const BwdParams& p, int block_m, int head_dim_built, bool bf16) {
  const Rows dq{p.dq, p.dq_stride, bf16};
  const long long rows = padded_rows(p, block_m);
  for (int b = 0; b < p.batch; ++b) {
    for (int h = 0; h < p.heads; ++h) {
      for (int i = 0; i < p.seqlen_q; ++i) {
        const long long row = (static_cast<long long>(b) * p.heads + h) * rows + i;
        for (int d = 0; d < p.head_dim; ++d) dq.set(b, i, h, d, p.dq_accum[row * head_dim_built + d]);
      }
    }
  }
}

// The block_m of the test archives: their records and this file agree on it.
constexpr int kBlockM = 64;

void compute(const Function& function, const void* params) {
  const std::string& key = function.module->key;
  const bool bf16 = key.find("-bf16-") != std::string::npos;
  const bool causal = key.find("-causal") != std::string::npos;
  const int head_dim_built = atoi(key.c_str() + key.find("-d") + 2);
  FwdParams fwd;
  BwdParams bwd;
  memcpy(&fwd, params, sizeof(fwd));
  memcpy(&bwd, params, function.entry == "flash_fwd" ? 0 : sizeof(bwd));
  if (function.entry == "flash_fwd") compute_fwd(fwd, bf16, causal);
  if (function.entry == "flash_bwd_preprocess") compute_preprocess(bwd, kBlockM, head_dim_built, bf16);
  if (function.entry == "flash_bwd") compute_bwd(bwd, kBlockM, head_dim_built, bf16, causal);
  if (function.entry == "flash_bwd_postprocess") compute_postprocess(bwd, kBlockM, head_dim_built, bf16);
}

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
  *version = 12040;
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

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const Gpu gpu = gpus().at(static_cast<size_t>(device));
  switch (attribute) {
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
  if (sscanf(static_cast<const char*>(image), "fake %63s %15s", key, arch) != 2 && !describe_real(image, key, arch)) {
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
  *module = new Module{key, arch, context};
  return 0;
}

int cuModuleUnload(void* module) {
  log("unload key=%s", static_cast<Module*>(module)->key.c_str());
  delete static_cast<Module*>(module);
  return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  FAKE_FAILURE(cuModuleGetFunction);
  const bool is_fwd = static_cast<Module*>(module)->key.rfind("fwd-", 0) == 0;
  if (is_fwd != (strcmp(name, "flash_fwd") == 0)) return kNotFound;
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

int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra) {
  const Function& f = *static_cast<Function*>(function);
  void* context = nullptr;
  cuCtxGetCurrent(&context);
  if (f.entry == "flash_fwd") {
    FwdParams p;
    memcpy(&p, parameters[0], sizeof(p));
    log("launch key=%s arch=%s entry=%s grid=%u block=%u smem=%u stream=%p device=%d batch=%d heads=%d heads_kv=%d group=%d "
        "seqlen_q=%d seqlen_k=%d head_dim=%d blocks_m=%d scale=%.6f scale_log2=%.6f",
        f.module->key.c_str(), f.module->arch.c_str(), f.entry.c_str(), grid_x, block_x, shared_bytes, stream,
        device_of(context), p.batch, p.heads, p.heads_kv, p.group, p.seqlen_q, p.seqlen_k, p.head_dim, p.blocks_m,
        static_cast<double>(p.scale), static_cast<double>(p.scale_log2));
  } else {
    BwdParams p;
    memcpy(&p, parameters[0], sizeof(p));
    log("launch key=%s arch=%s entry=%s grid=%u block=%u smem=%u stream=%p device=%d batch=%d heads=%d heads_kv=%d group=%d "
        "seqlen_q=%d seqlen_k=%d head_dim=%d blocks_m=%d blocks_n=%d deterministic=%d scale_log2=%.6f lse_log2=%lld "
        "delta=%lld semaphore=%lld",
        f.module->key.c_str(), f.module->arch.c_str(), f.entry.c_str(), grid_x, block_x, shared_bytes, stream,
        device_of(context), p.batch, p.heads, p.heads_kv, p.group, p.seqlen_q, p.seqlen_k, p.head_dim, p.blocks_m,
        p.blocks_n, p.deterministic, static_cast<double>(p.scale_log2), static_cast<long long>(p.lse_log2 - p.dq_accum),
        static_cast<long long>(p.delta - p.dq_accum),
        static_cast<long long>(reinterpret_cast<float*>(p.dq_semaphore) - p.dq_accum));
  }
  FAKE_FAILURE(cuLaunchKernel);
  if (context != f.module->context) return kInvalidContext;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || extra != nullptr) return kInvalidValue;
  if (static_cast<int>(shared_bytes) > f.dynamic_smem) return kInvalidValue;
  if (env("FAKE_CUDA_COMPUTE") == "1") compute(f, parameters[0]);
  return 0;
}

}  // extern "C"
