// Attention forward for compute capability 8.0 and up: O = softmax(scale Q K^T) V and the log-sum-exp of each row.
//
// A thread block owns FA_BLOCK_M query rows of one head, split over its warps, and walks the keys from right to left in
// blocks of FA_BLOCK_N, so that the blocks which need a mask come first (FlashAttention-2, Dao 2023, algorithm 1). Scores
// and probabilities never leave registers: the accumulator of S is, as it stands, the A operand of P V.
//
// The softmax works in base 2. Its running maximum is lazy: as long as no score of the warp exceeds the maximum in use by
// more than kSlack, it stays, and with it the accumulator and the sum. One vote takes the place of the quad reductions,
// the rescaling is skipped, and the result is the same, because the final division uses the same maximum.
#include "common/dropout.cuh"
#include "common/problem.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"

namespace {

using problem::kCausal;
using problem::kGeneral;

constexpr int kHeadDim = FA_HEAD_DIM;
constexpr int kBlockM = FA_BLOCK_M;
constexpr int kBlockN = FA_BLOCK_N;
constexpr int kWarps = FA_WARPS;
constexpr int kStages = FA_STAGES;  // 1: K and V of one block; 2: the next block is fetched during the whole step
constexpr bool kBf16 = FA_BF16;
constexpr bool kQueryInRegisters = FA_Q_IN_REGS;

constexpr int kThreads = kWarps * 32;
constexpr int kRowTiles = kBlockM / (16 * kWarps);  // 16-row tiles of a warp
constexpr int kKeyTiles = kBlockN / 8;              // 8-column tiles of S
constexpr int kDimTiles = kHeadDim / 8;             // 8-column tiles of O
constexpr float kSlack = 8.0f;
constexpr float kLog2e = 1.4426950408889634074f;
constexpr float kLn2 = 0.69314718055994530942f;

using QueryCopy = tile::Copy<kBlockM, kHeadDim, kThreads>;
using KeyCopy = tile::Copy<kBlockN, kHeadDim, kThreads>;
static_assert(QueryCopy::kBytes + 2 * kStages * KeyCopy::kBytes == FA_SMEM_BYTES, "kernels.toml: smem of fwd");
static_assert(kRowTiles * 16 * kWarps == kBlockM && (kStages == 1 || kStages == 2));

extern __shared__ __align__(1024) char shared_memory[];

// What a warp carries from one key block to the next.
struct State {
  float out[kRowTiles][kDimTiles][4];
  float row_max[kRowTiles][2];  // scaled, base 2; of rows lane / 4 and lane / 4 + 8 of each tile
  float row_sum[kRowTiles][2];  // over this thread's columns only, until the end
};

// Softcap and ALiBi: raw scores become scores in base 2. `query` is this thread's first row, `key` its first column.
__device__ __forceinline__ void modify_scores(float (&s)[kRowTiles][kKeyTiles][4], const flash_attn::FwdParams& p,
                                              float slope_log2, int shift, int query, int key) {
  if (p.modifiers.softcap > 0.0f) {
    const float in = p.scale / p.modifiers.softcap;
    const float out = p.modifiers.softcap * kLog2e;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = ptx::tanh(s[i][j][e] * in) * out;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] *= p.scale_log2;
      }
    }
  }
  if (p.modifiers.alibi_slopes != nullptr) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int distance = query + 16 * i + e / 2 * 8 + shift - (key + 8 * j + e % 2);
          s[i][j][e] -= slope_log2 * fabsf(static_cast<float>(distance));
        }
      }
    }
  }
}

// Hides what the mask hides. `query` and `key` as above.
__device__ __forceinline__ void apply_mask(float (&s)[kRowTiles][kKeyTiles][4], const problem::Mask& mask, int query,
                                           int key) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = query + 16 * i + 8 * half;
      const int last = mask.last(row) - key;
      const int first = mask.first(row) - key;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        if (8 * j > last || (kGeneral && 8 * j < first)) s[i][j][2 * half] = ptx::kMinusInfinity;
        if (8 * j + 1 > last || (kGeneral && 8 * j + 1 < first)) s[i][j][2 * half + 1] = ptx::kMinusInfinity;
      }
    }
  }
}

