// The kernels of KV caches, rotary embeddings and tensor maps on host memory; see fake_kernels.h.
#pragma once

#include "fake_fp8_kernels.h"
#include "fake_rounding_kernels.h"

namespace fake {

using flash_attn::BwdTmaParams;
using flash_attn::DecodeParams;
using flash_attn::RotaryParams;
using flash_attn::RotaryTask;

// ---- The kernels with tensor maps ----

// Of a tensor with the rows of queries or of keys, which are packed where `starts` is given.
template <typename Params>
void check_query_map(const unsigned char* bytes, const Params& p, const void* data, const Strides& stride, int columns,
                     int box_rows, Kind kind) {
  const int* const starts = p.sequences.cu_seqlens_q;
  check_map(bytes, data, stride, columns, p.heads, starts != nullptr ? 1 : p.batch,
            starts != nullptr ? starts[p.batch] : p.seqlen_q, box_rows, {kind.bf16 ? 9 : 6, 2, 64});
}

template <typename Params>
void check_key_map(const unsigned char* bytes, const Params& p, const void* data, const Strides& stride, int columns,
                   Tile tile, Kind kind) {
  const int* const starts = p.sequences.cu_seqlens_k;
  check_map(bytes, data, stride, columns, p.heads_kv, starts != nullptr ? 1 : p.batch,
            starts != nullptr ? starts[p.batch] : p.seqlen_k, tile.block_n, {kind.bf16 ? 9 : 6, 2, 64});
}

// All tiles at once: a block takes several of them.
inline void fwd_tma(const FwdTmaParams& p, Kind kind, Tile tile, unsigned grid) {
  const FwdParams& f = p.fwd;
  const int tiles = f.batch * f.heads * f.blocks_m;
  require(static_cast<int>(grid) <= tiles && p.heads_per_group >= 1, "more blocks than tiles");
  require(p.next_tile == nullptr || *p.next_tile == 0, "a counter that is not 0");
  check_query_map(p.q_map, f, f.q, f.q_stride, f.head_dim, 64, kind);
  check_key_map(p.k_map, f, f.k, f.k_stride, f.head_dim, tile, kind);
  check_key_map(p.v_map, f, f.v, f.v_stride, f.head_dim_v, tile, kind);
  require(f.modifiers.alibi_slopes == nullptr && f.modifiers.rng_state == nullptr, "sm90 has no ALiBi and no dropout");
  for (int index = 0; index < tiles; ++index) fwd(f, kind, tile, index);
}

inline void check_maps(const BwdTmaParams& p, Kind kind, Tile tile) {
  const BwdParams& b = p.bwd;
  check_query_map(p.q_map, b, b.q, b.q_stride, b.head_dim, tile.block_m, kind);
  check_query_map(p.dout_map, b, b.dout, b.dout_stride, b.head_dim_v, tile.block_m, kind);
  check_key_map(p.k_map, b, b.k, b.k_stride, b.head_dim, tile, kind);
  check_key_map(p.v_map, b, b.v, b.v_stride, b.head_dim_v, tile, kind);
  require(!kind.general, "the sm90 backward has full and causal masks alone");
}

// ---- Decoding ----

// Whether a number is divided as it should be.
inline bool divides(const flash_attn::Divisor& by, long long number, int divisor) {
  const auto quotient = static_cast<unsigned long long>(number) * by.multiplier >> by.shift;
  return static_cast<long long>(quotient) == number / divisor;
}

// The rows of one head of a sequence's cache. Those that no memory belongs to are zeros.
class CacheRows {
 public:
  CacheRows(const DecodeParams& p, const void* data, const Strides& stride, bool bf16, int batch, int head, long long first)
      : p_(p), data_(data), stride_(stride), bf16_(bf16), batch_(batch), head_(head), first_(first) {}

