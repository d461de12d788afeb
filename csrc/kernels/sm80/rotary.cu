// Rotary position embedding and appending to a KV cache: rows are copied to their place, rotated by their position or not.
//
// One launch does up to three tensors (q, the new k, the new v). x' = x cos - y sin, y' = x sin + y cos for the pairs (x, y)
// of the first rotary_dim columns (RoFormer, Su et al. 2021): neighbours if interleaved, else halves. A thread moves eight
// columns, or, of a rotated half, eight and their eight partners.
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"

namespace {

constexpr bool kBf16 = FA_BF16;
constexpr int kThreads = FA_WARPS * 32;

struct Chunk {
  float x[8];
};

__device__ __forceinline__ void unpack(Chunk& chunk, const uint4& v) {
  ptx::unpack<kBf16>(v.x, chunk.x[0], chunk.x[1]);
  ptx::unpack<kBf16>(v.y, chunk.x[2], chunk.x[3]);
  ptx::unpack<kBf16>(v.z, chunk.x[4], chunk.x[5]);
  ptx::unpack<kBf16>(v.w, chunk.x[6], chunk.x[7]);
}

__device__ __forceinline__ uint4 pack(const Chunk& chunk) {
  return make_uint4(ptx::pack<kBf16>(chunk.x[0], chunk.x[1]), ptx::pack<kBf16>(chunk.x[2], chunk.x[3]),
                    ptx::pack<kBf16>(chunk.x[4], chunk.x[5]), ptx::pack<kBf16>(chunk.x[6], chunk.x[7]));
}

// Element `index` of cos or sin.
__device__ __forceinline__ float table_value(const flash_attn::RotaryParams& p, const void* table, long long index) {
  if (p.table_fp32) return static_cast<const float*>(table)[index];
  const unsigned pair = static_cast<const unsigned short*>(table)[index];
  float low, high;
  ptx::unpack<kBf16>(pair, low, high);
  return low;
}

}  // namespace

// Grid: x over (batch, row, head, chunk of eight columns), kThreads a block; y over the tasks.
extern "C" __global__ void __launch_bounds__(kThreads)
    flash_rotary(const __grid_constant__ flash_attn::RotaryParams p) {
  ptx::launch_dependents();
  const flash_attn::RotaryTask& task = p.task[blockIdx.y];
  const int chunks = task.head_dim / 8;
  long long index = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= static_cast<long long>(p.batch) * task.seqlen * task.heads * chunks) return;
  const int chunk = index % chunks;
  index /= chunks;
  const int head = index % task.heads;
  index /= task.heads;
  const int row = index % task.seqlen;
  const int batch = static_cast<int>(index / task.seqlen);

  long long source_row = row;
  if (p.cu_seqlens != nullptr) {
    const int begin = p.cu_seqlens[batch];
    if (row >= p.cu_seqlens[batch + 1] - begin) return;
    source_row += begin;
  }
  const int offset = p.offsets != nullptr ? p.offsets[batch] : p.offset;

  // Where the row goes.
  int slab = batch;
  long long destination_row = source_row;
  if (task.to_cache) {
    const int at = offset + row;
    if (at < 0 || at >= p.capacity) return;
    destination_row = at;
    if (p.pages.block_table != nullptr) {
      const int page = p.pages.block_table[batch * p.pages.table_batch_stride + at / p.pages.page_size];
      if (page < 0 || page >= p.pages.page_count) return;
      slab = page;
      destination_row = at % p.pages.page_size;
    } else if (p.cache_batch_idx != nullptr) {
      slab = p.cache_batch_idx[batch];
      if (slab < 0 || slab >= p.slabs) return;
    }
  }
  const uint4* const source = reinterpret_cast<const uint4*>(
      static_cast<const char*>(task.source) +
      2 * (batch * task.source_stride.batch + source_row * task.source_stride.row + head * task.source_stride.head));
  uint4* const destination = reinterpret_cast<uint4*>(
      static_cast<char*>(task.destination) +
      2 * (slab * task.destination_stride.batch + destination_row * task.destination_stride.row +
           head * task.destination_stride.head));

  const int rotary_dim = task.rotate ? p.rotary_dim : 0;
  const int position = offset + (task.same_position ? 0 : row) - (p.leftpad != nullptr ? max(0, p.leftpad[batch]) : 0);
  const int first = chunk * 8;
  const bool known = position >= 0 && position < p.positions;
  if (first >= rotary_dim || !known) {
    // Rows of positions that cos and sin do not have are copied as they are.
    // In place, the copy of what is not rotated is the row itself. A rotated half's partner chunk is written by its owner.
    destination[chunk] = source[chunk];
    return;
  }
  const float sign = p.conjugate ? -1.0f : 1.0f;
  const int half = rotary_dim / 2;
  const long long table_row = static_cast<long long>(position) * half;
  if (p.interleaved) {
    Chunk v;
    unpack(v, source[chunk]);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      if (first + i >= rotary_dim) break;
      const float c = table_value(p, p.cos, table_row + (first + i) / 2);
      const float s = table_value(p, p.sin, table_row + (first + i) / 2) * sign;
      const float x = v.x[i];
      const float y = v.x[i + 1];
      v.x[i] = x * c - y * s;
      v.x[i + 1] = x * s + y * c;
    }
    destination[chunk] = pack(v);
    return;
  }
  if (half % 8 == 0) {
    if (first >= half) return;  // written with its partner
    const int partner = chunk + half / 8;
    Chunk x, y;
    unpack(x, source[chunk]);
    unpack(y, source[partner]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float c = table_value(p, p.cos, table_row + first + i);
      const float s = table_value(p, p.sin, table_row + first + i) * sign;
      const float a = x.x[i];
      const float b = y.x[i];
      x.x[i] = a * c - b * s;
      y.x[i] = a * s + b * c;
    }
    destination[chunk] = pack(x);
    destination[partner] = pack(y);
    return;
  }
  // Halves that do not start on 16 bytes: the first chunk's thread does the whole row, so that it may be in place.
  if (chunk != 0) return;
  const unsigned short* const in = reinterpret_cast<const unsigned short*>(source);
  unsigned short* const result = reinterpret_cast<unsigned short*>(destination);
  for (int i = 0; i < half; ++i) {
    const float c = table_value(p, p.cos, table_row + i);
    const float s = table_value(p, p.sin, table_row + i) * sign;
    float x, y, unused;
    ptx::unpack<kBf16>(in[i], x, unused);
    ptx::unpack<kBf16>(in[i + half], y, unused);
    const unsigned pair = ptx::pack<kBf16>(x * c - y * s, x * s + y * c);
    result[i] = static_cast<unsigned short>(pair);
    result[i + half] = static_cast<unsigned short>(pair >> 16);
  }
  for (int i = rotary_dim; i < (rotary_dim + 7) / 8 * 8; ++i) result[i] = in[i];
}
