#include "host/dispatch.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "host/error.h"
#include "host/jit.h"

namespace flash_attn {

namespace {

constexpr const char* kOpNames[kOps] = {"fwd", "bwd", "decode", "rotary"};
constexpr const char* kDtypeNames[kDtypes] = {"fp16", "bf16", "e4m3"};
constexpr const char* kMaskNames[kMasks] = {"full", "causal", "general"};

// The entry points of an op in launch order, and which of them takes the dynamic shared memory.
struct EntryPoints {
  const char* names[3];
  int count;
  int main;
};
constexpr EntryPoints kEntryPoints[kOps] = {
    {{"flash_fwd"}, 1, 0},
    {{"flash_bwd_preprocess", "flash_bwd", "flash_bwd_postprocess"}, 3, 1},
    {{"flash_decode", "flash_combine"}, 2, 0},
    {{"flash_rotary"}, 1, 0},
};
constexpr EntryPoints kFp8EntryPoints = {{"flash_transpose_v", "flash_fwd"}, 2, 1};

// Kernel families, the fastest first. The last one has every feature, but for FP8, which the first one alone has.
constexpr const char* kFamilies[] = {"sm90", "sm80"};
constexpr int kFamilyCount = sizeof(kFamilies) / sizeof(kFamilies[0]);
constexpr int kMinCapability = 80;
constexpr int kFp8Capability = 90;

constexpr int kMaxDevices = 128;
constexpr int kHeadDimSlots = kMaxHeadDim / kHeadDimStep;
constexpr int kMaxImages = 8;
constexpr int64_t kMaxGrid = 2147483647;

using KernelSlot = std::atomic<const Kernel*>;

struct LoadedKernel {
  Kernel kernel;
  const char* key;
  LoadedKernel* next;
};

// A device that was launched on.
struct Device {
  DeviceFacts facts;
  CUcontext primary;
  LoadedKernel* loaded;  // guarded by resolve_mutex
  KernelSlot slots[kOps][kDtypes][kMasks][kPreferences][kHeadDimSlots];
};

std::atomic<Device*> devices[kMaxDevices];
std::mutex resolve_mutex;

KernelSlot& slot_of(Device& device, const KernelQuery& query) {
  return device.slots[static_cast<int>(query.op)][static_cast<int>(query.dtype)][static_cast<int>(query.mask)]
                     [static_cast<int>(query.preference)][query.head_dim / kHeadDimStep - 1];
}

struct Key {
  char text[sizeof(Record::key)];
};

Key key_of(const KernelQuery& query, const char* family, unsigned head_dim) {
  Key key;
  snprintf(key.text, sizeof(key.text), "%s-%s-%s-d%u-%s", kOpNames[static_cast<int>(query.op)], family,
           kDtypeNames[static_cast<int>(query.dtype)], head_dim, kMaskNames[static_cast<int>(query.mask)]);
  return key;
}

// FLASH_ATTN_FAMILY as an index into kFamilies, or -1 where it is not set. Read once: a call does no string work.
int forced_family() {
  static const int forced = [] {
    const char* const wanted = getenv("FLASH_ATTN_FAMILY");
    if (wanted == nullptr || *wanted == 0) return -1;
    for (int i = 0; i < kFamilyCount; ++i) {
      if (strcmp(wanted, kFamilies[i]) == 0) return i;
    }
    Text known;
    for (const char* family : kFamilies) known.add("%s%s", known.empty() ? "" : ", ", family);
    fail("FLASH_ATTN_FAMILY=%s names no kernel family; there is: %s. Unset it to take the fastest.", wanted,
         known.c_str());
  }();
  return forced;
}

int forced_family_of(const KernelQuery& query) { return query.dtype == Dtype::e4m3 ? 0 : forced_family(); }

// "80, 86, ptx80": the archs of a group.
Text archs_of(const KernelSet& set, KernelGroup group) {
  Text text;
  for (uint32_t i = group.first; i < group.last; ++i) text.add("%s%s", text.empty() ? "" : ", ", set[i].arch);
  return text;
}

[[noreturn]] void fail_missing_key(const KernelSet& set, const KernelQuery& query, int head_dim) {
  const int family = forced_family_of(query);
  const int missing = (head_dim + 63) / 64 * 64;
  const Key key = key_of(query, kFamilies[family >= 0 ? family : kFamilyCount - 1], static_cast<unsigned>(missing));
  Text built;
  constexpr int kListed = 24;
  int groups = 0;
  for (uint32_t i = 0; i < set.size(); i = group_at(set, i).last) {
    if (groups++ < kListed) built.add("%s%s", built.empty() ? "" : ", ", set[i].key);
  }
  if (groups > kListed) built.add(" and %d more", groups - kListed);
  fail_missing(
      "kernel %s is not built (head_dim %d needs it). Built: %s. To add it, build from source with FORCE_BUILD=1 and "
      "with %d in FLASH_ATTN_HEAD_DIMS, or with neither FLASH_ATTN_HEAD_DIMS nor FLASH_ATTN_KERNELS set, which builds "
      "every kernel.",
      key.text, head_dim, built.empty() ? "nothing" : built.c_str(), missing);
}

// `refused`: a sentence on images that the driver did not take.
[[noreturn]] void fail_no_arch(const KernelSet& set, KernelGroup group, const DeviceFacts& gpu,
                               const char* refused = "") {
  const char* const key = set[group.first].key;
  const Text archs = archs_of(set, group);
  if (gpu.capability() < kMinCapability) {
    fail("%s (device %d) has compute capability %d.%d; flash_attn needs 8.0 or newer. Kernel %s is built for: %s.",
         gpu.name, gpu.ordinal, gpu.major, gpu.minor, key, archs.c_str());
  }
  fail_missing(
      "kernel %s is not built for %s (device %d, compute capability %d.%d); it is built for: %s.%s To add it, build from "
      "source with FORCE_BUILD=1 FLASH_ATTN_CUDA_ARCHS=%d.%d.",
      key, gpu.name, gpu.ordinal, gpu.major, gpu.minor, archs.c_str(), refused, gpu.major, gpu.minor);
}

struct Choice {
  KernelGroup group;
  const Record* images[kMaxImages];
  int image_count;
};

// The smallest head dim that holds the query's, in the preferred family of those that have it for this GPU.
Choice choose(const KernelSet& set, const KernelQuery& query, const DeviceFacts& gpu) {
  if (query.dtype == Dtype::e4m3 && gpu.capability() != kFp8Capability) {
    fail("FP8 attention needs a GPU of compute capability %d.%d; %s (device %d) has %d.%d. Use float16 or bfloat16.",
         kFp8Capability / 10, kFp8Capability % 10, gpu.name, gpu.ordinal, gpu.major, gpu.minor);
  }
  const int forced = forced_family_of(query);
  const bool backwards = query.preference == Preference::latency && forced < 0;
  Choice best = {};
  int best_rank = kFamilyCount;
  bool key_exists = false;
  KernelGroup without_arch = {};
  for (uint32_t i = 0; i < set.size();) {
    const KernelGroup group = group_at(set, i);
    i = group.last;
    const Record& record = set[group.first];
    if (record.head_dim < static_cast<uint32_t>(query.head_dim)) continue;
    int family = 0;
    while (family < kFamilyCount && strcmp(record.key, key_of(query, kFamilies[family], record.head_dim).text) != 0) {
      ++family;
    }
    if (family == kFamilyCount || (forced >= 0 && family != forced && family != kFamilyCount - 1)) continue;
    if (query.preference == Preference::every_feature && family != kFamilyCount - 1) continue;
    Choice found;
    found.group = group;
    found.image_count = usable_records(set, group, gpu.capability(), found.images, kMaxImages);
    if (found.image_count == 0) {
      if (!key_exists || record.head_dim < set[without_arch.first].head_dim) without_arch = group;
      key_exists = true;
      continue;
    }
    const int rank = backwards ? kFamilyCount - 1 - family : family;
    const bool first = best.image_count == 0;
    const uint32_t best_head_dim = first ? 0 : best.images[0]->head_dim;
    if (first || record.head_dim < best_head_dim || (record.head_dim == best_head_dim && rank < best_rank)) {
      best = found;
      best_rank = rank;
    }
  }
  if (best.image_count > 0) return best;
  if (key_exists) fail_no_arch(set, without_arch, gpu);
  fail_missing_key(set, query, query.head_dim);
}

bool fits(const Record& record, int static_bytes, const DeviceFacts& gpu) {
  return static_cast<int64_t>(record.smem_bytes) + static_bytes <= gpu.shared_bytes;
}

[[noreturn]] void fail_shared_memory(const Record& record, int static_bytes, const DeviceFacts& gpu) {
  const int64_t needed = static_cast<int64_t>(record.smem_bytes) + static_bytes;
  fail_missing(
      "kernel %s (arch %s) needs %lld bytes of shared memory per block, and %s (device %d, compute capability %d.%d) "
      "has %d available. Use a smaller head_dim on this GPU.",
      record.key, record.arch, static_cast<long long>(needed), gpu.name, gpu.ordinal, gpu.major, gpu.minor,
      gpu.shared_bytes);
}

// What was being done, for check(): "<action> kernel <key> (arch 90) on NVIDIA H200 (device 0)".
struct Action {
  Action(const char* action, const Record& record, const DeviceFacts& gpu) {
    snprintf(text, sizeof(text), "%s kernel %s (arch %s) on %s (device %d)", action, record.key, record.arch, gpu.name,
             gpu.ordinal);
  }
  char text[384];
};

// Whether an error says that an image is of no use to this GPU and driver, while another one may be: machine code for
// another GPU, or PTX that the driver is too old for, has no compiler for, or is told not to compile.
bool is_refusal(CUresult error) {
  return error == CUDA_ERROR_NO_BINARY_FOR_GPU || error == CUDA_ERROR_JIT_COMPILER_NOT_FOUND ||
         error == CUDA_ERROR_UNSUPPORTED_PTX_VERSION || error == CUDA_ERROR_JIT_COMPILATION_DISABLED;
}

// Loads one image; false where the driver refuses it, with the reason added to `refused`.
bool load_module(const Driver& cuda, const KernelSet& set, const Record& record, const DeviceFacts& gpu,
                 CUmodule* module, Text* refused) {
  char log[2048] = {0};
  int options[2] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void* values[2] = {log, reinterpret_cast<void*>(sizeof(log) - 1)};
  const CUresult error = cuda.cuModuleLoadDataEx(module, set.image(record), 2, options, values);
  if (error == CUDA_SUCCESS) return true;
  if (is_refusal(error)) {
    refused->add(" The driver does not take %s: %s.", record.arch, ErrorText(cuda, error).c_str());
    return false;
  }
  int version = 0;
  cuda.cuDriverGetVersion(&version);
  fail("%s failed: %s; the driver supports CUDA %d.%d, the kernels are from %s.%s%s",
       Action("loading", record, gpu).text, ErrorText(cuda, error).c_str(), version / 1000, version % 1000 / 10,
       set.compiler(), log[0] != 0 ? " The driver's log: " : "", log);
}

// A module that is unloaded again unless everything in it was found in order.
class ModuleGuard {
 public:
  explicit ModuleGuard(const Driver& cuda) : cuda_(cuda) {}
  ~ModuleGuard() {
    if (module != nullptr) cuda_.cuModuleUnload(module);
  }
  ModuleGuard(const ModuleGuard&) = delete;
  ModuleGuard& operator=(const ModuleGuard&) = delete;