// P = exp2(scale_log2 S - row_max) in place, and what that does to the state. With kMasked, scores may be -inf.
template <bool kMasked>
__device__ __forceinline__ void softmax(State& state, float (&s)[kRowTiles][kKeyTiles][4], float scale_log2) {
  float block_max[kRowTiles][2];
  bool grows = false;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m = fmaxf(s[i][0][2 * half], s[i][0][2 * half + 1]);
#pragma unroll
      for (int j = 1; j < kKeyTiles; ++j) m = fmaxf(m, fmaxf(s[i][j][2 * half], s[i][j][2 * half + 1]));
      block_max[i][half] = m * scale_log2;
      grows |= block_max[i][half] > state.row_max[i][half] + kSlack;
    }
  }
  if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float m = fmaxf(block_max[i][half], state.row_max[i][half]);
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        // A row that has seen no key yet keeps -inf, and must not become inf - inf.
        const float base = kMasked && m == ptx::kMinusInfinity ? 0.0f : m;
        const float factor = ptx::exp2(state.row_max[i][half] - base);
        state.row_max[i][half] = m;
        state.row_sum[i][half] *= factor;
#pragma unroll
        for (int j = 0; j < kDimTiles; ++j) {
          state.out[i][j][2 * half] *= factor;
          state.out[i][j][2 * half + 1] *= factor;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float m = state.row_max[i][half];
      const float base = kMasked && m == ptx::kMinusInfinity ? 0.0f : m;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        float& low = s[i][j][2 * half];
        float& high = s[i][j][2 * half + 1];
        low = ptx::exp2(fmaf(low, scale_log2, -base));
        high = ptx::exp2(fmaf(high, scale_log2, -base));
        sum += low + high;
      }
      state.row_sum[i][half] += sum;
    }
  }
}

