// Which attention weights dropout keeps: a hash of (seed, offset, batch, head, query, key).
//
// The forward holds queries by keys and the backward keys by queries, in other pieces; a value that depends on the
// element's place alone, and not on who asks, lets both draw the same mask, and lets a test draw it in a few lines of
// torch. Each step is lowbias32, an exhaustively tested 32-bit mixer (Wellons 2018, "Prospecting for Hash Functions").
#pragma once

namespace dropout {

__device__ __forceinline__ unsigned mix(unsigned x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

// The state of one head of one sequence.
struct Generator {
  unsigned row_key = 0, column_key = 0;

  Generator() = default;

  __device__ __forceinline__ Generator(const unsigned long long* rng_state, int batch, int head, int heads) {
    const unsigned long long seed = rng_state[0];
    const unsigned long long offset = rng_state[1];
    const unsigned long long index = static_cast<unsigned long long>(batch) * heads + head;
    unsigned h = mix(static_cast<unsigned>(seed));
    h = mix(h ^ static_cast<unsigned>(seed >> 32));
    h = mix(h ^ static_cast<unsigned>(offset));
    h = mix(h ^ static_cast<unsigned>(offset >> 32));
    h = mix(h ^ static_cast<unsigned>(index));
    row_key = mix(h ^ static_cast<unsigned>(index >> 32));
    column_key = mix(row_key ^ 0x9e3779b9u);
  }

  __device__ __forceinline__ unsigned row(int query) const { return mix(query ^ row_key); }
  __device__ __forceinline__ unsigned column(int key) const { return mix(key ^ column_key); }
};

// Uniform in 32 bits: the weight of `row` and `column` is kept where this is at least the threshold.
__device__ __forceinline__ unsigned random(unsigned row, unsigned column) { return mix(row ^ column); }

}  // namespace dropout
