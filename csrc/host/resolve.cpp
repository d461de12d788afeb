// The first half of dispatch.h: which kernel of the set serves a query, loaded on the device or compiled for it.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "host/dispatch.h"
#include "host/error.h"
#include "host/jit.h"

namespace flash_attn {

namespace {

constexpr const char* kOpNames[kOps] = {"fwd", "bwd", "decode", "rotary", "round"};
constexpr const char* kDtypeNames[kDtypes] = {"fp16", "bf16", "e4m3"};
constexpr const char* kMaskNames[kMasks] = {"full", "causal", "general"};

// The entry points of an op in launch order, and which of them takes the dynamic shared memory.
struct EntryPoints {
  const char* names[kMaxEntryPoints];
  int count;
  int main;
};
constexpr EntryPoints kEntryPoints[kOps] = {
    {{"flash_fwd"}, 1, 0},
    {{"flash_bwd_preprocess", "flash_bwd", "flash_bwd_postprocess"}, 3, 1},
    {{"flash_decode", "flash_combine"}, 2, 0},
    {{"flash_rotary"}, 1, 0},
    {{"flash_round_sums", "flash_round_largest", "flash_round"}, 3, 2},
};
constexpr EntryPoints kFp8Forward = {{"flash_transpose_v", "flash_fwd"}, 2, 1};

// Kernel families, the fastest first. The last one has every feature, but for FP8, which the first one alone has.
constexpr const char* kFamilies[] = {"sm90", "sm80"};
constexpr int kFamilyCount = sizeof(kFamilies) / sizeof(kFamilies[0]);
constexpr int kMinCapability = 80;
constexpr int kFp8Capability = 90;

constexpr int kMaxDevices = 128;
constexpr int kHeadDimSlots = kMaxHeadDim / kHeadDimStep;
constexpr int kMaxImages = 8;

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

// What a kernel costs, in no unit: a preferred family is worth a third more of padding. buildtools/jit.py has the same rule.
// `rank`: of the family, 0 for the most preferred.
uint32_t cost_of(int rank, uint32_t head_dim) { return head_dim * (rank == kFamilyCount - 1 ? 4 : 3); }

// The kernel that costs least of those that hold the query's head dim; of equal ones, the preferred family's.
Choice choose(const KernelSet& set, const KernelQuery& query, const DeviceFacts& gpu) {
  if (query.dtype == Dtype::e4m3 && gpu.capability() != kFp8Capability) {
    fail("FP8 attention needs a GPU of compute capability %d.%d; %s (device %d) has %d.%d. Use float16 or bfloat16.",
         kFp8Capability / 10, kFp8Capability % 10, gpu.name, gpu.ordinal, gpu.major, gpu.minor);
  }
  const int forced = forced_family_of(query);
  const bool backwards = query.preference == Preference::latency && forced < 0;
  Choice best = {};
  uint32_t best_cost = 0;
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
    const uint32_t cost = cost_of(rank, record.head_dim);
    if (best.image_count == 0 || cost < best_cost || (cost == best_cost && rank < best_rank)) {
      best = found;
      best_cost = cost;
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

  const bool fp8_forward = query.op == Op::fwd && query.dtype == Dtype::e4m3;
  const EntryPoints& points = fp8_forward ? kFp8Forward : kEntryPoints[static_cast<int>(query.op)];
  Kernel kernel = {};
  kernel.record = record;
  kernel.dtype = query.dtype;
  kernel.context = device.primary;
  kernel.multiprocessors = gpu.multiprocessors;
  kernel.masked = query.mask != Mask::full;
  kernel.tensor_maps = (query.op == Op::fwd || query.op == Op::bwd) && strncmp(record->key + 3, "-sm90-", 6) == 0;
  // Besides its own, a block takes 1 KiB, which a multiprocessor has once more than a block can have.
  kernel.halves = static_cast<int64_t>(record->smem_bytes) + 1024 <= gpu.shared_bytes;
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
    kernel.threads[i] = record->threads;
    if (i != points.main && query.op == Op::decode) kernel.threads[i] = kCombineThreads;
    if (i != points.main && fp8_forward) {
      const int threads = fp8_transposers(static_cast<int>(record->block_n), static_cast<int>(record->head_dim));
      kernel.threads[i] = static_cast<unsigned>(threads);
    }
    if (static_cast<unsigned>(threads) < kernel.threads[i]) {
      fail("kernel %s (arch %s): %s can run with %d threads per block, and is to have %u. Reinstall flash-attn.",
           record->key, record->arch, points.names[i], threads, kernel.threads[i]);
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