// Zeroes the probabilities that dropout drops; the sum of the row has counted them.
__device__ __forceinline__ void drop(float (&s)[kRowTiles][kKeyTiles][4], const dropout::Generator& generator,
                                     unsigned threshold, int query, int key) {
  unsigned rows[kRowTiles][2];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    rows[i][0] = generator.row(query + 16 * i);
    rows[i][1] = generator.row(query + 16 * i + 8);
  }
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j) {
    const unsigned columns[2] = {generator.column(key + 8 * j), generator.column(key + 8 * j + 1)};
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (dropout::random(rows[i][e / 2], columns[e % 2]) < threshold) s[i][j][e] = 0.0f;
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, FA_MIN_BLOCKS)
    flash_fwd(const __grid_constant__ flash_attn::FwdParams p) {
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;

  // Query blocks of a head are neighbours, so that its K and V stay in L2; under a causal mask the longest come first.
  const int head_index = blockIdx.x / p.blocks_m;
  const int block_in_head = blockIdx.x - head_index * p.blocks_m;
  const int block_m = kCausal ? p.blocks_m - 1 - block_in_head : block_in_head;
  const int batch = head_index / p.heads;
  const int head = head_index - batch * p.heads;
  const int first_row = block_m * kBlockM;
  const problem::Sequence sequence(p, batch);
  const int rows = sequence.seqlen_q - first_row;  // of this block that exist, if fewer than kBlockM
  if (rows <= 0) return;
  const problem::Mask mask(sequence, p.modifiers);

  // Key blocks [blocks_first, blocks_last) hold visible keys; those in [full_first, full_last) need no mask.
  const int last_row = min(first_row + kBlockM, sequence.seqlen_q) - 1;
  const int blocks_last = max(0, mask.last(last_row) + kBlockN) / kBlockN;
  const int full_last = max(0, mask.last(first_row) + 1) / kBlockN;
  const int blocks_first = kGeneral ? mask.first(first_row) / kBlockN : 0;
  const int full_first = kGeneral ? (mask.first(last_row) + kBlockN - 1) / kBlockN : 0;

  const unsigned shared = ptx::shared_address(shared_memory);
  const unsigned shared_k = shared + QueryCopy::kBytes;
  const unsigned shared_v = shared_k + kStages * KeyCopy::kBytes;
  const QueryCopy query_copy(thread);
  const KeyCopy key_copy(thread);
  const long long k_row_bytes = 2 * p.k_stride.row;
  const long long v_row_bytes = 2 * p.v_stride.row;
  // Sources of the key block to fetch next; the walk goes down.
  const long long first_key = sequence.k_row + (blocks_last - 1) * static_cast<long long>(kBlockN) + key_copy.row;
  const char* k_source = tile::source(p.k, p.k_stride, batch, head / p.group, first_key, thread);
  const char* v_source = tile::source(p.v, p.v_stride, batch, head / p.group, first_key, thread);
  auto load_k = [&](int n, auto tail) {
    key_copy.load<decltype(tail)::value>(shared_k + (n & (kStages - 1)) * KeyCopy::kBytes, k_source, k_row_bytes,
                                         p.head_dim, sequence.seqlen_k - n * kBlockN);
    k_source -= k_row_bytes * kBlockN;
  };
  auto load_v = [&](int n, auto tail) {
    key_copy.load<decltype(tail)::value>(shared_v + (n & (kStages - 1)) * KeyCopy::kBytes, v_source, v_row_bytes,
                                         p.head_dim_v, sequence.seqlen_k - n * kBlockN);
    v_source -= v_row_bytes * kBlockN;
  };

  State state;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.row_max[i][half] = ptx::kMinusInfinity;
      state.row_sum[i][half] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kDimTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state.out[i][j][e] = 0.0f;
    }
  }

  if (blocks_last > blocks_first) {
    query_copy.load<true>(
        shared, tile::source(p.q, p.q_stride, batch, head, sequence.q_row + first_row + query_copy.row, thread),
        2 * p.q_stride.row, p.head_dim, rows);
    load_k(blocks_last - 1, tile::True{});
    if constexpr (kStages == 2) load_v(blocks_last - 1, tile::True{});
    ptx::cp_async_commit();

    const tile::Fragment<true> query_fragment(shared + warp * kRowTiles * 16 * tile::kRowBytes, lane);
    unsigned query[kQueryInRegisters ? kHeadDim / 16 : 1][kRowTiles][4];
    if constexpr (kQueryInRegisters) {
      ptx::cp_async_wait<0>();
      __syncthreads();
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) ptx::ldmatrix_x4(query[step][i], query_fragment.at<kBlockM>(16 * i, step));
      }
    }

    const flash_attn::ScoreModifiers& modifiers = p.modifiers;
    float slope = 0.0f;
    dropout::Generator generator{};
    if constexpr (kGeneral) {
      if (modifiers.alibi_slopes != nullptr) {
        slope = modifiers.alibi_slopes[batch * modifiers.alibi_batch_stride + head] * kLog2e;
      }
      if (modifiers.rng_state != nullptr) {
        generator = dropout::Generator(modifiers.rng_state, batch, head, p.heads);
      }
    }

    // kMasked: the block may hold hidden keys, or end after the last one. The general kernel finds out at run time.
    auto step = [&](int n, auto masked) {
      constexpr bool kMasked = decltype(masked)::value;
      // K of block n has arrived, and all warps are done with block n + 1.
      ptx::cp_async_wait<0>();
      __syncthreads();
      if constexpr (kStages == 1) {
        load_v(n, masked);
      } else if (n > blocks_first) {
        load_k(n - 1, tile::False{});
        load_v(n - 1, tile::False{});
      }
      ptx::cp_async_commit();

      const unsigned stage = (n & (kStages - 1)) * KeyCopy::kBytes;
      const tile::Fragment<false> k_fragment(shared_k + stage, lane);
      float s[kRowTiles][kKeyTiles][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][j][e] = 0.0f;
        }
      }
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        unsigned q[kRowTiles][4];
        if constexpr (!kQueryInRegisters) {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) ptx::ldmatrix_x4(q[i], query_fragment.at<kBlockM>(16 * i, step));
        }
