// Scores of keys that their queries do not see.
#pragma once

#include "common/problem.cuh"
#include "common/ptx.cuh"

namespace edges {

// Of the columns 8 j + {0, 1} that a thread has of `kColumns`, how many are before `column`.
template <int kColumns>
__device__ __forceinline__ int before(int column) {
  const int x = min(max(column, 0), kColumns);
  return x / 8 * 2 + min(x % 8, 2);
}

// To -infinity. Accumulators of Q K^T: a thread has rows `row` and `row` + 8, and keys `key` + 8 j + {0, 1}. Those that are
// seen are bits of a word, which become predicates by sevens; it would take two compares for each score.
template <int kScores>
__device__ __forceinline__ void hide(float (&s)[kScores], const problem::Mask& mask, int row, int key) {
  constexpr int kColumns = 2 * kScores;
  static_assert(kScores <= 64, "a word has 32 bits");
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int first, last;
    mask.interval(row + 8 * half, first, last);
    unsigned seen = ptx::ones(before<kColumns>(last + 1 - key));
    if constexpr (problem::kGeneral) seen &= ~ptx::ones(before<kColumns>(first - key));
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if ((seen & 1u << (2 * j)) == 0) s[4 * j + 2 * half] = ptx::kMinusInfinity;
      if ((seen & 1u << (2 * j + 1)) == 0) s[4 * j + 2 * half + 1] = ptx::kMinusInfinity;
    }
  }
}

}  // namespace edges
