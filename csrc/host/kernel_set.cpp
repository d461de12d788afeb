#include "host/kernel_set.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "host/driver.h"
#include "host/error.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the archive is read in place");

namespace flash_attn {

namespace {

constexpr char kFileName[] = "flash_attn.kernels";
constexpr char kMagic[8] = {'F', 'L', 'A', 'S', 'H', 'K', 'S', 0};
constexpr uint32_t kVersion = 1;
constexpr uint64_t kImageAlignment = 64;
constexpr char kReinstall[] = "Reinstall flash-attn.";

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t record_count;
  uint32_t record_size;
  uint32_t reserved;
  char compiler[40];
};
static_assert(sizeof(Header) == 64, "the archive's header size");

bool ends_in_nul(const char* text, size_t size) { return memchr(text, 0, size) != nullptr; }

class File {
 public:
  explicit File(const char* path) : descriptor_(open(path, O_RDONLY | O_CLOEXEC)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

}  // namespace

bool parse_arch(const char* text, Arch* arch) {
  *arch = Arch{0, false, false};
  if (strncmp(text, "ptx", 3) == 0) {
    arch->ptx = true;
    text += 3;
  }
  int digits = 0;
  for (; *text >= '0' && *text <= '9' && digits < 4; ++text, ++digits) arch->number = 10 * arch->number + (*text - '0');
  if (*text == 'a') {
    arch->exact = true;
    ++text;
  }
  return *text == 0 && digits >= 2;
}

KernelSet::KernelSet(const char* path) {
  copy_text(path_, sizeof(path_), path);
  const File file(path);
  if (file.descriptor() < 0) {
    if (errno == ENOENT) {
      fail("there are no compiled kernels: %s does not exist. The package was built without them (SKIP_CUDA_BUILD) or "
           "is incomplete; install a wheel that holds kernels, or build with FORCE_BUILD=1.", path);
    }
    fail("the kernel set %s cannot be opened: %s.", path, strerror(errno));
  }
  const off_t end = lseek(file.descriptor(), 0, SEEK_END);
  if (end < 0) fail("the kernel set %s cannot be read: %s.", path, strerror(errno));
  const uint64_t file_size = static_cast<uint64_t>(end);
  if (file_size == 0) fail("the kernel set %s is cut short: it has 0 bytes. %s", path, kReinstall);
  void* const mapped = mmap(nullptr, file_size, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (mapped == MAP_FAILED) fail("the kernel set %s cannot be mapped: %s.", path, strerror(errno));

  // A refused archive is unmapped again: the caller may try once more with a repaired file.
  struct Unmap {
    void* address;
    uint64_t size;
    ~Unmap() {
      if (address != nullptr) munmap(address, size);
    }
  } unmap{mapped, file_size};

  check(mapped, file_size);
  unmap.address = nullptr;
}

KernelSet::KernelSet(const char* name, const void* archive, size_t size) {
  copy_text(path_, sizeof(path_), name);
  // Images lie on 64 bytes in the file, and so they do here.
  void* const copy = aligned_alloc(kImageAlignment, (size / kImageAlignment + 1) * kImageAlignment);
  if (copy == nullptr) fail("there is no memory for a kernel of %zu bytes.", size);
  struct Free {
    void* memory;
    ~Free() { free(memory); }
  } unless_checked{copy};
  check(memcpy(copy, archive, size), size);
  copy_ = copy;
  unless_checked.memory = nullptr;
}

void KernelSet::check(const void* archive, uint64_t size) {
  if (size < sizeof(Header)) {
    fail("the kernel set %s is cut short: it has %llu bytes, its header alone %zu. %s", path_,
         static_cast<unsigned long long>(size), sizeof(Header), kReinstall);
  }
  base_ = static_cast<const unsigned char*>(archive);
  Header header;
  memcpy(&header, base_, sizeof(header));
  if (memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    fail("%s is no kernel set: its first bytes are not FLASHKS. %s", path_, kReinstall);
  }
  if (header.version != kVersion || header.record_size != sizeof(Record)) {
    fail("the kernel set %s has format %u with records of %u bytes; this library reads format %u with records of %zu. "
         "The two come from different releases. %s",
         path_, header.version, header.record_size, kVersion, sizeof(Record), kReinstall);
  }
  if (header.record_count > (size - sizeof(Header)) / sizeof(Record)) {
    fail("the kernel set %s is cut short: %llu bytes cannot hold an index of %u records. %s", path_,
         static_cast<unsigned long long>(size), header.record_count, kReinstall);
  }
  memcpy(compiler_, header.compiler, sizeof(header.compiler));
  records_ = reinterpret_cast<const Record*>(base_ + sizeof(Header));
  count_ = header.record_count;
  for (uint32_t i = 0; i < count_; ++i) check_record(i, size);
}

void KernelSet::check_record(uint32_t index, uint64_t file_size) const {
  const Record& record = records_[index];
  const auto refuse = [&](const char* why) {
    fail("the kernel set %s is damaged: record %u %s. %s", path_, index, why, kReinstall);
  };
  Arch arch;
  if (!ends_in_nul(record.key, sizeof(record.key)) || record.key[0] == 0) refuse("has no valid key");
  if (!ends_in_nul(record.arch, sizeof(record.arch)) || !parse_arch(record.arch, &arch)) refuse("has no valid arch");
  if (index > 0) {
    const Record& before = records_[index - 1];
    const int order = strcmp(before.key, record.key);
    if (order > 0 || (order == 0 && strcmp(before.arch, record.arch) >= 0)) refuse("is out of order");
  }
  if (record.head_dim == 0 || record.block_m == 0 || record.block_n == 0) refuse("has a tile of size 0");
  if (record.head_dim > 4096 || record.block_m > 4096 || record.block_n > 4096) refuse("has an impossible tile size");
  if (record.threads == 0 || record.threads > 1024 || record.threads % 32 != 0) refuse("has an impossible block size");
  if (record.smem_bytes > (1u << 20)) refuse("asks for an impossible amount of shared memory");
  if (record.split > 1) refuse("is split in an impossible way");
  const uint64_t images = sizeof(Header) + static_cast<uint64_t>(count_) * sizeof(Record);
  if (record.size == 0 || record.offset % kImageAlignment != 0 || record.offset < images || record.offset > file_size ||
      record.size > file_size - record.offset) {
    refuse("points outside of the file");
  }
  // The driver reads PTX up to its NUL.
  if (arch.ptx && base_[record.offset + record.size - 1] != 0) refuse("has PTX without an end");
}

const KernelSet& kernel_set() {
  static std::mutex open_mutex;
  static std::atomic<const KernelSet*> opened{nullptr};
  const KernelSet* set = opened.load(std::memory_order_acquire);
  if (set != nullptr) return *set;
  std::lock_guard<std::mutex> lock(open_mutex);
  set = opened.load(std::memory_order_relaxed);
  if (set != nullptr) return *set;

  const char* const library = library_path();
  if (library == nullptr) fail("the folder of the library cannot be found (dladdr), hence not its kernel set.");
  char path[4096];
  copy_text(path, sizeof(path), library);
  char* const slash = strrchr(path, '/');
  char* const name = slash != nullptr ? slash + 1 : path;
  if (static_cast<size_t>(name - path) + sizeof(kFileName) > sizeof(path)) {
    fail("the path of the library is too long: %s.", library);
  }
  memcpy(name, kFileName, sizeof(kFileName));
  set = new KernelSet(path);
  opened.store(set, std::memory_order_release);
  return *set;
}

KernelGroup group_at(const KernelSet& set, uint32_t first) {
  uint32_t last = first + 1;
  while (last < set.size() && strcmp(set[last].key, set[first].key) == 0) ++last;
  return KernelGroup{first, last};
}

int usable_records(const KernelSet& set, KernelGroup group, int capability, const Record** usable, int room) {
  // PTX below all machine code; among each the higher number; an exact arch above the plain one.
  const auto rank = [](const Arch& arch) { return 2 * arch.number + (arch.exact ? 1 : 0) + (arch.ptx ? 0 : 100000); };
  const auto rank_of = [&](const Record* record) {
    Arch arch;
    parse_arch(record->arch, &arch);
    return rank(arch);
  };
  int count = 0;
  for (uint32_t i = group.first; i < group.last; ++i) {
    Arch arch;
    parse_arch(set[i].arch, &arch);
    const bool runs = arch.exact ? arch.number == capability
                      : arch.ptx ? arch.number <= capability
                                 : arch.number / 10 == capability / 10 && arch.number <= capability;
    if (!runs) continue;
    int at = count;
    while (at > 0 && rank_of(usable[at - 1]) < rank(arch)) --at;
    if (at == room) continue;
    if (count < room) ++count;
    for (int j = count - 1; j > at; --j) usable[j] = usable[j - 1];
    usable[at] = &set[i];
  }
  return count;
}

}  // namespace flash_attn