#pragma unroll
        for (int j = 0; j < kKeyTiles / 2; ++j) {
          unsigned k[4];
          ptx::ldmatrix_x4(k, k_fragment.at<kBlockN>(16 * j, step));
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            const unsigned(&a)[4] = kQueryInRegisters ? query[kQueryInRegisters ? step : 0][i] : q[i];
            ptx::mma_16816<kBf16>(s[i][2 * j], a, k[0], k[1]);
            ptx::mma_16816<kBf16>(s[i][2 * j + 1], a, k[2], k[3]);
          }
        }
      }

      if constexpr (kStages == 1) {
        // V has arrived, and all warps are done with K.
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (n > blocks_first) load_k(n - 1, tile::False{});
        ptx::cp_async_commit();
      }

      const int query_row = first_row + warp * kRowTiles * 16 + lane / 4;
      const int key = n * kBlockN + lane % 4 * 2;
      if constexpr (kGeneral) {
        modify_scores(s, p, slope, mask.shift, query_row, key);
        if (n >= full_last || n < full_first) apply_mask(s, mask, query_row, key);
        softmax<true>(state, s, 1.0f);
        if (modifiers.rng_state != nullptr) drop(s, generator, modifiers.drop_threshold, query_row, key);
      } else {
        if constexpr (kMasked) apply_mask(s, mask, query_row, key);
        softmax<kMasked>(state, s, p.scale_log2);
      }

      const tile::Fragment<true> v_fragment(shared_v + stage, lane);
#pragma unroll
      for (int step = 0; step < kBlockN / 16; ++step) {
        unsigned a[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          a[i][0] = ptx::pack<kBf16>(s[i][2 * step][0], s[i][2 * step][1]);
          a[i][1] = ptx::pack<kBf16>(s[i][2 * step][2], s[i][2 * step][3]);
          a[i][2] = ptx::pack<kBf16>(s[i][2 * step + 1][0], s[i][2 * step + 1][1]);
          a[i][3] = ptx::pack<kBf16>(s[i][2 * step + 1][2], s[i][2 * step + 1][3]);
        }
#pragma unroll
        for (int j = 0; j < kDimTiles / 2; ++j) {
          unsigned v[4];
          ptx::ldmatrix_x4_trans(v, v_fragment.at<kBlockN>(16 * step, j));
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            ptx::mma_16816<kBf16>(state.out[i][2 * j], a[i], v[0], v[1]);
            ptx::mma_16816<kBf16>(state.out[i][2 * j + 1], a[i], v[2], v[3]);
          }
        }
      }
    };

    int n = blocks_last - 1;
    if constexpr (!kGeneral) {
      for (; n >= full_last; --n) step(n, tile::True{});
      for (; n >= 0; --n) step(n, tile::False{});
    } else {
      for (; n >= blocks_first; --n) step(n, tile::True{});
    }
    // The output takes the place of Q; each warp writes over rows that only it has read.
    ptx::cp_async_wait<0>();
    __syncwarp();
  }

  // The sink is one more logit of each row, with no value behind it.
  float sink = ptx::kMinusInfinity;
  float keep_scale = 1.0f;
  if constexpr (kGeneral) {
    if (p.modifiers.sink != nullptr) sink = p.modifiers.sink[head] * kLog2e;
    if (p.modifiers.rng_state != nullptr) keep_scale = p.modifiers.keep_scale;
  }
  float* const lse = p.lse + batch * p.lse_batch_stride + head * p.lse_head_stride + sequence.q_row + first_row;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.row_sum[i][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      float row_max = state.row_max[i][half];
      float factor = 1.0f;
      if constexpr (kGeneral) {
        const float m = fmaxf(row_max, sink);
        if (m != ptx::kMinusInfinity) {
          factor = ptx::exp2(row_max - m);
          sum = fmaf(sum, factor, ptx::exp2(sink - m));
        }
        row_max = m;
      }
      const int row = (warp * kRowTiles + i) * 16 + half * 8 + lane / 4;
      const float inverse = sum == 0.0f ? 0.0f : factor * keep_scale / sum;
      if (lane % 4 == 0 && row < rows && p.lse != nullptr) {
        lse[row] = sum == 0.0f ? ptx::kMinusInfinity : (row_max + ptx::log2(sum)) * kLn2;
      }
#pragma unroll
      for (int j = 0; j < kDimTiles; ++j) {
        ptx::store_shared(shared + j / 8 * QueryCopy::kPanelBytes + tile::swizzled(row, j % 8) + lane % 4 * 4,
                          ptx::pack<kBf16>(state.out[i][j][2 * half] * inverse,
                                           state.out[i][j][2 * half + 1] * inverse));
      }
    }
  }
  __syncthreads();
  query_copy.store(shared,
                   tile::destination(p.out, p.out_stride, batch, head, sequence.q_row + first_row + query_copy.row,
                                     thread),
                   2 * p.out_stride.row, p.head_dim_v, rows);
}
