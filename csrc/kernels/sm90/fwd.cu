// Attention forward for Hopper (sm_90a): O = softmax(scale Q K^T) V and the log-sum-exp of each row.
//
// Warp specialised (FlashAttention-3, Shah et al. 2024): one warp of a producer warpgroup fetches Q, K and V by bulk tensor
// copies; each consumer warpgroup owns 64 query rows, multiplies by wgmma, and has its softmax run under matrix products:
// its own P V of the block before, and those of the other consumers. (Having consumers take turns, as there, was slower on
// every tile tried.) Persistent: tiles are dealt in rounds, the producer running ahead into the next while consumers finish.
//
// As in the sm80 kernel, the running maximum is lazy, and the accumulator is rescaled only when a score outgrows it. The
// general mask kind has windows, chunks, softcap and sink here; ALiBi and dropout are the sm80 family's.
#include "common/hopper.cuh"
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
constexpr int kStages = FA_STAGES;
constexpr bool kBf16 = FA_BF16;
constexpr bool kSeparateOutput = FA_SEPARATE_OUT;  // else the output goes through the memory of Q

constexpr int kConsumers = kBlockM / 64;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
static_assert(kConsumers == 2 || kConsumers == 3, "setmaxnreg");
static_assert(kStages <= 4, "Barriers");
static_assert(kThreads == FA_WARPS * 32 && kConsumers * 64 == kBlockM && kBlockN % 16 == 0);

constexpr int kScores = kBlockN / 2;    // of a thread: 2 rows, kBlockN / 4 columns
constexpr int kOutputs = kHeadDim / 2;
constexpr float kSlack = 8.0f;
constexpr float kLog2e = 1.4426950408889634074f;
constexpr float kLn2 = 0.69314718055994530942f;

constexpr int kPanels = (kHeadDim + 63) / 64;
constexpr int kQueryPanel = kBlockM * tile::kRowBytes;
constexpr int kKeyPanel = kBlockN * tile::kRowBytes;
constexpr int kQueryBytes = kPanels * kQueryPanel;
constexpr int kKeyBytes = kPanels * kKeyPanel;
constexpr int kBarrierBytes = 1024;
static_assert((kSeparateOutput ? 2 : 1) * kQueryBytes + 2 * kStages * kKeyBytes + kBarrierBytes == FA_SMEM_BYTES,
              "kernels.toml: smem of fwd");

using ScoreProduct = hopper::Wgmma<kBf16, kBlockN>;
using OutputProduct = hopper::Wgmma<kBf16, kHeadDim>;

extern __shared__ __align__(1024) char shared_memory[];

// Barriers, 8 bytes each.
struct Barriers {
  unsigned base;
  __device__ __forceinline__ unsigned q_full() const { return base; }
  __device__ __forceinline__ unsigned q_empty() const { return base + 8; }
  __device__ __forceinline__ unsigned k_full(int s) const { return base + 16 + 8 * s; }
  __device__ __forceinline__ unsigned k_empty(int s) const { return base + 48 + 8 * s; }
  __device__ __forceinline__ unsigned v_full(int s) const { return base + 80 + 8 * s; }
  __device__ __forceinline__ unsigned v_empty(int s) const { return base + 112 + 8 * s; }
};

// The order of the tiles: heads in groups whose K and V stay in L2; in a group the longest tiles of all heads come first.
// Every other round is dealt in reverse, so that each thread block gets its share of long and short ones.
struct Tile {
  int head_index, block;

  __device__ __forceinline__ Tile(const flash_attn::FwdTmaParams& p, int round) {
    const int place = round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int index = round * static_cast<int>(gridDim.x) + place;
    const int total = p.fwd.batch * p.fwd.heads;
    if (!kCausal) {
      head_index = index / p.fwd.blocks_m;
      block = index - head_index * p.fwd.blocks_m;
    } else {
      const int per_group = p.heads_per_group * p.fwd.blocks_m;
      const int group = index / per_group;
      const int heads = max(1, min(p.heads_per_group, total - group * p.heads_per_group));
      const int rank = (index - group * per_group) / heads;
      head_index = group * p.heads_per_group + (index - group * per_group) - rank * heads;
      block = p.fwd.blocks_m - 1 - rank;
    }
  }