  CUmodule module = nullptr;

 private:
  const Driver& cuda_;
};

Kernel load_kernel(const Driver& cuda, const KernelSet& set, const Choice& choice, const KernelQuery& query,
                   const Device& device) {
  const DeviceFacts& gpu = device.facts;
  const CurrentContext current(cuda, device.primary);
  const RelaxedCapture relaxed(cuda);

  // Mostly the first image is it. A later one, PTX in the end, serves where the tile of a better one does not fit, and
  // on integrated GPUs, which refuse machine code for another minor.
  ModuleGuard guard(cuda);
  const Record* record = nullptr;
  bool any_fits = false;
  Text refused;
  for (int i = 0; i < choice.image_count && guard.module == nullptr; ++i) {
    record = choice.images[i];
    if (!fits(*record, 0, gpu)) continue;
    any_fits = true;
    if (!load_module(cuda, set, *record, gpu, &guard.module, &refused)) guard.module = nullptr;
  }
  if (!any_fits) fail_shared_memory(*choice.images[0], 0, gpu);
  if (guard.module == nullptr) fail_no_arch(set, choice.group, gpu, refused.c_str());

  const EntryPoints& points =
      query.dtype == Dtype::e4m3 ? kFp8EntryPoints : kEntryPoints[static_cast<int>(query.op)];
  Kernel kernel = {};
  kernel.record = record;
  kernel.dtype = query.dtype;
  kernel.context = device.primary;
  kernel.multiprocessors = gpu.multiprocessors;
  kernel.masked = query.mask != Mask::full;
  kernel.tensor_maps = (query.op == Op::fwd || query.op == Op::bwd) && strncmp(record->key + 3, "-sm90-", 6) == 0;
  // ptx::wait_on_dependencies is nothing in code for less than 9.0.
  kernel.waits = cuda.overlaps_launches && atoi(record->arch) >= 90;
  for (int i = 0; i < points.count; ++i) {
    CUfunction* const entry = &kernel.entry[i];
    const CUresult found = cuda.cuModuleGetFunction(entry, guard.module, points.names[i]);
    if (found != CUDA_SUCCESS) check(cuda, found, Action("finding an entry point of", *record, gpu).text);
    // Reading an attribute makes a lazily loading driver load the function now, outside of a capture's reach.
    int threads = 0, static_bytes = 0;
    CUresult read = cuda.cuFuncGetAttribute(&threads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, *entry);
    if (read == CUDA_SUCCESS) read = cuda.cuFuncGetAttribute(&static_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, *entry);
    if (read != CUDA_SUCCESS) check(cuda, read, Action("reading the attributes of", *record, gpu).text);
    if (static_cast<uint32_t>(threads) < record->threads) {
      fail("kernel %s (arch %s): %s can run with %d threads per block, the kernel set asks for %u. Reinstall flash-attn.",
           record->key, record->arch, points.names[i], threads, record->threads);
    }
    if (i != points.main) continue;
    if (!fits(*record, static_bytes, gpu)) fail_shared_memory(*record, static_bytes, gpu);
    const CUresult set_error = cuda.cuFuncSetAttribute(*entry, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                                       static_cast<int>(record->smem_bytes));
    if (set_error != CUDA_SUCCESS) check(cuda, set_error, Action("setting the shared memory of", *record, gpu).text);
  }
  guard.module = nullptr;
  return kernel;
}

// What the compiler is told of a GPU.
void describe(const Driver& cuda, const DeviceFacts& gpu, flash_attn_compile_request* request) {
  request->device = gpu.ordinal;
  request->capability = gpu.capability();
  request->shared_bytes = gpu.shared_bytes;
  check(cuda, cuda.cuDriverGetVersion(&request->driver_version), "reading the driver's version");
}

// The device's entry of `devices`, made at its first use. Called with resolve_mutex held.
Device& device_entry(const Driver& cuda, int ordinal) {
  Device* device = devices[ordinal].load(std::memory_order_relaxed);
  if (device != nullptr) return *device;
  const DeviceFacts facts = device_facts(cuda, ordinal);
  CUcontext primary = nullptr;
  check(cuda, cuda.cuDevicePrimaryCtxRetain(&primary, facts.handle), "taking the GPU's primary context");
  device = new Device();
  device->facts = facts;
  device->primary = primary;
  devices[ordinal].store(device, std::memory_order_release);
  return *device;
}

// The query's kernel out of a set, loaded on the device. Called with resolve_mutex held.
const Kernel& load_from(const Driver& cuda, const KernelSet& set, const KernelQuery& query, Device& device) {
  const Choice choice = choose(set, query, device.facts);
  const char* const key = set[choice.group.first].key;
  LoadedKernel* loaded = device.loaded;
  while (loaded != nullptr && strcmp(loaded->key, key) != 0) loaded = loaded->next;
  if (loaded == nullptr) {
    loaded = new LoadedKernel{load_kernel(cuda, set, choice, query, device), key, device.loaded};
    device.loaded = loaded;
  }
  slot_of(device, query).store(&loaded->kernel, std::memory_order_release);
  return loaded->kernel;
}

// The families that may serve, the fastest first, as the compiler is told them.
Text wanted_families(bool every_feature, int forced) {
  Text text;
  for (int i = 0; i < kFamilyCount; ++i) {
    const bool last = i == kFamilyCount - 1;
    if (every_feature ? last : forced < 0 || i == forced || last) text.add("%s%s", text.empty() ? "" : ",", kFamilies[i]);
  }
  return text;
}

const KernelSet& compile(const Driver& cuda, const KernelQuery& query, const DeviceFacts& gpu,
                         const MissingKernel& missing) {
  const Text families = wanted_families(query.preference == Preference::every_feature, forced_family_of(query));
  flash_attn_compile_request request = {};
  request.op = kOpNames[static_cast<int>(query.op)];
  request.dtype = kDtypeNames[static_cast<int>(query.dtype)];
  request.mask = kMaskNames[static_cast<int>(query.mask)];
  request.families = families.c_str();
  request.head_dim = query.head_dim;
  describe(cuda, gpu, &request);
  return compile_kernel(request, missing);
}

__attribute__((noinline, cold)) const Kernel& resolve_and_load(const KernelQuery& query) {
  const Driver& cuda = driver();
  const KernelSet* set = &kernel_set();
  Device* device = nullptr;
  const auto find = [&]() -> const Kernel& {
    std::lock_guard<std::mutex> lock(resolve_mutex);
    device = &device_entry(cuda, query.device);
    const Kernel* const resolved = slot_of(*device, query).load(std::memory_order_relaxed);
    return resolved != nullptr ? *resolved : load_from(cuda, *set, query, *device);
  };
  try {
    return find();
  } catch (const MissingKernel& missing) {
    // Without the lock: the compiler waits for Python's global lock, whose holder may be waiting for this one.
    set = &compile(cuda, query, device->facts, missing);
  }
  return find();
}

// Blocks that cover `length`, and a 1-D grid of them for every head and batch.
int64_t blocks_of(int64_t length, int64_t block) { return (length + block - 1) / block; }

unsigned grid_of(const Kernel& kernel, int64_t blocks, int64_t heads, int64_t batch) {
  int64_t heads_and_batch = 0, grid = 0;
  if (__builtin_mul_overflow(heads, batch, &heads_and_batch) ||
      __builtin_mul_overflow(blocks, heads_and_batch, &grid) || grid > kMaxGrid) {
    fail("kernel %s: %lld tiles x %lld heads x %lld sequences are more than the %lld blocks of a launch. Split the batch.",
         kernel.record->key, static_cast<long long>(blocks), static_cast<long long>(heads),
         static_cast<long long>(batch), static_cast<long long>(kMaxGrid));
  }
  return static_cast<unsigned>(grid);
}

void check_launch(const Kernel& kernel, CUresult error, unsigned grid, unsigned shared_bytes) {
  if (__builtin_expect(error != CUDA_SUCCESS, 0)) {
    fail("launching kernel %s (arch %s) with %u blocks of %u threads and %u bytes of shared memory failed: %s.",
         kernel.record->key, kernel.record->arch, grid, kernel.record->threads, shared_bytes,
         ErrorText(driver(), error).c_str());
  }
}

template <typename Params>
void launch(const Driver& cuda, const Kernel& kernel, int entry, unsigned grid, unsigned shared_bytes, Params* params,
            CUstream stream, unsigned grid_y = 1) {
  if (grid == 0) return;
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(params))};
  const CUresult error = cuda.cuLaunchKernel(kernel.entry[entry], grid, grid_y, 1, kernel.record->threads, 1, 1, shared_bytes,
                                             stream, arguments, nullptr);
  check_launch(kernel, error, grid, shared_bytes);
}

