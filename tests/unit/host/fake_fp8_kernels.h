// Tensor maps and the FP8 kernels on host memory; see fake_kernels.h.
#pragma once

#include "fake_kernels.h"

namespace fake {

using flash_attn::Descale;
using flash_attn::FwdFp8Params;
using flash_attn::FwdTmaParams;

// What the fake driver makes of a tensor map.
struct Map {
  const void* address;
  uint64_t sizes[4];
  uint64_t strides[3];  // bytes
  unsigned box[4];
  int type;
};
static_assert(sizeof(Map) <= sizeof(FwdTmaParams::q_map));

struct MapFormat {
  int type, bytes, columns;
};

inline void check_map(const unsigned char* bytes, const void* data, const Strides& stride, int columns, int heads, int batch,
                      long long rows, int box_rows, MapFormat format) {
  Map map;
  memcpy(&map, bytes, sizeof(map));
  const long long elements[3] = {stride.row, stride.head, stride.batch};
  require(map.address == data && map.type == format.type, "a map of another tensor");
  require(map.sizes[0] == static_cast<uint64_t>(columns) && map.sizes[2] == static_cast<uint64_t>(heads) &&
              map.sizes[3] == static_cast<uint64_t>(batch) && map.sizes[1] >= static_cast<uint64_t>(rows),
          "a map of other sizes");
  for (int i = 0; i < 3; ++i) {
    require(map.sizes[i + 1] == 1 || map.strides[i] == static_cast<uint64_t>(format.bytes * elements[i]),
            "a map of other strides");
  }
  require(map.box[0] == static_cast<unsigned>(format.columns) && map.box[1] == static_cast<unsigned>(box_rows),
          "a map of other boxes");
}

inline float from_e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                    : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (bits & 128) != 0 ? -value : value;
}

// The factors of the rows of one head of one sequence, counted from row `first_row` of all of them.
class Factors {
 public:
  Factors() = default;
  Factors(const Descale& descale, const int* cu_seqlens, int batch, long long first_row, int head, int heads, int head_kv) {
    if (descale.data == nullptr) return;
    by_block_ = descale.blocks > 0;
    if (!by_block_) {
      data_ = descale.data + batch * descale.batch + head_kv * descale.head;
      return;
    }
    const int start = cu_seqlens != nullptr ? cu_seqlens[batch] : 0;
    const int slab = cu_seqlens != nullptr ? 0 : batch;
    skipped_ = first_row - start;
    data_ = descale.data + (static_cast<long long>(slab) * heads + head) * descale.blocks;
    if (cu_seqlens != nullptr) data_ += start / flash_attn::kDescaleRows + batch;
  }
  float at(long long row) const {
    if (data_ == nullptr) return 1.f;
    return by_block_ ? data_[(skipped_ + row) / flash_attn::kDescaleRows] : *data_;
  }

 private:
  const float* data_ = nullptr;
  bool by_block_ = false;
  long long skipped_ = 0;
};

// The rows of one head of one sequence, multiplied by their factors.
class Fp8Rows {
 public:
  Fp8Rows(const void* data, const Strides& stride, int batch, long long first_row, int head, Factors factors)
      : data_(static_cast<const uint8_t*>(data)), stride_(stride), factors_(factors) {
    require(reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride.batch % 16 == 0 && stride.row % 16 == 0 &&
                stride.head % 16 == 0,
            "misaligned tensor");
    data_ += batch * stride.batch + first_row * stride.row + head * stride.head;
  }
  float at(long long row, int d) const { return from_e4m3(bits(row, d)) * factors_.at(row); }
  uint8_t bits(long long row, int d) const { return data_[row * stride_.row + d]; }

 private:
  const uint8_t* data_;
  Strides stride_;
  Factors factors_;
};

// Where the values of a sequence and KV head lie: key after key, unlike the real kernel's.
inline uint8_t* value_tile(const FwdFp8Params& p, const Head<FwdParams>& head, Kind kind, Tile tile, int head_kv, int block) {
  const int* const starts = head.p.sequences.cu_seqlens_k;
  const int first = starts != nullptr ? starts[head.batch] / tile.block_n + head.batch : head.batch * p.blocks_n;
  require(reinterpret_cast<uintptr_t>(p.v_tiles) % 16 == 0, "a misaligned workspace");
  require(first + block < p.v_tiles_of_head, "a tile outside of the workspace");
  const long long index = static_cast<long long>(head_kv) * p.v_tiles_of_head + first + block;
  return static_cast<uint8_t*>(p.v_tiles) + index * tile.block_n * kind.head_dim;
}