  float at(long long j, int d) const {
    long long row = first_ + j, slab = batch_;
    require(row < p_.seqlen_k, "a row past the capacity");
    if (p_.pages.block_table != nullptr) {
      require(divides(p_.pages.by_page_size, row, p_.pages.page_size), "the division of a row");
      slab = p_.pages.block_table[batch_ * p_.pages.table_batch_stride + row / p_.pages.page_size];
      if (slab < 0 || slab >= p_.pages.page_count) return 0;
      row %= p_.pages.page_size;
    } else {
      if (p_.cache_batch_idx != nullptr) slab = p_.cache_batch_idx[batch_];
      if (slab < 0 || slab >= p_.slabs) return 0;
    }
    return Rows(data_, stride_, bf16_, static_cast<int>(slab), row, head_).at(0, d);
  }

 private:
  const DecodeParams& p_;
  const void* data_;
  Strides stride_;
  bool bf16_;
  int batch_, head_;
  long long first_;
};

inline void decode(const DecodeParams& p, Kind kind, Tile tile, int warps, int index) {
  const int split = index % p.splits, row_tile = index / p.splits % p.row_tiles;
  const int head_kv = index / p.splits / p.row_tiles % p.heads_kv, batch = index / p.splits / p.row_tiles / p.heads_kv;
  const int block_rows = p.row_warps * 16;
  require(block_rows % tile.block_m == 0, "a team is of whole units");
  require(divides(p.by_splits, index, p.splits) && divides(p.by_row_tiles, index, p.row_tiles) &&
              divides(p.by_heads_kv, index, p.heads_kv) && divides(p.by_group, p.group * p.seqlen_q - 1, p.group),
          "divisors");
  require(batch < p.batch && p.row_tiles == (p.group * p.seqlen_q + block_rows - 1) / block_rows, "grid of decode");
  require(p.warps == warps && p.row_warps >= 1 && warps % p.row_warps == 0 && (p.row_warps & (p.row_warps - 1)) == 0, "a team of warps");
  require(p.splits == 1 || p.partial_lse == p.partial_out + p.splits * p.lse_count * p.head_dim_v, "partial results");
  require(p.lse_count % (p.heads * p.lse_head_stride) == 0, "rows of lse");
  const int first_row = row_tile * block_rows;
  const int rows = p.group * Head<DecodeParams>(p, kind, batch, head_kv * p.group).seqlen_q;
  for (int r = first_row; r < std::min(rows, first_row + block_rows); ++r) {
    const int token = r / p.group;
    const Head<DecodeParams> head(p, kind, batch, head_kv * p.group + r % p.group);
    const Rows q = head.queries(p.q, p.q_stride), out = head.queries(p.out, p.out_stride);
    const CacheRows k(p, p.k, p.k_stride, kind.bf16, batch, head_kv, head.k_row);
    const CacheRows v(p, p.v, p.v_stride, kind.bf16, batch, head_kv, head.k_row);
    const int part = (head.seqlen_k + p.splits - 1) / p.splits;
    const bool only = p.splits == 1;
    float max = only ? head.sink() : -kInfinity;
    std::vector<float> row(static_cast<size_t>(p.head_dim_v), 0.f), scores;
    for (int j = split * part; j < std::min(head.seqlen_k, (split + 1) * part); ++j) {
      scores.push_back(head.visible(token, j) ? head.score(q, k, token, j) : -kInfinity);
      max = std::max(max, scores.back());
    }
    float sum = only && max != -kInfinity ? std::exp(head.sink() - max) : 0;
    for (size_t j = 0; j < scores.size(); ++j) {
      if (scores[j] == -kInfinity) continue;
      const float weight = std::exp(scores[j] - max);
      sum += weight;
      for (int d = 0; d < p.head_dim_v; ++d) row[static_cast<size_t>(d)] += weight * v.at(split * part + static_cast<int>(j), d);
    }
    for (float& x : row) x = sum > 0 ? x / sum : 0;
    const float lse = sum > 0 ? max + std::log(sum) : -kInfinity;
    const long long flat = head.lse_index(token);
    if (only) {
      for (int d = 0; d < p.head_dim_v; ++d) out.set(token, d, row[static_cast<size_t>(d)]);
      p.lse[flat] = lse;
    } else {
      const long long at = split * p.lse_count + flat;
      std::copy(row.begin(), row.end(), p.partial_out + at * p.head_dim_v);
      p.partial_lse[at] = lse * kLog2e;
    }
  }
}

inline void combine_row(const DecodeParams& p, Kind kind, long long row) {
  DecodeParams dense = p;  // packed queries are one batch of all tokens
  dense.sequences.cu_seqlens_q = nullptr;
  const int token = static_cast<int>(row % p.lse_head_stride), head_index = static_cast<int>(row / p.lse_head_stride);
  const Head<DecodeParams> head(dense, kind, head_index / p.heads, head_index % p.heads);
  float max = head.sink() * kLog2e, sum = 0;
  for (int split = 0; split < p.splits; ++split) max = std::max(max, p.partial_lse[split * p.lse_count + row]);
  const float base = max == -kInfinity ? 0 : max;
  for (int split = 0; split < p.splits; ++split) sum += std::exp2(p.partial_lse[split * p.lse_count + row] - base);
  sum += std::exp2(head.sink() * kLog2e - base);
  const Rows out = head.queries(p.out, p.out_stride);
  for (int d = 0; d < p.head_dim_v; ++d) {
    float value = 0;
    for (int split = 0; split < p.splits; ++split) {
      const long long at = split * p.lse_count + row;
      value += std::exp2(p.partial_lse[at] - base) * p.partial_out[at * p.head_dim_v + d];
    }
    out.set(token, d, sum > 0 ? value / sum : 0);
  }
  p.lse[row] = sum > 0 ? (max + std::log2(sum)) / kLog2e : -kInfinity;
}

// A row a warp.
inline void combine(const DecodeParams& p, Kind kind, int warps, long long index) {
  require(index * warps < p.lse_count, "grid of combine");
  for (long long row = index * warps; row < std::min(p.lse_count, (index + 1) * warps); ++row) combine_row(p, kind, row);
}

// ---- Rotary embedding and appending ----

inline float table_value(const RotaryParams& p, const void* table, bool bf16, long long index) {
  return p.table_fp32 ? static_cast<const float*>(table)[index] : from_half(static_cast<const uint16_t*>(table)[index], bf16);
}

inline void rotary_row(const RotaryParams& p, const RotaryTask& task, bool bf16, int batch, int row, int head) {
  long long source_row = row;
  if (p.cu_seqlens != nullptr) {
    if (row >= p.cu_seqlens[batch + 1] - p.cu_seqlens[batch]) return;
    source_row += p.cu_seqlens[batch];
  }
  const int offset = p.offsets != nullptr ? p.offsets[batch] : p.offset;
  int slab = batch;
  long long at = source_row;
  if (task.to_cache) {
    at = offset + row;
    if (at < 0 || at >= p.capacity) return;
    if (p.pages.block_table != nullptr) {
      slab = p.pages.block_table[batch * p.pages.table_batch_stride + at / p.pages.page_size];
      if (slab < 0 || slab >= p.pages.page_count) return;
      at %= p.pages.page_size;
    } else if (p.cache_batch_idx != nullptr) {
      slab = p.cache_batch_idx[batch];
    }
    if (p.pages.block_table == nullptr && (slab < 0 || slab >= p.slabs)) return;
  }
  const Rows source(task.source, task.source_stride, bf16, batch, source_row, head);
  const Rows destination(task.destination, task.destination_stride, bf16, slab, at, head);
  std::vector<float> x;
  for (int d = 0; d < task.head_dim; ++d) x.push_back(source.at(0, d));
  const int position = offset + (task.same_position ? 0 : row) - (p.leftpad != nullptr ? std::max(0, p.leftpad[batch]) : 0);
  const int half = task.rotate && position >= 0 && position < p.positions ? p.rotary_dim / 2 : 0;
  for (int i = 0; i < half; ++i) {
    const float c = table_value(p, p.cos, bf16, static_cast<long long>(position) * half + i);
    const float s = table_value(p, p.sin, bf16, static_cast<long long>(position) * half + i) * (p.conjugate ? -1.f : 1.f);
    float& a = x[static_cast<size_t>(p.interleaved ? 2 * i : i)];
    float& b = x[static_cast<size_t>(p.interleaved ? 2 * i + 1 : i + half)];
    const float first = a * c - b * s;
    b = a * s + b * c;
    a = first;
  }
  for (int d = 0; d < task.head_dim; ++d) destination.set(0, d, x[static_cast<size_t>(d)]);
}

// A thread has eight columns; here the one with a row's first does all of it.
inline void rotary(const RotaryParams& p, bool bf16, unsigned grid, unsigned threads, unsigned tasks) {
  require(static_cast<int>(tasks) == p.tasks && tasks <= 3, "tasks of rotary");
  for (unsigned t = 0; t < tasks; ++t) {
    const RotaryTask& task = p.task[t];
    const long long chunks = task.head_dim / 8;
    const long long rows = static_cast<long long>(p.batch) * task.seqlen * task.heads;
    require(static_cast<long long>(grid) * threads >= rows * chunks, "a grid of rotary that is too small");
    for (long long row = 0; chunks > 0 && row < rows; ++row) {
      rotary_row(p, task, bf16, static_cast<int>(row / task.heads / task.seqlen),
                 static_cast<int>(row / task.heads % task.seqlen), static_cast<int>(row % task.heads));
    }
  }
}

// ---- Any kernel ----

struct Launch {
  unsigned grid, grid_y, threads;
};

template <typename Params>
Params params_of(const void* bytes) {
  Params params;
  memcpy(&params, bytes, sizeof(params));
  return params;
}

// A launch of `entry` of the kernel `key`.
inline void compute(const std::string& key, const std::string& entry, Tile tile, Launch launch, const void* bytes) {
  const auto has = [&key](const char* part) { return key.find(part) != std::string::npos; };
  const Kind kind{has("-bf16-"), has("-causal"), has("-general"), atoi(key.c_str() + key.find("-d") + 2)};
  const int grid = static_cast<int>(launch.grid);
  if (has("round-sm90-e4m3-")) {
    const Rounding rounding(params_of<Fp8RoundingParams>(bytes), kind, launch.grid, launch.threads);
    if (entry == "flash_round_sums") return rounding.sums();
    if (entry == "flash_round_largest") return rounding.largest();
    rounding.round();
  } else if (has("-e4m3-")) {
    const FwdFp8Params params = params_of<FwdFp8Params>(bytes);
    if (entry == "flash_fwd") return fwd_fp8(params, kind, tile, launch.grid);
    for (int index = 0; index < grid; ++index) transpose_v(params, kind, tile, index);
  } else if (has("fwd-sm90")) {
    fwd_tma(params_of<FwdTmaParams>(bytes), kind, tile, launch.grid);
  } else if (entry == "flash_fwd") {
    const FwdParams params = params_of<FwdParams>(bytes);
    for (int index = 0; index < grid; ++index) fwd(params, kind, tile, index);
  } else if (entry == "flash_rotary") {
    rotary(params_of<RotaryParams>(bytes), kind.bf16, launch.grid, launch.threads, launch.grid_y);
  } else if (entry == "flash_decode" || entry == "flash_combine") {
    const DecodeParams params = params_of<DecodeParams>(bytes);
    for (int index = 0; index < grid; ++index) {
      if (entry == "flash_decode") decode(params, kind, tile, static_cast<int>(launch.threads / 32), index);
      if (entry == "flash_combine") combine(params, kind, static_cast<int>(launch.threads / 32), index);
    }
  } else {
    const BwdParams params = params_of<BwdParams>(bytes);  // with maps too, these come first
    int blocks = grid;
    if (has("bwd-sm90") && entry == "flash_bwd") {
      check_maps(params_of<BwdTmaParams>(bytes), kind, tile);
      if (flash_attn::bwd_is_persistent(kind.head_dim)) {
        blocks = params.batch * params.heads_kv * params.blocks_n;
        require(grid == blocks || (grid < blocks && *params.next_block == 0), "a counter that is not 0");
      }
    }
    for (int index = 0; index < blocks; ++index) {
      if (entry == "flash_bwd_preprocess") bwd_preprocess(params, kind, tile, index);
      if (entry == "flash_bwd") bwd(params, kind, tile, index);
      if (entry == "flash_bwd_postprocess") bwd_postprocess(params, kind, tile, index);
    }
  }
}

}  // namespace fake