  __device__ __forceinline__ bool exists(const flash_attn::FwdTmaParams& p) const {
    return block >= 0 && head_index < p.fwd.batch * p.fwd.heads;
  }
};

// One tile of work: kBlockM queries of a head.
struct Work {
  int batch, head, first_row;
  problem::Sequence sequence;
  problem::Mask mask;
  int first, last;            // key blocks [first, last) hold visible keys
  int full_first, full_last;  // of these, [full_first, full_last) need no mask

  __device__ __forceinline__ Work(const flash_attn::FwdParams& p, const Tile& place)
      : batch(place.head_index / p.heads),
        head(place.head_index - batch * p.heads),
        first_row(place.block * kBlockM),
        sequence(p, batch),
        mask(sequence, p.modifiers) {
    const int last_row = min(first_row + kBlockM, sequence.seqlen_q) - 1;
    last = max(0, mask.last(last_row) + kBlockN) / kBlockN;
    full_last = max(0, mask.last(first_row) + 1) / kBlockN;
    first = kGeneral ? mask.first(first_row) / kBlockN : 0;
    full_first = kGeneral ? (mask.first(last_row) + kBlockN - 1) / kBlockN : 0;
  }

  __device__ __forceinline__ bool empty() const { return last <= first; }
};

// Position in a ring of kStages buffers.
struct Ring {
  int stage = 0;
  int phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ void produce(const flash_attn::FwdTmaParams& p, const Barriers& barriers, unsigned shared_q,
                                        unsigned shared_k, unsigned shared_v, int rounds) {
  Ring k_ring, v_ring;
  int q_phase = 0;
  auto load_key_tile = [&](const void* map, unsigned full, unsigned dst, const Work& work, int n) {
    hopper::barrier_expect_bytes(full, kKeyBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      hopper::load_box(dst + panel * kKeyPanel, map, full, panel * 64,
                       static_cast<int>(work.sequence.k_row) + n * kBlockN, work.head / p.fwd.group,
                       p.fwd.sequences.cu_seqlens_k != nullptr ? 0 : work.batch);
    }
  };
  for (int round = 0; round < rounds; ++round) {
    const Tile next(p, round);
    if (!next.exists(p)) break;
    const Work work(p.fwd, next);
    if (work.first_row >= work.sequence.seqlen_q || work.empty()) continue;
    auto load_k = [&](int n) {
      hopper::barrier_wait(barriers.k_empty(k_ring.stage), k_ring.phase ^ 1);
      load_key_tile(p.k_map, barriers.k_full(k_ring.stage), shared_k + k_ring.stage * kKeyBytes, work, n);
      k_ring.advance();
    };
    auto load_v = [&](int n) {
      hopper::barrier_wait(barriers.v_empty(v_ring.stage), v_ring.phase ^ 1);
      load_key_tile(p.v_map, barriers.v_full(v_ring.stage), shared_v + v_ring.stage * kKeyBytes, work, n);
      v_ring.advance();
    };
    load_k(work.last - 1);
    hopper::barrier_wait(barriers.q_empty(), q_phase ^ 1);
    hopper::barrier_expect_bytes(barriers.q_full(), kQueryBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      hopper::load_box(shared_q + panel * kQueryPanel, p.q_map, barriers.q_full(), panel * 64,
                       static_cast<int>(work.sequence.q_row) + work.first_row, work.head,
                       p.fwd.sequences.cu_seqlens_q != nullptr ? 0 : work.batch);
    }
    q_phase ^= 1;
    for (int n = work.last - 1; n > work.first; --n) {
      load_k(n - 1);
      load_v(n);
    }
    load_v(work.first);
  }
}

// S = Q K^T of this warpgroup's 64 rows; not waited for.
__device__ __forceinline__ void multiply_scores(float (&s)[kScores], unsigned q_tile, unsigned k_tile) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const unsigned column = step % 4 * 32;
    ScoreProduct::shared(s, hopper::descriptor_k_major(q_tile + step / 4 * kQueryPanel + column),
                         hopper::descriptor_k_major(k_tile + step / 4 * kKeyPanel + column), step > 0);
  }
  hopper::wgmma_commit();
}

// O += P V; not waited for.
__device__ __forceinline__ void multiply_values(float (&out)[kOutputs], const unsigned (&probabilities)[kBlockN / 16][4],
                                                unsigned v_tile) {
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    OutputProduct::registers(out, probabilities[step],
                             hopper::descriptor_mn_major(v_tile + step * 16 * tile::kRowBytes, kKeyPanel));
  }
  hopper::wgmma_commit();
}

