// Attention forward for compute capability 8.0 and up: O = softmax(scale Q K^T) V and the log-sum-exp of each row.
//
// A thread block owns FA_BLOCK_M query rows of one head, split over its warps, and walks the keys from right to left in
// blocks of FA_BLOCK_N, so that the blocks which need a mask come first (FlashAttention-2, Dao 2023, algorithm 1). Scores
// and probabilities never leave registers: the accumulator of S is, as it stands, the A operand of P V.
//
// The softmax works in base 2. Its running maximum is lazy: as long as no score of the warp exceeds the maximum in use by
// more than 2^kSlack, it stays, and with it the accumulator and the sum. One vote takes the place of the quad reductions,
// the rescaling is skipped, and the result is the same, because the final division uses the same maximum.
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"

namespace {

constexpr int kHeadDim = FA_HEAD_DIM;
constexpr int kBlockM = FA_BLOCK_M;
constexpr int kBlockN = FA_BLOCK_N;
constexpr int kWarps = FA_WARPS;
constexpr int kStages = FA_STAGES;  // 1: K and V of one block; 2: the next block is fetched during the whole step
constexpr bool kBf16 = FA_BF16;
constexpr bool kCausal = FA_CAUSAL;
constexpr bool kQueryInRegisters = FA_Q_IN_REGS;

constexpr int kThreads = kWarps * 32;
constexpr int kRowTiles = kBlockM / (16 * kWarps);  // 16-row tiles of a warp
constexpr int kKeyTiles = kBlockN / 8;              // 8-column tiles of S
constexpr int kDimTiles = kHeadDim / 8;             // 8-column tiles of O
constexpr float kSlack = 8.0f;

constexpr int kQueryBytes = kBlockM * kHeadDim * 2;
constexpr int kKeyBytes = kBlockN * kHeadDim * 2;
static_assert(kQueryBytes + 2 * kStages * kKeyBytes == FA_SMEM_BYTES, "kernels.toml: smem of fwd");
static_assert(kRowTiles * 16 * kWarps == kBlockM && kStages <= 2);

using QueryCopy = tile::Copy<kBlockM, kHeadDim, kThreads>;
using KeyCopy = tile::Copy<kBlockN, kHeadDim, kThreads>;

extern __shared__ __align__(1024) char shared_memory[];

// What a warp carries from one key block to the next.
struct State {
  float out[kRowTiles][kDimTiles][4];
  float row_max[kRowTiles][2];  // scaled, base 2; of rows lane / 4 and lane / 4 + 8 of each tile
  float row_sum[kRowTiles][2];  // over this thread's columns only, until the end
};

// P = exp2(scale_log2 S - row_max) in place, and what that does to the state. `limit` is the last visible column of
// this thread's first row, counted from its first column of the block.
template <bool kMasked>
__device__ __forceinline__ void softmax(State& state, float (&s)[kRowTiles][kKeyTiles][4], float scale_log2,
                                        int limit) {
  float block_max[kRowTiles][2];
  bool grows = false;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kMasked) {
        const int last = limit + (kCausal ? 16 * i + 8 * half : 0);
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
          if (8 * j > last) s[i][j][2 * half] = ptx::kMinusInfinity;
          if (8 * j + 1 > last) s[i][j][2 * half + 1] = ptx::kMinusInfinity;
        }
      }
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
  const int rows = p.seqlen_q - first_row;    // of this block that exist, if fewer than kBlockM
  const int shift = p.seqlen_k - p.seqlen_q;  // row i sees keys up to i + shift

  // Key blocks [0, blocks_n) hold visible keys; those from blocks_full on need a mask.
  int keys = p.seqlen_k;
  int keys_full = p.seqlen_k;
  if constexpr (kCausal) {
    keys = max(0, min(keys, first_row + kBlockM + shift));
    keys_full = max(0, min(keys_full, first_row + shift + 1));
  }
  const int blocks_n = (keys + kBlockN - 1) / kBlockN;
  const int blocks_full = keys_full / kBlockN;

  const unsigned shared = ptx::shared_address(shared_memory);
  const unsigned shared_k = shared + kQueryBytes;
  const unsigned shared_v = shared_k + kStages * kKeyBytes;
  const QueryCopy query_copy(thread, p.head_dim);
  const KeyCopy key_copy(thread, p.head_dim);
  const long long k_row_bytes = 2 * p.k_stride.row;
  const long long v_row_bytes = 2 * p.v_stride.row;
  // Sources of the key block to fetch next; the walk goes down.
  const char* k_source = tile::source(p.k, p.k_stride, batch, head / p.group,
                                      (blocks_n - 1) * static_cast<long long>(kBlockN) + key_copy.row, thread);
  const char* v_source = tile::source(p.v, p.v_stride, batch, head / p.group,
                                      (blocks_n - 1) * static_cast<long long>(kBlockN) + key_copy.row, thread);
  auto load_k = [&](int n, auto tail) {
    key_copy.load<decltype(tail)::value>(shared_k + (n & (kStages - 1)) * kKeyBytes, k_source, k_row_bytes,
                                         p.seqlen_k - n * kBlockN);
    k_source -= k_row_bytes * kBlockN;
  };
  auto load_v = [&](int n, auto tail) {
    key_copy.load<decltype(tail)::value>(shared_v + (n & (kStages - 1)) * kKeyBytes, v_source, v_row_bytes,
                                         p.seqlen_k - n * kBlockN);
    v_source -= v_row_bytes * kBlockN;
  };

  State state;
  // Last visible key of this thread's first row, less its first column. Under a causal mask no row of the tensor sees past
  // seqlen_k; rows after the tensor see zeros.
  const int visible =
      (kCausal ? first_row + warp * kRowTiles * 16 + lane / 4 + shift : p.seqlen_k - 1) - lane % 4 * 2;
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

  const tile::Fragment<true> query_fragment(shared + warp * kRowTiles * 16 * tile::kRowBytes, lane);
  if (blocks_n > 0) {
    query_copy.load<true>(
        shared, tile::source(p.q, p.q_stride, batch, head, first_row + query_copy.row, thread),
        2 * p.q_stride.row, rows);
    load_k(blocks_n - 1, tile::True{});
    if constexpr (kStages == 2) load_v(blocks_n - 1, tile::True{});
    ptx::cp_async_commit();

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

    auto step = [&](int n, auto masked) {
      constexpr bool kMasked = decltype(masked)::value;
      // K of block n has arrived, and all warps are done with block n + 1.
      ptx::cp_async_wait<0>();
      __syncthreads();
      if constexpr (kStages == 1) {
        load_v(n, masked);
      } else if (n > 0) {
        load_k(n - 1, tile::False{});
        load_v(n - 1, tile::False{});
      }
      ptx::cp_async_commit();

      const unsigned stage = (n & (kStages - 1)) * kKeyBytes;
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
        if (n > 0) load_k(n - 1, tile::False{});
        ptx::cp_async_commit();
      }

      softmax<kMasked>(state, s, p.scale_log2, visible - n * kBlockN);

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

    int n = blocks_n - 1;
    for (; n >= blocks_full; --n) step(n, tile::True{});
    for (; n >= 0; --n) step(n, tile::False{});
    // The output takes the place of Q; each warp writes over rows that only it has read.
    ptx::cp_async_wait<0>();
    __syncwarp();
  }

#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.row_sum[i][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = (warp * kRowTiles + i) * 16 + half * 8 + lane / 4;
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      if (lane % 4 == 0 && row < rows) {
        constexpr float kLn2 = 0.69314718055994530942f;
        p.lse[static_cast<long long>(head_index) * p.seqlen_q + first_row + row] =
            sum == 0.0f ? ptx::kMinusInfinity : (state.row_max[i][half] + ptx::log2(sum)) * kLn2;
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
  query_copy.store(
      shared,
      const_cast<char*>(tile::source(p.out, p.out_stride, batch, head, first_row + query_copy.row, thread)),
      2 * p.out_stride.row, rows);
}