// A launch that may begin while the one before it on the stream ends, where the kernel's code waits for what it needs of it.
template <typename Params>
void launch_early(const Driver& cuda, const Kernel& kernel, int entry, unsigned grid, unsigned shared_bytes, Params* params,
                  CUstream stream) {
  if (!kernel.waits) return launch(cuda, kernel, entry, grid, shared_bytes, params, stream);
  if (grid == 0) return;
  CUlaunchAttribute overlap = {};
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config = {grid, 1, 1, kernel.record->threads, 1, 1, shared_bytes, stream, &overlap, 1};
  void* arguments[] = {params};
  check_launch(kernel, cuda.cuLaunchKernelEx(&config, kernel.entry[entry], arguments, nullptr), grid, shared_bytes);
}

template <typename Params>
void complete(const Kernel& kernel, Params& params) {
  constexpr double kLog2E = 1.4426950408889634;
  params.group = params.heads_kv > 0 ? params.heads / params.heads_kv : 1;
  params.blocks_m = static_cast<int>(blocks_of(params.seqlen_q, kernel.record->block_m));
  params.scale_log2 = static_cast<float>(params.scale * kLog2E);
}

}  // namespace

const Kernel& resolve(const KernelQuery& query) {
  if (query.head_dim < kHeadDimStep || query.head_dim > kMaxHeadDim || query.head_dim % kHeadDimStep != 0) {
    fail("head_dim %d is not one of 8, 16, ..., %d.", query.head_dim, kMaxHeadDim);
  }
  if (query.device < 0 || query.device >= kMaxDevices) fail("device %d is out of range.", query.device);
  Device* const device = devices[query.device].load(std::memory_order_acquire);
  if (device != nullptr) {
    const Kernel* const kernel = slot_of(*device, query).load(std::memory_order_acquire);
    if (kernel != nullptr) return *kernel;
  }
  return resolve_and_load(query);
}

