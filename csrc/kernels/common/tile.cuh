// Tiles of 16-bit elements in shared memory: layout, loading and storing.
//
// A tile of R rows is cut into panels of 64 columns; in a panel a row is 128 bytes, eight chunks of 16, and chunk c of
// row r lies at place c ^ (r % 8). Eight rows of one chunk column then cover all 32 banks, so that ldmatrix (with and
// without .trans), cp.async and the 4-byte fragment stores are all free of bank conflicts.
#pragma once

#include "common/ptx.cuh"
#include "params.h"

namespace tile {

constexpr int kPanelColumns = 64;
constexpr int kRowBytes = kPanelColumns * 2;

// Compile-time flags as arguments of generic lambdas.
struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};

// Byte offset of 16-byte chunk `chunk` (0 to 7) of row `row` in its panel.
__device__ __forceinline__ unsigned swizzled(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// Copies a tile of kRows x kColumns between device and shared memory. Eight threads serve the 128 bytes of one panel row,
// and a thread's rows are a multiple of 8 apart: its place in the swizzle never changes, and all offsets are immediates.
// The last panel may be half used; it is loaded whole, with zeros.
template <int kRows, int kColumns, int kThreads>
struct Copy {
  static constexpr int kPanels = (kColumns + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kRowStep = kThreads / 8;
  static constexpr int kPasses = kRows / kRowStep;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(kRows % kRowStep == 0 && kRowStep % 8 == 0);

  int row;          // first row of this thread
  int column;       // its first column in a panel
  unsigned offset;  // its place in the tile

  __device__ __forceinline__ explicit Copy(int thread) {
    row = thread / 8;
    column = thread % 8 * 8;
    offset = swizzled(row, thread % 8);
  }

  // Starts the copy of rows [0, kRows) and columns [0, columns) from `source` (this thread's first row and chunk); the
  // rest is zeros. With kTail, so are rows from `valid` on, which are not read.
  template <bool kTail>
  __device__ __forceinline__ void load(unsigned tile, const char* source, long long row_bytes, int columns,
                                       int valid) const {
    const long long step = row_bytes * kRowStep;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool inside = !kTail || row + pass * kRowStep < valid;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        // A chunk past the tensor is never read; its address may be anything.
        ptx::cp_async_16(tile + offset + panel * kPanelBytes + pass * kRowStep * kRowBytes, source + panel * kRowBytes,
                         inside && column + panel * kPanelColumns < columns ? 16 : 0);
      }
      source += step;
    }
  }

  // Writes the tile's rows below `valid` and columns below `columns` to `destination` (this thread's first row and chunk).
  __device__ __forceinline__ void store(unsigned tile, char* destination, long long row_bytes, int columns,
                                        int valid) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        if (row + pass * kRowStep < valid && column + panel * kPanelColumns < columns) {
          *reinterpret_cast<uint4*>(destination + panel * kRowBytes) =
              ptx::load_shared_16(tile + offset + panel * kPanelBytes + pass * kRowStep * kRowBytes);
        }
      }
      destination += row_bytes * kRowStep;
    }
  }
};

// sum += a b of a chunk: 8 columns of 16 bits.
template <bool kBf16>
__device__ __forceinline__ void add_product(float& sum, const uint4 a, const uint4 b) {
  const unsigned as[4] = {a.x, a.y, a.z, a.w};
  const unsigned bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float a_low, a_high, b_low, b_high;
    ptx::unpack<kBf16>(as[i], a_low, a_high);
    ptx::unpack<kBf16>(bs[i], b_low, b_high);
    sum = fmaf(a_low, b_low, fmaf(a_high, b_high, sum));
  }
}

// Address of a thread's first chunk: row `row` of (batch, head), chunk thread % 8.
__device__ __forceinline__ const char* source(const void* tensor, const flash_attn::Strides& stride, int batch,
                                              int head, long long row, int thread) {
  return static_cast<const char*>(tensor) +
         2 * (batch * stride.batch + head * stride.head + row * stride.row + thread % 8 * 8);
}

__device__ __forceinline__ char* destination(void* tensor, const flash_attn::Strides& stride, int batch, int head,
                                             long long row, int thread) {
  return const_cast<char*>(source(tensor, stride, batch, head, row, thread));
}

// Addresses for ldmatrix.x4 into a tile, which starts on 1,024 bytes. Lane rows are a multiple of 8 from the tile's start,
// so that the swizzle of chunk pair `step` (16 columns) is an XOR with a constant, rows and panels are immediates.
//   kRowsFirst: matrices 0, 1 are rows 0-7 and 8-15 of chunk 0; 2, 3 the same of chunk 1 (the A operand; B by .trans)
//   otherwise:  matrices 0, 1 are chunks 0 and 1 of rows 0-7; 2, 3 of rows 8-15 (the B operand without .trans)
template <bool kRowsFirst>
struct Fragment {
  unsigned address;

  __device__ __forceinline__ Fragment(unsigned tile, int lane) {
    const int row = kRowsFirst ? lane & 15 : (lane & 7) + (lane >> 4 << 3);
    const int chunk = kRowsFirst ? lane >> 4 : lane >> 3 & 1;
    address = tile + swizzled(row, chunk);
  }

  // Address of the 16 x 16 block at row `row` (a multiple of 8) and column 16 * step of a tile of kRows rows.
  template <int kRows>
  __device__ __forceinline__ unsigned at(int row, int step) const {
    return (address ^ (step & 3) << 5) + row * kRowBytes + (step >> 2) * kRows * kRowBytes;
  }
};

}  // namespace tile
