// One sequence of the batch, and which of its keys a query sees.
#pragma once

#include "common/ptx.cuh"
#include "params.h"

// Mask kinds of the kernel table. Full and causal are compiled without tests that they do not need; general has every
// other feature behind run-time flags that are the same for all threads.
#define FA_MASK_FULL 0
#define FA_MASK_CAUSAL 1
#define FA_MASK_GENERAL 2

namespace problem {

constexpr bool kCausal = FA_MASK == FA_MASK_CAUSAL;
constexpr bool kGeneral = FA_MASK == FA_MASK_GENERAL;

struct Sequence {
  long long q_row;  // first row of its queries in q, out and lse
  long long k_row;
  int seqlen_q;
  int seqlen_k;

  // `early`: what a kernel before may still be writing is read past L1, which would keep it, and may be anything.
  template <typename Params>
  __device__ __forceinline__ Sequence(const Params& p, int batch, bool early = false) {
    const flash_attn::Sequences& s = p.sequences;
    q_row = k_row = 0;
    seqlen_q = p.seqlen_q;
    seqlen_k = p.seqlen_k;
    if (s.cu_seqlens_q != nullptr) {
      q_row = s.cu_seqlens_q[batch];
      seqlen_q = s.cu_seqlens_q[batch + 1] - static_cast<int>(q_row);
    }
    if (s.cu_seqlens_k != nullptr) {
      k_row = s.cu_seqlens_k[batch];
      seqlen_k = s.cu_seqlens_k[batch + 1] - static_cast<int>(k_row);
    }
    if (s.seqused_q != nullptr) seqlen_q = min(seqlen_q, s.seqused_q[batch]);
    if (s.seqused_k != nullptr) {
      const int used = early ? ptx::load_past_l1(s.seqused_k + batch) : s.seqused_k[batch];
      seqlen_k = min(seqlen_k, used + s.new_keys);
    }
    if (early) seqlen_k = max(0, seqlen_k);
    if (s.leftpad_k != nullptr) {
      const int padding = max(0, s.leftpad_k[batch]);  // there are no rows before the first
      k_row += padding;
      seqlen_k = max(0, seqlen_k - padding);
    }
  }
};

// The keys [first(i), last(i)] that query i sees: an interval for every mask, and both ends grow with i.
struct Mask {
  int shift;  // query i stands at key position i + shift: the mask is aligned to the bottom right
  int seqlen_k;
  int left, right, chunk;

  __device__ __forceinline__ Mask(int seqlen_q, int seqlen_k, const flash_attn::ScoreModifiers& m)
      : shift(seqlen_k - seqlen_q), seqlen_k(seqlen_k), left(m.window_left), right(m.window_right), chunk(m.chunk) {}
  __device__ __forceinline__ Mask(const Sequence& sequence, const flash_attn::ScoreModifiers& m)
      : Mask(sequence.seqlen_q, sequence.seqlen_k, m) {}

  __device__ __forceinline__ int chunk_start(int position) const {
    const int remainder = position % chunk;
    return position - (remainder < 0 ? remainder + chunk : remainder);
  }

  __device__ __forceinline__ int first(int query) const {
    if constexpr (!kGeneral) return 0;
    const int position = query + shift;
    const int bound = position - left;
    return max(0, chunk > 0 ? max(bound, chunk_start(position)) : bound);
  }

  __device__ __forceinline__ int last(int query) const {
    const int position = query + shift;
    if constexpr (kCausal) return min(seqlen_k - 1, position);
    if constexpr (!kGeneral) return seqlen_k - 1;
    const int bound = position + right;
    return min(seqlen_k - 1, chunk > 0 ? min(bound, chunk_start(position) + chunk - 1) : bound);
  }

  // Both, which have a chunk's start in common.
  __device__ __forceinline__ void interval(int query, int& first_key, int& last_key) const {
    if constexpr (!kGeneral) {
      first_key = first(query);
      last_key = last(query);
      return;
    }
    const int position = query + shift;
    first_key = position - left;
    last_key = position + right;
    if (chunk > 0) {
      const int start = chunk_start(position);
      first_key = max(first_key, start);
      last_key = min(last_key, start + chunk - 1);
    }
    first_key = max(0, first_key);
    last_key = min(seqlen_k - 1, last_key);
  }

  // The first query that sees a key at or after `key`, and the last that sees one at or before it; both unclamped.
  __device__ __forceinline__ int first_query(int key) const {
    if constexpr (kCausal) return key - shift;
    if constexpr (!kGeneral) return -flash_attn::kUnlimited;
    const int bound = key - right;
    return (chunk > 0 ? max(bound, chunk_start(key)) : bound) - shift;
  }

  __device__ __forceinline__ int last_query(int key) const {
    if constexpr (!kGeneral) return flash_attn::kUnlimited;
    const int bound = key + left;
    return (chunk > 0 ? min(bound, chunk_start(key) + chunk - 1) : bound) - shift;
  }
};

}  // namespace problem
