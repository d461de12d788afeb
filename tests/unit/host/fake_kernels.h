// The kernels' mathematics on host memory, block by block as a launch's grid has them, in plain loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "params.h"

#define __device__
#define __forceinline__ inline
#include "kernels/common/dropout.cuh"
#undef __device__
#undef __forceinline__

namespace fake {

using flash_attn::BwdParams;
using flash_attn::FwdParams;
using flash_attn::ScoreModifiers;
using flash_attn::Strides;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504f;

struct Tile {
  int block_m, block_n, split;
};

inline void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "fake_cuda: %s\n", what);
  abort();
}

inline float from_half(uint16_t bits, bool bf16) {
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

inline uint16_t to_half(float value, bool bf16) {
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

// The rows of one head of one sequence.
class Rows {
 public:
  Rows(const void* data, const Strides& stride, bool bf16, int batch, long long first_row, int head)
      : data_(static_cast<uint16_t*>(const_cast<void*>(data))), stride_(stride), bf16_(bf16) {
    // The real kernels move rows in pieces of 16 bytes.
    require(reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride.batch % 8 == 0 && stride.row % 8 == 0 &&
                stride.head % 8 == 0,
            "misaligned tensor");
    data_ += batch * stride.batch + first_row * stride.row + head * stride.head;
  }
  float at(long long row, int d) const { return from_half(data_[row * stride_.row + d], bf16_); }
  void set(long long row, int d, float value) const { data_[row * stride_.row + d] = to_half(value, bf16_); }

 private:
  uint16_t* data_;
  Strides stride_;
  bool bf16_;
};

template <typename SomeRows, typename OtherRows>
float dot(const SomeRows& a, long long row_a, const OtherRows& b, long long row_b, int columns) {
  float sum = 0;
  for (int d = 0; d < columns; ++d) sum += a.at(row_a, d) * b.at(row_b, d);
  return sum;
}

struct Kind {
  bool bf16, causal, general;
  int head_dim;  // built
};

// One head of one sequence.
template <typename Params>
struct Head {
  const Params& p;
  Kind kind;
  int batch, head;
  long long q_row = 0, k_row = 0;
  int seqlen_q, seqlen_k;

  Head(const Params& params, Kind which, int b, int h)
      : p(params), kind(which), batch(b), head(h), seqlen_q(params.seqlen_q), seqlen_k(params.seqlen_k) {
    const flash_attn::Sequences& s = p.sequences;
    if (s.cu_seqlens_q != nullptr) {
      q_row = s.cu_seqlens_q[b];
      seqlen_q = s.cu_seqlens_q[b + 1] - s.cu_seqlens_q[b];
    }
    if (s.cu_seqlens_k != nullptr) {
      k_row = s.cu_seqlens_k[b];
      seqlen_k = s.cu_seqlens_k[b + 1] - s.cu_seqlens_k[b];
    }
    if (s.seqused_q != nullptr) seqlen_q = std::min(seqlen_q, s.seqused_q[b]);
    if (s.seqused_k != nullptr) seqlen_k = std::min(seqlen_k, s.seqused_k[b] + s.new_keys);
    if (s.leftpad_k != nullptr) {
      const int padding = std::max(0, s.leftpad_k[b]);
      k_row += padding;
      seqlen_k = std::max(0, seqlen_k - padding);
    }
    require(p.head_dim <= kind.head_dim && p.head_dim_v <= kind.head_dim, "head dim above the kernel's");
    require(p.group * p.heads_kv == p.heads, "group");
  }

  Rows queries(const void* data, const Strides& stride) const { return {data, stride, kind.bf16, batch, q_row, head}; }
  Rows keys(const void* data, const Strides& stride) const {
    return {data, stride, kind.bf16, batch, k_row, head / p.group};
  }
  long long lse_index(int i) const { return batch * p.lse_batch_stride + head * p.lse_head_stride + q_row + i; }

  bool visible(int i, int j) const {
    const long long position = i + seqlen_k - seqlen_q;
    if (kind.causal) return j <= position;
    if (!kind.general) return true;
    const ScoreModifiers& m = p.modifiers;
    if (j < position - m.window_left || j > position + m.window_right) return false;
    return m.chunk == 0 || std::floor(static_cast<double>(position) / m.chunk) == j / m.chunk;
  }
  // The score, and the derivative of softcap.
  template <typename QueryRows, typename KeyRows>
  float score(const QueryRows& q, const KeyRows& k, int i, int j, float* gate = nullptr) const {
    float s = dot(q, i, k, j, p.head_dim) * p.scale;
    if (gate != nullptr) *gate = 1;
    if (!kind.general) return s;
    const ScoreModifiers& m = p.modifiers;
    if (m.softcap > 0) {
      const float t = std::tanh(s / m.softcap);
      s = t * m.softcap;
      if (gate != nullptr) *gate = 1 - t * t;
    }
    if (m.alibi_slopes != nullptr) {
      s -= m.alibi_slopes[batch * m.alibi_batch_stride + head] *
           std::fabs(static_cast<float>(i + seqlen_k - seqlen_q - j));
    }
    return s;
  }
  float sink() const {
    return kind.general && p.modifiers.sink != nullptr ? p.modifiers.sink[head] : -kInfinity;
  }
  // What dropout makes of a weight: 0, or the scale.
  float kept(int i, int j) const {
    const ScoreModifiers& m = p.modifiers;
    if (!kind.general || m.rng_state == nullptr) return 1;
    const dropout::Generator generator(m.rng_state, batch, head, p.heads);
    return dropout::random(generator.row(i), generator.column(j)) < m.drop_threshold ? 0 : m.keep_scale;
  }
};

template <typename QueryRows, typename KeyRows, typename ValueRows>
void attend(const Head<FwdParams>& head, const QueryRows& q, const KeyRows& k, const ValueRows& v, const Rows& out,
            Tile tile, int block) {
  const FwdParams& p = head.p;
  for (int i = block * tile.block_m; i < std::min(head.seqlen_q, (block + 1) * tile.block_m); ++i) {
    std::vector<float> scores(static_cast<size_t>(head.seqlen_k), -kInfinity);
    float max = head.sink();
    for (int j = 0; j < head.seqlen_k; ++j) {
      float& s = scores[static_cast<size_t>(j)];
      if (head.visible(i, j)) s = head.score(q, k, i, j);
      max = std::max(max, s);
    }
    float sum = max == -kInfinity ? 0 : std::exp(head.sink() - max);
    std::vector<float> row(static_cast<size_t>(p.head_dim_v), 0.f);
    for (int j = 0; j < head.seqlen_k; ++j) {
      if (scores[static_cast<size_t>(j)] == -kInfinity) continue;
      const float weight = std::exp(scores[static_cast<size_t>(j)] - max);
      sum += weight;
      const float kept = head.kept(i, j);
      for (int d = 0; d < p.head_dim_v; ++d) row[static_cast<size_t>(d)] += weight * kept * v.at(j, d);
    }
    for (int d = 0; d < p.head_dim_v; ++d) out.set(i, d, sum > 0 ? row[static_cast<size_t>(d)] / sum : 0.f);
    if (p.lse != nullptr) p.lse[head.lse_index(i)] = max + std::log(sum);
  }
}

inline void fwd(const FwdParams& p, Kind kind, Tile tile, int index) {
  const int head_index = index / p.blocks_m;
  const Head<FwdParams> head(p, kind, head_index / p.heads, head_index % p.heads);
  attend(head, head.queries(p.q, p.q_stride), head.keys(p.k, p.k_stride), head.keys(p.v, p.v_stride),
         head.queries(p.out, p.out_stride), tile, index % p.blocks_m);
}

// The workspace tile of block `block` of a head.
inline long long tile_of(const Head<BwdParams>& head, Tile tile, int block) {
  const BwdParams& p = head.p;
  const int* const starts = p.sequences.cu_seqlens_q;
  const int first = starts != nullptr ? starts[head.batch] / tile.block_m + head.batch : head.batch * p.blocks_m;
  require(first + block < p.total_tiles, "a tile outside of the workspaces");
  return static_cast<long long>(head.head) * p.total_tiles + first + block;
}

inline void bwd_preprocess(const BwdParams& p, Kind kind, Tile tile, int index) {
  const int head_index = index / p.blocks_m, block = index % p.blocks_m;
  if (index == 0) *p.next_block = 0;
  const Head<BwdParams> head(p, kind, head_index / p.heads, head_index % p.heads);
  if (block * tile.block_m >= head.seqlen_q) return;
  const Rows dout = head.queries(p.dout, p.dout_stride), out = head.queries(p.out, p.out_stride);
  const long long at = tile_of(head, tile, block);
  for (int row = 0; row < tile.block_m; ++row) {
    const int i = block * tile.block_m + row;
    const bool inside = i < head.seqlen_q;
    const float lse = inside ? p.lse[head.lse_index(i)] : -kInfinity;
    float delta = inside ? dot(dout, i, out, i, p.head_dim_v) : 0;
    if (inside && p.dlse != nullptr) delta -= p.dlse[head.lse_index(i)];
    p.delta[at * tile.block_m + row] = delta;
    p.lse_log2[at * tile.block_m + row] = std::isinf(lse) ? kInfinity : lse * kLog2e;
  }
  const long long elements = static_cast<long long>(tile.block_m) * kind.head_dim;
  std::fill_n(p.dq_accum + at * elements, elements, 0.f);
  p.dq_semaphore[at] = 0;
}

inline void bwd(const BwdParams& p, Kind kind, Tile tile, int index) {
  const bool key = tile.split == 0 || index % 2 == 1, value = tile.split == 0 || index % 2 == 0;
  if (tile.split != 0) index /= 2;
  const int head_index = index / p.blocks_n, block = index % p.blocks_n;
  const int batch = head_index / p.heads_kv, head_kv = head_index % p.heads_kv;
  const int last_key = (block + 1) * tile.block_n;
  const Head<BwdParams> first(p, kind, batch, head_kv * p.group);
  const Rows k = first.keys(p.k, p.k_stride), v = first.keys(p.v, p.v_stride);
  const Rows dk = first.keys(p.dk, p.dk_stride), dv = first.keys(p.dv, p.dv_stride);
  for (int j = block * tile.block_n; j < std::min(first.seqlen_k, last_key); ++j) {
    std::vector<float> sum_dk(static_cast<size_t>(p.head_dim), 0.f), sum_dv(static_cast<size_t>(p.head_dim_v), 0.f);
    for (int h = head_kv * p.group; h < (head_kv + 1) * p.group; ++h) {
      const Head<BwdParams> head(p, kind, batch, h);
      const Rows q = head.queries(p.q, p.q_stride), dout = head.queries(p.dout, p.dout_stride);
      for (int i = 0; i < head.seqlen_q; ++i) {
        if (!head.visible(i, j)) continue;
        const long long at = tile_of(head, tile, i / tile.block_m), row = i % tile.block_m;
        float gate = 1;
        const float s = head.score(q, k, i, j, &gate);
        const float weight = std::exp2(s * kLog2e - p.lse_log2[at * tile.block_m + row]);
        const float kept = head.kept(i, j);
        const float dp = dot(dout, i, v, j, p.head_dim_v) * kept;
        const float ds = weight * (dp - p.delta[at * tile.block_m + row]) * gate;
        for (int d = 0; d < p.head_dim_v; ++d) sum_dv[static_cast<size_t>(d)] += weight * kept * dout.at(i, d);
        for (int d = 0; d < p.head_dim; ++d) sum_dk[static_cast<size_t>(d)] += ds * p.scale * q.at(i, d);
        float* const dq = p.dq_accum + (at * tile.block_m + row) * kind.head_dim;
        for (int d = 0; key && d < p.head_dim; ++d) dq[d] += ds * k.at(j, d);
      }
    }
    for (int d = 0; key && d < p.head_dim; ++d) dk.set(j, d, sum_dk[static_cast<size_t>(d)]);
    for (int d = 0; value && d < p.head_dim_v; ++d) dv.set(j, d, sum_dv[static_cast<size_t>(d)]);
  }
}

inline void bwd_postprocess(const BwdParams& p, Kind kind, Tile tile, int index) {
  const int head_index = index / p.blocks_m, block = index % p.blocks_m;
  const Head<BwdParams> head(p, kind, head_index / p.heads, head_index % p.heads);
  if (block * tile.block_m >= head.seqlen_q) return;
  const Rows dq = head.queries(p.dq, p.dq_stride);
  const long long at = tile_of(head, tile, block);
  for (int i = block * tile.block_m; i < std::min(head.seqlen_q, (block + 1) * tile.block_m); ++i) {
    const float* const sum = p.dq_accum + (at * tile.block_m + i % tile.block_m) * kind.head_dim;
    for (int d = 0; d < p.head_dim; ++d) dq.set(i, d, sum[d] * p.scale);
  }
}

}  // namespace fake
