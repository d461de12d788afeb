// P as 2 to the power of score - base, where a row's base is not known to be near its largest score: that all P are in
// range is read off their sums. What is done where they are not.
#pragma once

#include "common/ptx.cuh"
#include "params.h"

namespace bases {

constexpr float kLargest = 4096.0f;  // what a thread's P of a row may sum up to; P of fp16 end at 65,504
constexpr float kLowest = -3e38f;    // the base of a row that has none

// Accumulators of Q K^T: a thread has columns 8 j + 2 (lane % 4) + {0, 1} of rows lane / 4 and lane / 4 + 8.
//
// Scores to P, in place. `sum`: this thread's part of the rows' sums.
template <int kScores>
__device__ __forceinline__ void exponentials(float (&s)[kScores], float (&sum)[2], const float (&base)[2],
                                             float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // A row without a base gets infinity, but 0 where the score is -infinity as well.
    const float subtracted = fmaxf(base[half], kLowest);
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int i = 2 * half; i < kScores; i += 4) {
      s[i] = ptx::exp2(fmaf(s[i], scale_log2, -subtracted));
      s[i + 1] = ptx::exp2(fmaf(s[i + 1], scale_log2, -subtracted));
      even += s[i];
      odd += s[i + 1];
    }
    sum[half] = even + odd;
  }
}

// Raises the bases of the warp's rows so that the P of a block, all finite, are below 2 (below 4 at the end of fp32). By
// powers of 2, so that P are as if they had been computed from the new bases. `factor`: what sums so far must be scaled by.
template <int kScores>
__device__ __forceinline__ void raise(float (&p)[kScores], float (&sum)[2], float (&base)[2], float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float m = 1.0f;
#pragma unroll
    for (int i = 2 * half; i < kScores; i += 4) m = fmaxf(m, fmaxf(p[i], p[i + 1]));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    const int up = min((__float_as_int(m) >> 23) - 127, 126);  // 2^-127 is no normal number
    factor[half] = __int_as_float((127 - up) << 23);
    base[half] += static_cast<float>(up);
    sum[half] *= factor[half];
#pragma unroll
    for (int i = 2 * half; i < kScores; i += 4) {
      p[i] *= factor[half];
      p[i + 1] *= factor[half];
    }
  }
}

// The scores of 16 queries, from row `query` of the sequence on, and a block of keys from row `key` on, all of which
// exist, once more: by each warp alone, and from device memory, as their tiles may be gone from shared memory. Rare, so it
// need not be fast. The sequence begins in rows q_row and k_row.
template <bool kBf16, int kScores>
__device__ __forceinline__ void multiply_again(float (&s)[kScores], const flash_attn::FwdParams& p, int batch, int head,
                                               int q_row, int query, int k_row, int key, int lane) {
  const bool packed_q = p.sequences.cu_seqlens_q != nullptr;
  const long long batch_q = packed_q ? 0 : batch;
  const long long batch_k = p.sequences.cu_seqlens_k != nullptr ? 0 : batch;
  // Rows after the sequence's last may be those of the next one. They are not stored, but their P are looked at too.
  const int last = (packed_q ? p.sequences.cu_seqlens_q[p.batch] - q_row : p.seqlen_q) - 1;
  const int column = lane % 4 * 2;
  const char* q[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const long long row = q_row + min(query + lane / 4 + 8 * half, last);
    q[half] = static_cast<const char*>(p.q) +
              2 * (batch_q * p.q_stride.batch + head * p.q_stride.head + row * p.q_stride.row + column);
  }
  const char* const k = static_cast<const char*>(p.k) +
                        2 * (batch_k * p.k_stride.batch + head / p.group * p.k_stride.head +
                             (k_row + key + lane / 4) * p.k_stride.row + column);
  auto read = [](const char* address, bool exists) {
    return exists ? *reinterpret_cast<const unsigned*>(address) : 0u;
  };
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = 0.0f;
#pragma unroll 1
  for (int first = 0; first < p.head_dim; first += 16) {  // head_dim is a multiple of 8
    const bool both = first + 8 < p.head_dim;
    const unsigned a[4] = {read(q[0] + 2 * first, true), read(q[1] + 2 * first, true),
                           read(q[0] + 2 * first + 16, both), read(q[1] + 2 * first + 16, both)};
    const char* row = k + 2 * first;
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      ptx::mma_16816<kBf16>(*reinterpret_cast<float(*)[4]>(&s[i]), a, read(row, true), read(row + 16, both));
      row += 16 * p.k_stride.row;
    }
  }
}

}  // namespace bases