// Zeroes the rows of a V tile that lie after the sequence's last key. The copy engine zeroes only what is outside of the
// tensor; what else is there, perhaps NaN, would survive a probability of 0.
__device__ __forceinline__ void clear_tail(unsigned v_tile, int valid, int group, int thread) {
  const int chunks = (kBlockN - valid) * 8;
  for (int i = thread; i < chunks * kPanels; i += 128) {
    const int panel = i / chunks;
    ptx::store_shared_16(v_tile + panel * kKeyPanel + valid * tile::kRowBytes + (i - panel * chunks) * 16,
                         make_uint4(0, 0, 0, 0));
  }
  hopper::fence_proxy_async();
  hopper::named_sync(1 + group, 128);
}

// Scores to probabilities, in place. Returns by `factor` what the accumulator must be scaled by, and whether any row of
// the warp needs it.
template <bool kMasked>
__device__ __forceinline__ bool softmax(float (&s)[kScores], float (&row_max)[2], float (&row_sum)[2],
                                        float (&factor)[2], float scale_log2) {
  float block_max[2];
  bool grows = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Two chains, so that a maximum does not wait for the one before it.
    float even = fmaxf(s[2 * half], s[2 * half + 1]);
    float odd = fmaxf(s[4 + 2 * half], s[4 + 2 * half + 1]);
#pragma unroll
    for (int j = 2; j < kBlockN / 8; j += 2) {
      even = fmaxf(even, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
      odd = fmaxf(odd, fmaxf(s[4 * j + 4 + 2 * half], s[4 * j + 4 + 2 * half + 1]));
    }
    block_max[half] = fmaxf(even, odd) * scale_log2;
    grows |= block_max[half] > row_max[half] + kSlack;
  }
  const bool any = __any_sync(0xffffffffu, grows);
  if (any) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m = fmaxf(block_max[half], row_max[half]);
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      factor[half] = ptx::exp2(row_max[half] - (kMasked && m == ptx::kMinusInfinity ? 0.0f : m));
      row_max[half] = m;
      row_sum[half] *= factor[half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float base = kMasked && row_max[half] == ptx::kMinusInfinity ? 0.0f : row_max[half];
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      float& low = s[4 * j + 2 * half];
      float& high = s[4 * j + 2 * half + 1];
      low = ptx::exp2(fmaf(low, scale_log2, -base));
      high = ptx::exp2(fmaf(high, scale_log2, -base));
      even += low;
      odd += high;
    }
    row_sum[half] += even + odd;
  }
  return any;
}

__device__ __forceinline__ void apply_mask(float (&s)[kScores], const problem::Mask& mask, int row, int key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int last = mask.last(row + 8 * half) - key;
    const int first = mask.first(row + 8 * half) - key;
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      if (8 * j > last || (kGeneral && 8 * j < first)) s[4 * j + 2 * half] = ptx::kMinusInfinity;
      if (8 * j + 1 > last || (kGeneral && 8 * j + 1 < first)) s[4 * j + 2 * half + 1] = ptx::kMinusInfinity;
    }
  }
}

// Softcap: raw scores become c tanh(scale s / c), in base 2.
__device__ __forceinline__ void cap(float (&s)[kScores], const flash_attn::FwdParams& p) {
  if (p.modifiers.softcap <= 0.0f) return;
  const float in = p.scale / p.modifiers.softcap;
  const float out = p.modifiers.softcap * kLog2e;
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = ptx::tanh(s[i] * in) * out;
}

__device__ __forceinline__ void as_operand(unsigned (&probabilities)[kBlockN / 16][4], const float (&s)[kScores]) {
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      probabilities[step][i] = ptx::pack<kBf16>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
    }
  }
}

__device__ __forceinline__ void rescale(float (&out)[kOutputs], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) out[i] *= factor[i / 2 % 2];
}