Mask choose_mask(const ScoreRequest& request, int seqlen_q, int seqlen_k, ScoreModifiers* modifiers) {
  if (!(request.dropout_p >= 0 && request.dropout_p < 1)) {
    fail("dropout_p is %g; it must be at least 0 and below 1.", request.dropout_p);
  }
  ScoreModifiers& m = *modifiers;
  // A bound as far away as the longest sequence hides nothing, and keeps the kernels' sums of positions within an int.
  const auto bound = [](int64_t window, int length) {
    return static_cast<int>(window < 0 || window > length ? length : window);
  };
  m.window_left = bound(request.window_left, seqlen_k);
  m.window_right = request.causal ? 0 : bound(request.window_right, seqlen_q);
  m.chunk = static_cast<int>(request.chunk < 0 ? 0 : request.chunk < kUnlimited ? request.chunk : kUnlimited);
  m.softcap = static_cast<float>(request.softcap);
  if (request.dropout_p > 0) {
    m.drop_threshold = static_cast<unsigned>(request.dropout_p * 4294967296.0);
    m.keep_scale = static_cast<float>(1 / (1 - request.dropout_p));
  } else {
    m.rng_state = nullptr;
  }
  // The last query stands at the last key and sees `window_left` keys before it, the first one all but the last
  // seqlen_q - 1 keys by itself.
  const bool left_hides = m.window_left < seqlen_k - 1;
  const bool right_hides = request.causal || m.window_right < seqlen_q - 1;
  if (left_hides || (right_hides && m.window_right != 0) || m.chunk > 0 || m.softcap > 0 || m.alibi_slopes != nullptr ||
      m.sink != nullptr || m.rng_state != nullptr) {
    return Mask::general;
  }
  return right_hides ? Mask::causal : Mask::full;
}