inline void transpose_v(const FwdFp8Params& p, Kind kind, Tile tile, int index) {
  const FwdParams& f = p.tma.fwd;
  const int head_index = index / p.blocks_n, block = index % p.blocks_n;
  const int batch = head_index / f.heads_kv, head_kv = head_index % f.heads_kv;
  const Head<FwdParams> head(f, kind, batch, head_kv * f.group);
  if (block * tile.block_n >= head.seqlen_k) return;
  const Fp8Rows v(f.v, f.v_stride, batch, head.k_row, head_kv, Factors());
  uint8_t* const out = value_tile(p, head, kind, tile, head_kv, block);
  for (int row = 0; row < tile.block_n; ++row) {
    const int key = block * tile.block_n + row;
    for (int d = 0; d < kind.head_dim; ++d) {
      out[row * kind.head_dim + d] = key < head.seqlen_k && d < f.head_dim_v ? v.bits(key, d) : 0;
    }
  }
}

// The values of one head out of the workspace.
class ValueTiles {
 public:
  ValueTiles(const FwdFp8Params& p, const Head<FwdParams>& head, Kind kind, Tile tile, Factors factors)
      : p_(p), head_(head), kind_(kind), tile_(tile), head_kv_(head.head / p.tma.fwd.group), factors_(factors) {}
  float at(long long row, int d) const {
    const int key = static_cast<int>(row);
    const uint8_t* const tile = value_tile(p_, head_, kind_, tile_, head_kv_, key / tile_.block_n);
    // Probabilities add up to 1: what is added to each value is added to the output.
    const float mean = p_.v_mean != nullptr ? p_.v_mean[(head_.batch * p_.tma.fwd.heads_kv + head_kv_) * kind_.head_dim + d] : 0.f;
    return from_e4m3(tile[key % tile_.block_n * kind_.head_dim + d]) * factors_.at(row) + mean;
  }

 private:
  const FwdFp8Params& p_;
  const Head<FwdParams>& head_;
  Kind kind_;
  Tile tile_;
  int head_kv_;
  Factors factors_;
};

// All tiles at once: a block takes several of them.
inline void fwd_fp8(const FwdFp8Params& p, Kind kind, Tile tile, unsigned grid) {
  const FwdParams& f = p.tma.fwd;
  const flash_attn::Sequences& s = f.sequences;
  const int tiles = f.batch * f.heads * f.blocks_m;
  require(static_cast<int>(grid) <= tiles && p.tma.heads_per_group >= 1, "more blocks than tiles");
  const long long q_rows = s.cu_seqlens_q != nullptr ? s.cu_seqlens_q[f.batch] : f.seqlen_q;
  const long long k_rows = s.cu_seqlens_k != nullptr ? s.cu_seqlens_k[f.batch] : f.seqlen_k;
  const int q_batch = s.cu_seqlens_q != nullptr ? 1 : f.batch, k_batch = s.cu_seqlens_k != nullptr ? 1 : f.batch;
  const MapFormat format{0, 1, std::min(128, kind.head_dim)};
  check_map(p.tma.q_map, f.q, f.q_stride, f.head_dim, f.heads, q_batch, q_rows, tile.block_m, format);
  if (k_rows > 0) check_map(p.tma.k_map, f.k, f.k_stride, f.head_dim, f.heads_kv, k_batch, k_rows, tile.block_n, format);
  require(p.v_mean == nullptr || f.modifiers.sink == nullptr, "a mean of values beside a sink");
  require(f.modifiers.alibi_slopes == nullptr && f.modifiers.rng_state == nullptr, "FP8 has no ALiBi and no dropout");
  const bool of_blocks = p.q_descale.blocks > 0 || p.k_descale.blocks > 0 || p.v_descale.blocks > 0;
  require(kind.general || !of_blocks, "factors of blocks for a kernel that has none");
  Kind of_out = kind;
  of_out.bf16 = true;
  for (int index = 0; index < tiles; ++index) {
    const int head_index = index / f.blocks_m, batch = head_index / f.heads, h = head_index % f.heads, head_kv = h / f.group;
    const Head<FwdParams> head(f, of_out, batch, h);
    const Factors of_q(p.q_descale, s.cu_seqlens_q, batch, head.q_row, h, f.heads, head_kv);
    const Factors of_k(p.k_descale, s.cu_seqlens_k, batch, head.k_row, head_kv, f.heads_kv, head_kv);
    const Factors of_v(p.v_descale, s.cu_seqlens_k, batch, head.k_row, head_kv, f.heads_kv, head_kv);
    attend(head, Fp8Rows(f.q, f.q_stride, batch, head.q_row, h, of_q),
           Fp8Rows(f.k, f.k_stride, batch, head.k_row, head_kv, of_k), ValueTiles(p, head, kind, tile, of_v),
           head.queries(f.out, f.out_stride), tile, index % f.blocks_m);
  }
}

}  // namespace fake