__device__ __forceinline__ void consume(const flash_attn::FwdTmaParams& params, const Barriers& barriers,
                                        unsigned shared_q, unsigned shared_k, unsigned shared_v, int rounds) {
  const flash_attn::FwdParams& p = params.fwd;
  const int group = threadIdx.x / 128 - 1;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const unsigned q_tile = shared_q + group * 64 * tile::kRowBytes;
  const unsigned shared_out = kSeparateOutput ? shared_q - kQueryBytes : shared_q;
  Ring k_ring, v_ring;
  int q_phase = 0;
  const int my_row = group * 64 + warp * 16 + lane / 4;
  const float scale_log2 = kGeneral && p.modifiers.softcap > 0.0f ? 1.0f : p.scale_log2;

  for (int round = 0; round < rounds; ++round) {
    const Tile next(params, round);
    if (!next.exists(params)) break;
    const Work work(p, next);
    const int rows = work.sequence.seqlen_q - work.first_row;
    if (rows <= 0) continue;
    float out[kOutputs];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    float row_max[2] = {ptx::kMinusInfinity, ptx::kMinusInfinity};
    float row_sum[2] = {0.0f, 0.0f};
    float factor[2] = {1.0f, 1.0f};

    if (!work.empty()) {
      float s[kScores];
      unsigned probabilities[kBlockN / 16][4];
      const int row = work.first_row + my_row;
      const int key = lane % 4 * 2;
      int n = work.last - 1;

      hopper::barrier_wait(barriers.q_full(), q_phase);
      q_phase ^= 1;
      hopper::barrier_wait(barriers.k_full(k_ring.stage), k_ring.phase);
      hopper::wgmma_fence();
      multiply_scores(s, q_tile, shared_k + k_ring.stage * kKeyBytes);
      hopper::wgmma_wait<0>();
      hopper::hold(s);
      if (lane == 0) hopper::barrier_arrive(barriers.k_empty(k_ring.stage));
      k_ring.advance();
      if constexpr (kGeneral) cap(s, p);
      apply_mask(s, work.mask, row, n * kBlockN + key);
      softmax<true>(s, row_max, row_sum, factor, scale_log2);
      as_operand(probabilities, s);
      const int tail = work.sequence.seqlen_k - n * kBlockN;
      if (tail < kBlockN) {
        hopper::barrier_wait(barriers.v_full(v_ring.stage), v_ring.phase);
        clear_tail(shared_v + v_ring.stage * kKeyBytes, tail, group, thread);
      }
      --n;

      auto step = [&](auto masked) {
        constexpr bool kMasked = decltype(masked)::value;
        hopper::barrier_wait(barriers.k_full(k_ring.stage), k_ring.phase);
          hopper::wgmma_fence();
        multiply_scores(s, q_tile, shared_k + k_ring.stage * kKeyBytes);
        hopper::barrier_wait(barriers.v_full(v_ring.stage), v_ring.phase);
        multiply_values(out, probabilities, shared_v + v_ring.stage * kKeyBytes);
          hopper::wgmma_wait<1>();
        hopper::hold(s);
        if (lane == 0) hopper::barrier_arrive(barriers.k_empty(k_ring.stage));
        k_ring.advance();
        if constexpr (kGeneral) {
          cap(s, p);
          if (n >= work.full_last || n < work.full_first) apply_mask(s, work.mask, row, n * kBlockN + key);
        } else if constexpr (kMasked) {
          apply_mask(s, work.mask, row, n * kBlockN + key);
        }
        const bool grown = softmax<kMasked>(s, row_max, row_sum, factor, scale_log2);
        hopper::wgmma_wait<0>();
        hopper::hold(out);
        if (lane == 0) hopper::barrier_arrive(barriers.v_empty(v_ring.stage));
        v_ring.advance();
        as_operand(probabilities, s);
        if (grown) rescale(out, factor);
      };
      if constexpr (kGeneral) {
        for (; n >= work.first; --n) step(tile::True{});
      } else {
        if constexpr (kCausal) {
          for (; n >= work.full_last; --n) step(tile::True{});
        }
        for (; n >= 0; --n) step(tile::False{});
      }

      if constexpr (kSeparateOutput) {
        if (lane == 0) hopper::barrier_arrive(barriers.q_empty());
      }
      hopper::barrier_wait(barriers.v_full(v_ring.stage), v_ring.phase);
      hopper::wgmma_fence();
      multiply_values(out, probabilities, shared_v + v_ring.stage * kKeyBytes);
      hopper::wgmma_wait<0>();
      hopper::hold(out);
      if (lane == 0) hopper::barrier_arrive(barriers.v_empty(v_ring.stage));
      v_ring.advance();
    }

    // The output goes through shared memory, this warp's rows of it. An empty tile's zeros do not: where Q's memory serves,
    // the producer may be filling it for the next tile.
    const bool staged = kSeparateOutput || !work.empty();
    float sink = ptx::kMinusInfinity;  // one more logit of each row, with no value behind it
    if (kGeneral && p.modifiers.sink != nullptr) sink = p.modifiers.sink[work.head] * kLog2e;
    float* const lse =
        p.lse + work.batch * p.lse_batch_stride + work.head * p.lse_head_stride + work.sequence.q_row + work.first_row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      float scale = 1.0f;
      if constexpr (kGeneral) {
        const float m = fmaxf(row_max[half], sink);
        if (m != ptx::kMinusInfinity) {
          scale = ptx::exp2(row_max[half] - m);
          sum = fmaf(sum, scale, ptx::exp2(sink - m));
        }
        row_max[half] = m;
      }
      const int row = my_row + 8 * half;
      const float inverse = sum == 0.0f ? 0.0f : scale / sum;
      if (lane % 4 == 0 && row < rows) {
        lse[row] = sum == 0.0f ? ptx::kMinusInfinity : (row_max[half] + ptx::log2(sum)) * kLn2;
      }
#pragma unroll
      for (int j = 0; j < kHeadDim / 8 && staged; ++j) {
        ptx::store_shared(shared_out + j / 8 * kQueryPanel + tile::swizzled(row, j % 8) + lane % 4 * 4,
                          ptx::pack<kBf16>(out[4 * j + 2 * half] * inverse, out[4 * j + 2 * half + 1] * inverse));
      }
    }
    __syncwarp();
    // 8 lanes write the 128 bytes of a panel row; a warp four rows at a time.
#pragma unroll
    for (int pass = 0; pass < 4; ++pass) {
      const int row = group * 64 + warp * 16 + pass * 4 + lane / 8;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const int column = panel * 64 + lane % 8 * 8;
        if (row < rows && column < p.head_dim_v && column < kHeadDim) {
          char* const destination = tile::destination(p.out, p.out_stride, work.batch, work.head,
                                                      work.sequence.q_row + work.first_row + row, lane);
          *reinterpret_cast<uint4*>(destination + panel * tile::kRowBytes) =
              staged ? ptx::load_shared_16(shared_out + panel * kQueryPanel + tile::swizzled(row, lane % 8))
                     : make_uint4(0, 0, 0, 0);
        }
      }
    }
    __syncwarp();
    if (!kSeparateOutput && !work.empty()) {
      // The copy engine writes the next Q where ordinary stores have been.
      hopper::fence_proxy_async();
      __syncwarp();
      if (lane == 0) hopper::barrier_arrive(barriers.q_empty());
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flash_fwd(const __grid_constant__ flash_attn::FwdTmaParams p) {
  const unsigned shared_q = ptx::shared_address(shared_memory) + (kSeparateOutput ? kQueryBytes : 0);
  const unsigned shared_k = shared_q + kQueryBytes;
  const unsigned shared_v = shared_k + kStages * kKeyBytes;
  const Barriers barriers{shared_v + kStages * kKeyBytes};
  const int tiles = p.fwd.blocks_m * p.fwd.heads * p.fwd.batch;
  const int rounds = (tiles + gridDim.x - 1) / gridDim.x;
  if (threadIdx.x == 0) {
    hopper::barrier_init(barriers.q_full(), 1);
    hopper::barrier_init(barriers.q_empty(), 4 * kConsumers);
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::barrier_init(barriers.k_full(stage), 1);
      hopper::barrier_init(barriers.v_full(stage), 1);
      hopper::barrier_init(barriers.k_empty(stage), 4 * kConsumers);
      hopper::barrier_init(barriers.v_empty(stage), 4 * kConsumers);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    hopper::give_registers<kConsumers == 3 ? 32 : 24>();
    if (threadIdx.x == 0) {
      hopper::prefetch_map(p.q_map);
      hopper::prefetch_map(p.k_map);
      hopper::prefetch_map(p.v_map);
      produce(p, barriers, shared_q, shared_k, shared_v, rounds);
    }
  } else {
    hopper::take_registers<kConsumers == 3 ? 160 : 240>();
    consume(p, barriers, shared_q, shared_k, shared_v, rounds);
  }
}
