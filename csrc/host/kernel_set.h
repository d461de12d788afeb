// The kernel set: one archive file beside the library with every compiled kernel and an index of them. The host library
// holds no list of its own, so it can only name what was built.
//
// Little endian: a 64-byte header, records of 128 bytes sorted by (key, arch), then the images, each on 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace flash_attn {

// One kernel for one arch, as it lies in the file.
struct Record {
  char key[64];  // "fwd-sm80-bf16-d128-causal": op, family, dtype, head dim, mask kind
  char arch[8];  // "90", "90a": machine code of that compute capability; "ptx80": PTX for it and anything newer
  uint32_t head_dim;
  uint32_t block_m;  // query rows of a tile
  uint32_t block_n;  // keys of a tile
  uint32_t threads;  // of a block
  uint32_t smem_bytes;  // dynamic shared memory of flash_fwd and flash_bwd
  uint32_t registers;
  uint64_t offset;  // of the image, from the start of the file
  uint64_t size;
  uint32_t split;  // of flash_bwd: 1 where two thread blocks serve each key block
  uint8_t reserved[12];
};
static_assert(sizeof(Record) == 128, "the archive's record size");

// A record's arch in numbers.
struct Arch {
  int number;  // 10 * major + minor
  bool ptx;
  bool exact;  // "90a": runs on that capability only
};

// Reads "90", "90a", "ptx80"; false for anything else.
bool parse_arch(const char* text, Arch* arch);

class KernelSet {
 public:
  // Maps and checks an archive for the rest of the process's life. Throws where the file is missing, is no archive, or
  // anything in it points outside of it: afterwards every record can be trusted.
  explicit KernelSet(const char* path);

  // Copies and checks the bytes of an archive; `name` stands for a path in messages.
  KernelSet(const char* name, const void* archive, size_t size);
  ~KernelSet() { free(copy_); }
  KernelSet(const KernelSet&) = delete;
  KernelSet& operator=(const KernelSet&) = delete;

  uint32_t size() const { return count_; }
  const Record& operator[](uint32_t index) const { return records_[index]; }
  const void* image(const Record& record) const { return base_ + record.offset; }
  const char* compiler() const { return compiler_; }
  const char* path() const { return path_; }

 private:
  void check(const void* archive, uint64_t size);
  void check_record(uint32_t index, uint64_t file_size) const;

  void* copy_ = nullptr;  // of the bytes, where there is no file
  const unsigned char* base_ = nullptr;
  const Record* records_ = nullptr;
  uint32_t count_ = 0;
  char compiler_[41] = {0};
  char path_[4096] = {0};
};

// The archive flash_attn.kernels in the folder of this library, opened by the first call that succeeds; a failure is
// tried again by the next call. Safe from several threads.
const KernelSet& kernel_set();

// A range [first, last) of records with one key, one for each arch.
struct KernelGroup {
  uint32_t first;
  uint32_t last;
};

// The group that starts at `first`.
KernelGroup group_at(const KernelSet& set, uint32_t first);

// The records of a group that a GPU of this compute capability can run, best first: machine code for exactly it
// ("90a" before "90"), machine code for the highest older minor of the same major, then the newest PTX not above it.
// Returns how many were written to `usable`, at most `room`.
int usable_records(const KernelSet& set, KernelGroup group, int capability, const Record** usable, int room);

}  // namespace flash_attn