namespace {

// What the tensor maps of a kernel have in common: the boxes' columns are 128 bytes, or 64 where a row has no more.
struct MapFormat {
  int type;
  int bytes;  // of an element
  unsigned columns;
  int swizzle;
};

MapFormat map_format(const Kernel& kernel) {
  if (kernel.dtype != Dtype::e4m3) {
    const bool bf16 = kernel.dtype == Dtype::bf16;
    return {bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, 64, CU_TENSOR_MAP_SWIZZLE_128B};
  }
  if (kernel.record->head_dim < 128) return {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, 64, CU_TENSOR_MAP_SWIZZLE_64B};
  return {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, 128, CU_TENSOR_MAP_SWIZZLE_128B};
}

// The tensor map of q, dout, k or v: (D, S, H, B), or (D, T, H, 1) if packed, with boxes of `box_rows` rows. False where
// the driver cannot describe the strides.
bool encode_map(const Driver& cuda, unsigned char* map, const Kernel& kernel, const void* data, const Strides& stride,
                int64_t head_dim, int64_t rows, int64_t heads, int64_t batch, unsigned box_rows) {
  const MapFormat format = map_format(kernel);
  const uint64_t sizes[4] = {static_cast<uint64_t>(head_dim), static_cast<uint64_t>(rows), static_cast<uint64_t>(heads),
                             static_cast<uint64_t>(batch)};
  // A dimension of one element has no stride to speak of; the driver wants a valid one.
  const auto bytes = [&](long long elements, int64_t size) {
    return static_cast<uint64_t>(size > 1 ? elements * format.bytes : 16);
  };
  const uint64_t strides[3] = {bytes(stride.row, rows), bytes(stride.head, heads), bytes(stride.batch, batch)};
  const unsigned box[4] = {format.columns, box_rows, 1, 1};
  const unsigned steps[4] = {1, 1, 1, 1};
  return cuda.cuTensorMapEncodeTiled(map, format.type, 4, const_cast<void*>(data), sizes, strides, box, steps,
                                     CU_TENSOR_MAP_INTERLEAVE_NONE, format.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool encode_q_map(const Driver& cuda, unsigned char* map, const Kernel& kernel, const FwdParams& fwd) {
  const int64_t batch = fwd.sequences.cu_seqlens_q != nullptr ? 1 : fwd.batch;
  // Each warpgroup's rows are fetched alone, but for those of FP8 kernels.
  const unsigned rows = kernel.dtype == Dtype::e4m3 ? kernel.record->block_m : 64;
  return encode_map(cuda, map, kernel, fwd.q, fwd.q_stride, fwd.head_dim, fwd.lse_head_stride, fwd.heads, batch, rows);
}

// Of k or v.
bool encode_keys_map(const Driver& cuda, unsigned char* map, const Kernel& kernel, const FwdParams& fwd, const void* data,
                     const Strides& stride, int64_t head_dim, int64_t key_rows) {
  const int64_t batch = fwd.sequences.cu_seqlens_k != nullptr ? 1 : fwd.batch;
  return encode_map(cuda, map, kernel, data, stride, head_dim, key_rows, fwd.heads_kv, batch, kernel.record->block_n);
}

// The grid of a kernel that deals out its tiles itself: at most one block a multiprocessor.
unsigned persistent_grid(const Kernel& kernel, const FwdParams& fwd, int64_t sm_margin) {
  const unsigned tiles = grid_of(kernel, fwd.blocks_m, fwd.heads, fwd.batch);
  const int64_t left = kernel.multiprocessors - sm_margin;
  const unsigned multiprocessors = left > 1 ? static_cast<unsigned>(left) : 1;
  return tiles < multiprocessors ? tiles : multiprocessors;
}

// Whether sequences have different lengths, so that their tiles do.
bool lengths_vary(const FwdParams& fwd) {
  return fwd.sequences.cu_seqlens_q != nullptr || fwd.sequences.seqused_q != nullptr;
}

bool launch_fwd_tma(const Driver& cuda, const Kernel& kernel, const FwdParams& fwd, int64_t key_rows,
                    const TileOptions& options, CUstream stream) {
  if (key_rows == 0) return false;  // an empty tensor has no map
  FwdTmaParams params;
  params.fwd = fwd;
  if (!encode_q_map(cuda, params.q_map, kernel, fwd) ||
      !encode_keys_map(cuda, params.k_map, kernel, fwd, fwd.k, fwd.k_stride, fwd.head_dim, key_rows) ||
      !encode_keys_map(cuda, params.v_map, kernel, fwd, fwd.v, fwd.v_stride, fwd.head_dim_v, key_rows)) {
    return false;
  }
  // Measured on an H200: the longest tiles of 32 heads first. One head after another where no tile is longer than others,
  // or without a counter.
  constexpr int kHeadsOfAGroup = 32;
  params.heads_per_group = options.counter != nullptr && kernel.masked ? kHeadsOfAGroup : 1;
  params.next_tile = options.counter;
  const unsigned grid = persistent_grid(kernel, fwd, options.sm_margin);
  if (options.counter != nullptr && grid > 0) {
    const CUdeviceptr address = reinterpret_cast<CUdeviceptr>(options.counter);
    check(cuda, cuda.cuMemsetD32Async(address, 0, 1, stream), "clearing the counter of tiles");
  }
  launch(cuda, kernel, 0, grid, kernel.record->smem_bytes, &params, stream);
  return true;
}

}  // namespace

bool wants_tile_counter(const Kernel& kernel, const FwdParams& params) {
  if (!kernel.tensor_maps || kernel.dtype == Dtype::e4m3) return false;
  // Measured on an H200: of short sequences of one length, each thread block's share is as good, and has no memory to clear.
  constexpr int64_t kShort = 16;
  const int64_t blocks = blocks_of(params.seqlen_q, kernel.record->block_m);
  if (!lengths_vary(params) && !(kernel.masked && blocks >= kShort)) return false;
  return grid_of(kernel, blocks, params.heads, params.batch) > static_cast<unsigned>(kernel.multiprocessors);
}

bool launch_fwd(const Kernel& kernel, FwdParams& params, int64_t key_rows, const TileOptions& options, CUstream stream) {
  const Driver& cuda = driver();
  complete(kernel, params);
  const CurrentContext current(cuda, kernel.context);
  if (kernel.tensor_maps) return launch_fwd_tma(cuda, kernel, params, key_rows, options, stream);
  const unsigned grid = grid_of(kernel, params.blocks_m, params.heads, params.batch);
  launch(cuda, kernel, 0, grid, kernel.record->smem_bytes, &params, stream);
  return true;
}

int64_t fp8_workspace(const Kernel& kernel, FwdFp8Params& params, int64_t key_rows) {
  const FwdParams& fwd = params.tma.fwd;
  const int64_t block_n = kernel.record->block_n;
  params.blocks_n = static_cast<int>(blocks_of(fwd.seqlen_k, block_n));
  // As in bwd_workspace.
  const int64_t tiles_of_a_head = fwd.sequences.cu_seqlens_k != nullptr
                                      ? key_rows / block_n + fwd.batch
                                      : static_cast<int64_t>(fwd.batch) * params.blocks_n;
  const int64_t tiles = grid_of(kernel, tiles_of_a_head, fwd.heads_kv, 1);
  params.v_tiles_of_head = static_cast<int>(fwd.heads_kv > 0 ? tiles_of_a_head : 0);
  return tiles * block_n * kernel.record->head_dim;
}

bool launch_fwd_fp8(const Kernel& kernel, FwdFp8Params& params, int64_t key_rows, int64_t sm_margin, CUstream stream) {
  const Driver& cuda = driver();
  FwdParams& fwd = params.tma.fwd;
  complete(kernel, fwd);
  const CurrentContext current(cuda, kernel.context);
  if (!encode_q_map(cuda, params.tma.q_map, kernel, fwd)) return false;
  if (key_rows == 0) {
    memcpy(params.tma.k_map, params.tma.q_map, sizeof(params.tma.k_map));  // an empty tensor has no map, and needs none
  } else if (!encode_keys_map(cuda, params.tma.k_map, kernel, fwd, fwd.k, fwd.k_stride, fwd.head_dim, key_rows)) {
    return false;
  }
  const unsigned value_tiles = grid_of(kernel, params.blocks_n, fwd.heads_kv, fwd.batch);
  launch(cuda, kernel, 0, value_tiles, 0, &params, stream);
  // Measured on an H200: long sequences gain by the longest tiles of all heads first, short ones by one head at a time.
  constexpr int kManyBlocks = 64;
  params.tma.heads_per_group = fwd.blocks_m >= kManyBlocks ? fwd.batch * fwd.heads : 1;
  params.tma.next_tile = nullptr;  // dealt in rounds
  launch_early(cuda, kernel, 1, persistent_grid(kernel, fwd, sm_margin), kernel.record->smem_bytes, &params, stream);
  return true;
}

void fill_minus_infinity(const Kernel& kernel, float* values, int64_t count, CUstream stream) {
  if (count == 0) return;
  constexpr unsigned kMinusInfinity = 0xff800000;
  const Driver& cuda = driver();
  const CurrentContext current(cuda, kernel.context);
  const CUdeviceptr address = reinterpret_cast<CUdeviceptr>(values);
  check(cuda, cuda.cuMemsetD32Async(address, kMinusInfinity, static_cast<size_t>(count), stream), "filling lse");
}

BwdWorkspace bwd_workspace(const Kernel& kernel, const BwdParams& params, int64_t total_q) {
  const int64_t block_m = kernel.record->block_m;
  const bool packed = params.sequences.cu_seqlens_q != nullptr;
  // Each packed sequence begins a tile of its own, so that the last one of each is partly used.
  const int64_t tiles_of_a_head =
      packed ? total_q / block_m + params.batch : params.batch * blocks_of(params.seqlen_q, block_m);
  // Bounded like a grid, and the tile by the record's check: none of these products overflows.
  const int64_t tiles = grid_of(kernel, tiles_of_a_head, params.heads, 1);
  const int64_t rows = tiles * block_m;
  BwdWorkspace workspace;
  workspace.total_tiles = static_cast<int>(params.heads > 0 ? tiles_of_a_head : 0);
  workspace.dq_accum = 0;
  workspace.lse_log2 = rows * kernel.record->head_dim;
  workspace.delta = workspace.lse_log2 + rows;
  workspace.dq_semaphore = workspace.delta + rows;
  workspace.total = workspace.dq_semaphore + tiles;
  return workspace;
}

namespace {

// False where the driver cannot describe one of the tensors.
bool encode_maps(const Driver& cuda, const Kernel& kernel, BwdTmaParams& params, int64_t key_rows) {
  const BwdParams& p = params.bwd;
  const int64_t query_rows = p.lse_head_stride;
  if (query_rows == 0 || key_rows == 0) return false;  // an empty tensor has no map
  const int64_t batch_q = p.sequences.cu_seqlens_q != nullptr ? 1 : p.batch;
  const int64_t batch_k = p.sequences.cu_seqlens_k != nullptr ? 1 : p.batch;
  const auto query_map = [&](unsigned char* map, const void* data, const Strides& stride, int64_t head_dim) {
    return encode_map(cuda, map, kernel, data, stride, head_dim, query_rows, p.heads, batch_q, kernel.record->block_m);
  };
  const auto key_map = [&](unsigned char* map, const void* data, const Strides& stride, int64_t head_dim) {
    return encode_map(cuda, map, kernel, data, stride, head_dim, key_rows, p.heads_kv, batch_k, kernel.record->block_n);
  };
  return query_map(params.q_map, p.q, p.q_stride, p.head_dim) &&
         query_map(params.dout_map, p.dout, p.dout_stride, p.head_dim_v) &&
         key_map(params.k_map, p.k, p.k_stride, p.head_dim) && key_map(params.v_map, p.v, p.v_stride, p.head_dim_v);
}

}  // namespace

bool launch_bwd(const Kernel& kernel, BwdParams& params, const BwdWorkspace& workspace, float* buffer, int64_t key_rows,
                CUstream stream) {
  const Driver& cuda = driver();
  complete(kernel, params);
  params.blocks_n = static_cast<int>(blocks_of(params.seqlen_k, kernel.record->block_n));
  params.total_tiles = workspace.total_tiles;
  params.dq_accum = buffer + workspace.dq_accum;
  params.lse_log2 = buffer + workspace.lse_log2;
  params.delta = buffer + workspace.delta;
  params.dq_semaphore = reinterpret_cast<int*>(buffer + workspace.dq_semaphore);
  const unsigned query_tiles = grid_of(kernel, params.blocks_m, params.heads, params.batch);
  const int64_t blocks_of_a_key_tile = kernel.record->split ? 2 : 1;
  const unsigned key_blocks = grid_of(kernel, blocks_of_a_key_tile * params.blocks_n, params.heads_kv, params.batch);
  const CurrentContext current(cuda, kernel.context);
  BwdTmaParams with_maps;
  if (kernel.tensor_maps) {
    with_maps.bwd = params;
    if (!encode_maps(cuda, kernel, with_maps, key_rows)) return false;
  }
  launch(cuda, kernel, 0, query_tiles, 0, &params, stream);
  if (kernel.tensor_maps) {
    launch(cuda, kernel, 1, key_blocks, kernel.record->smem_bytes, &with_maps, stream);
  } else {
    launch(cuda, kernel, 1, key_blocks, kernel.record->smem_bytes, &params, stream);
  }
  launch(cuda, kernel, 2, query_tiles, 0, &params, stream);
  return true;
}

int decode_splits(const Kernel& kernel, DecodeParams& params, int64_t asked) {
  const int64_t warps = kernel.record->threads / 32;
  params.group = params.heads_kv > 0 ? params.heads / params.heads_kv : 1;
  const int64_t rows = static_cast<int64_t>(params.group) * params.seqlen_q;
  const int64_t warp_tiles = blocks_of(rows, kernel.record->block_m);
  params.row_warps = 1;
  while (params.row_warps < warp_tiles && 2 * params.row_warps <= warps) params.row_warps *= 2;
  params.row_tiles = static_cast<int>(blocks_of(warp_tiles, params.row_warps));
  constexpr int64_t kMostSplits = 128;
  constexpr int64_t kSmallestPart = 64;  // keys
  const int64_t parts = blocks_of(params.seqlen_k, kSmallestPart);
  if (asked > 0) return static_cast<int>(asked < kMostSplits ? asked : kMostSplits);
  const int64_t multiprocessors = kernel.multiprocessors;
  const int64_t tiles = static_cast<int64_t>(params.batch) * params.heads_kv * params.row_tiles;
  if (tiles == 0) return 1;
  // The fewest splits with the shortest time, in steps: a warp takes block_n keys in one, a wave of blocks costs the time
  // of kWave besides its own, and joining the splits that of kCombine. Blocks of few rows wait for memory, which half of
  // the multiprocessors keep busy: more waves than one only slow them. (Measured on an H200.)
  constexpr int64_t kWave = 8, kCombine = 4;
  const int64_t steps = blocks_of(params.seqlen_k, warps * kernel.record->block_n);
  int64_t most = std::min(parts, kMostSplits);
  if (params.row_warps <= 2) most = std::min(most, multiprocessors / tiles);
  int64_t best = 1, least = INT64_MAX;
  for (int64_t splits = 1; splits <= most; ++splits) {
    const int64_t cost = blocks_of(tiles * splits, multiprocessors) * (blocks_of(steps, splits) + kWave) +
                         (splits > 1 ? kCombine : 0);
    if (cost >= least) continue;
    least = cost;
    best = splits;
  }
  return static_cast<int>(best);
}

void launch_decode(const Kernel& kernel, DecodeParams& params, CUstream stream, bool after_rotary) {
  const Driver& cuda = driver();
  constexpr double kLog2E = 1.4426950408889634;
  params.scale_log2 = static_cast<float>(params.scale * kLog2E);
  const int64_t blocks = static_cast<int64_t>(params.row_tiles) * params.splits;
  const unsigned grid = grid_of(kernel, blocks, params.heads_kv, params.batch);
  const CurrentContext current(cuda, kernel.context);
  if (after_rotary) {
    launch_early(cuda, kernel, 0, grid, kernel.record->smem_bytes, &params, stream);
  } else {
    launch(cuda, kernel, 0, grid, kernel.record->smem_bytes, &params, stream);
  }
  if (params.splits == 1) return;
  launch_early(cuda, kernel, 1, grid_of(kernel, params.lse_count, 1, 1), 0, &params, stream);
}

void launch_rotary(const Kernel& kernel, const RotaryParams& params, CUstream stream) {
  const Driver& cuda = driver();
  unsigned most = 0;
  for (int i = 0; i < params.tasks; ++i) {
    const RotaryTask& task = params.task[i];
    const int64_t chunks = static_cast<int64_t>(task.seqlen) * (task.head_dim / kHeadDimStep);
    const int64_t blocks = blocks_of(chunks * task.heads * params.batch, kernel.record->threads);
    const unsigned grid = grid_of(kernel, blocks, 1, 1);
    if (grid > most) most = grid;
  }
  const CurrentContext current(cuda, kernel.context);
  launch(cuda, kernel, 0, most, 0, &params, stream, static_cast<unsigned>(params.tasks));
}

bool supported(int ordinal, char* reason, size_t size) {
  const Driver& cuda = driver();
  const DeviceFacts gpu = device_facts(cuda, ordinal);
  const KernelSet& set = kernel_set();
  Text text;
  text.add("%s (device %d, compute capability %d.%d): ", gpu.name, ordinal, gpu.major, gpu.minor);
  if (gpu.capability() < kMinCapability) {
    text.add("flash_attn needs compute capability 8.0 or newer.");
    copy_text(reason, size, text.c_str());
    return false;
  }
  int keys = 0, usable = 0, through_ptx = 0, of_other_gpus = 0;
  const char* wants_memory = nullptr;
  const char* wants_arch = nullptr;
  KernelGroup group = {};
  for (uint32_t i = 0; i < set.size(); i = group.last) {
    group = group_at(set, i);
    ++keys;
    const Record* images[kMaxImages];
    const int count = usable_records(set, group, gpu.capability(), images, kMaxImages);
    int image = 0;
    while (image < count && !fits(*images[image], 0, gpu)) ++image;
    if (count == 0 && strstr(set[i].key, kFamilies[kFamilyCount - 1]) == nullptr) {
      ++of_other_gpus;  // no loss: the last family has all that the faster ones are made for
    } else if (count == 0) {
      wants_arch = set[i].key;
    } else if (image == count) {
      wants_memory = set[i].key;
    } else {
      ++usable;
      if (strncmp(images[image]->arch, "ptx", 3) == 0) ++through_ptx;
    }
  }
  // What the set lacks for this GPU may be compiled.
  Text how;
  bool compiled = false;
  if (keys - of_other_gpus > usable) {
    flash_attn_compile_request request = {};
    request.op = request.dtype = request.mask = "";
    const Text families = wanted_families(false, forced_family());
    request.families = families.c_str();
    describe(cuda, gpu, &request);
    compiled = can_compile(request, &how);
  }
  if (keys == 0) {
    text.add("the kernel set %s holds no kernel.", set.path());
  } else if (usable == 0) {
    text.add("none of the %d kernels can run; they are built for: %s.", keys, archs_of(set, group).c_str());
    if (wants_memory == nullptr && !compiled) {
      text.add(" Build from source with FORCE_BUILD=1 FLASH_ATTN_CUDA_ARCHS=%d.%d.", gpu.major, gpu.minor);
    }
  } else if (usable == keys - of_other_gpus) {
    text.add("all %d kernels run", usable);
  } else {
    text.add("%d of %d kernels run", usable, keys - of_other_gpus);
  }
  if (through_ptx > 0) text.add(", %d through PTX, which the driver compiles at first use", through_ptx);
  if (usable > 0) text.add(".");
  if (wants_memory != nullptr) text.add(" %s needs more shared memory than %d bytes.", wants_memory, gpu.shared_bytes);
  if (usable > 0 && wants_arch != nullptr) text.add(" %s is not built for this GPU.", wants_arch);
  if (compiled) {
    text.add(" Kernels for it are compiled at first use, %s", how.c_str());
  } else if (!how.empty()) {
    text.add(" They cannot be compiled at first use: %s", how.c_str());
  }
  copy_text(reason, size, text.c_str());
  return usable > 0 || compiled;
}

}  // namespace flash_attn
