// Attention backward for Hopper (sm_90a): dQ, dK and dV of O = softmax(scale Q K^T) V.
//
// Three kernels of one module, launched in order, as in the sm80 family:
//   flash_bwd_preprocess   delta = rowsum(dO * O), the log-sum-exp in base 2, and zeroed accumulators
//   flash_bwd              a thread block owns FA_BLOCK_N keys of one KV head and walks the queries of its group
//   flash_bwd_postprocess  the fp32 dQ, scaled and rounded to 16 bit
//
// flash_bwd is warp specialised (FlashAttention-3, Shah et al. 2024): one warp of a producer warpgroup fetches K and V
// once, then Q and dO with their row statistics; each consumer warpgroup owns 64 keys. S and dP are computed
// transposed, keys by queries: their accumulators are, as they stand, the A operands of dV += P^T dO and dK += dS^T Q,
// which stay in registers over the whole walk. dS alone goes through shared memory, for dQ = dS K, whose sum over the
// keys crosses thread blocks: it is added to dq_accum in device memory, in the order of the registers, by the copy
// engine. dQ is a step behind, so that consumers do not wait for each other's dS, and leaves while the next step's
// scores are under way.
//
// Where it pays (flash_attn::bwd_is_persistent), a thread block goes from key block to key block, so that the next one's K and
// V, Q and dO come while dK and dV leave.
//
// Full and causal masks: windows, chunks, softcap, sinks, ALiBi and dropout are the sm80 family's.
#include "common/hopper.cuh"
#include "common/problem.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"
#include "sm90/bwd_tiles.cuh"
#include "sm90/bwd_walk.cuh"
#include "sm90/bwd_work.cuh"

namespace {

using namespace bwd;
using problem::kCausal;

// As far as registers allow: dV is begun before dS is computed; lse is read before S is begun; delta of so many times 16
// queries is read before dP is there.
constexpr bool kEarlyValues = FA_EARLY_VALUES;
constexpr bool kEarlyLse = FA_EARLY_LSE;
constexpr int kEarlyDelta = FA_EARLY_DELTA;

// dQ leaves through so many buffers. With two of them it does so a step after it was staged, when no store is waited for.
constexpr int kDqBuffers = FA_DQ_BUFFERS;
static_assert(kDqBuffers == 1 || kDqBuffers == 2);

constexpr bool kPersistent = flash_attn::bwd_is_persistent(kHeadDim);
static_assert(!kPersistent || kDqBuffers == 2, "dK and dV leave through one of dQ's buffers");

constexpr int kGradients = kHeadDim / 2;

constexpr int kScoreBytes = kBlockN / 64 * kQueryPanel;
constexpr int kDqTile = kConsumers * kDqBytes;
constexpr int kStagedBytes = kDqBuffers * kDqTile;  // dQ on its way
constexpr int kRowStatBytes = kBlockM * 4;
constexpr int kBarrierBytes = 128;
static_assert(2 * kKeyBytes + kStages * (2 * kQueryBytes + 2 * kRowStatBytes + kScoreBytes) + kStagedBytes +
                      kBarrierBytes ==
                  FA_SMEM_BYTES,
              "kernels.toml: smem of bwd");

using GradientProduct = hopper::Wgmma<kBf16, kHeadDim>;
using DqProduct = hopper::Wgmma<kBf16, kDqWidth>;

extern __shared__ __align__(1024) char shared_memory[];

struct Shared {
  unsigned k, v, q, dout, ds, staged, lse, delta, barriers;

  __device__ __forceinline__ explicit Shared(unsigned base) {
    k = base;
    v = k + kKeyBytes;
    q = v + kKeyBytes;
    dout = q + kStages * kQueryBytes;
    ds = dout + kStages * kQueryBytes;
    staged = ds + kStages * kScoreBytes;
    lse = staged + kStagedBytes;
    delta = lse + kStages * kRowStatBytes;
    barriers = delta + kStages * kRowStatBytes;
  }

  // Barriers: K and V have arrived; a step's Q, dO and row statistics have; they may be overwritten; all consumers have
  // stored its dS, and have finished with that of the step before.
  __device__ __forceinline__ unsigned keys_full() const { return barriers; }
  __device__ __forceinline__ unsigned full(int stage) const { return barriers + 8 + 8 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return barriers + 24 + 8 * stage; }
  __device__ __forceinline__ unsigned ds_full(int stage) const { return barriers + 40 + 8 * stage; }
  // Persistent: K and V may be overwritten, as may the number of their key block, negative where there is none any more, and
  // the head of the one before it, negative where that was the first.
  __device__ __forceinline__ unsigned keys_empty() const { return barriers + 56; }
  __device__ __forceinline__ unsigned number() const { return barriers + 64; }
  __device__ __forceinline__ unsigned head_before() const { return barriers + 68; }
};

constexpr int kConsumersBarrier = 1;  // a named one; 0 is __syncthreads

// A step of a walk.
__device__ __forceinline__ void load_queries(const flash_attn::BwdTmaParams& params, const Shared& shared, const Work& work,
                                             const Position& at, int step) {
  const flash_attn::BwdParams& p = params.bwd;
  const int batch = p.sequences.cu_seqlens_q != nullptr ? 0 : work.batch;
  const int stage = step % kStages;
  const unsigned full = shared.full(stage);
  const int row = static_cast<int>(work.sequence.q_row) + at.m * kBlockM;
  // Row statistics are padded to whole blocks.
  const long long statistics = static_cast<long long>(at.tile) * kBlockM;
  hopper::barrier_wait(shared.empty(stage), parity(step) ^ 1);
  hopper::barrier_expect_bytes(full, 2 * (kQueryBytes + kRowStatBytes));
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    const unsigned place = stage * kQueryBytes + panel * kQueryPanel;
    hopper::load_box(shared.q + place, params.q_map, full, panel * 64, row, at.head, batch);
    hopper::load_box(shared.dout + place, params.dout_map, full, panel * 64, row, at.head, batch);
  }
  hopper::load_bytes(shared.lse + stage * kRowStatBytes, p.lse_log2 + statistics, kRowStatBytes, full);
  hopper::load_bytes(shared.delta + stage * kRowStatBytes, p.delta + statistics, kRowStatBytes, full);
}

__device__ __forceinline__ void produce(const flash_attn::BwdTmaParams& params, const Shared& shared,
                                        const Work& work) {
  const flash_attn::BwdParams& p = params.bwd;
  Position at(p, work);
  if (work.steps > 0) load_keys(params, shared.k, shared.v, shared.keys_full(), work);
  begin();
  hopper::fence_proxy_async_global();  // preprocess wrote row statistics by ordinary stores
  for (int step = 0; step < work.steps; ++step) {
    load_queries(params, shared, work, at, step);
    at.advance(p, work);
  }
}

// One key block after another: the first is the thread block's own, the next one is taken from a counter when one begins,
// if there are more of them than thread blocks.
__device__ __forceinline__ void produce_all(const flash_attn::BwdTmaParams& params, const Shared& shared) {
  const flash_attn::BwdParams& p = params.bwd;
  const int blocks = p.batch * p.heads_kv * p.blocks_n;
  int keys = 0, step = 0;  // how many key blocks, and steps of their walks, were before
  int head_before = -1;
  int next = blockIdx.x;
  const auto describe = [&](int number) {
    hopper::barrier_wait(shared.keys_empty(), keys & 1 ^ 1);
    ptx::store_shared(shared.number(), static_cast<unsigned>(number));
    ptx::store_shared(shared.head_before(), static_cast<unsigned>(head_before));
  };
#pragma unroll 1
  while (next < blocks) {
    const Work work = Work::of(p, next);
    const int head_index = work.batch * p.heads_kv + work.head_kv;
    if (work.keys > 0) {
      describe(next);
      head_before = head_index;
      ++keys;
      if (work.steps > 0) {
        load_keys(params, shared.k, shared.v, shared.keys_full(), work);
      } else {
        hopper::barrier_arrive(shared.keys_full());
      }
    } else {
      count_finished(p, head_index, kFinished);
    }
    ptx::wait_on_dependencies();
    hopper::fence_proxy_async_global();  // as above
    next = gridDim.x;
    if (next < blocks) next += atomicAdd(p.next_block, 1);
    if (work.keys <= 0) continue;
    Position at(p, work);
#pragma unroll 1
    for (int i = 0; i < work.steps; ++i, ++step) {
      load_queries(params, shared, work, at, step);
      at.advance(p, work);
      // Postprocess may begin, too. Not before the first loads, as the number takes its time.
      if (i > 0 && next >= blocks) ptx::launch_dependents();
    }
  }
  describe(-1);
  hopper::barrier_arrive(shared.keys_full());
}

// d += A B over kBlockM queries: A is keys by queries, in registers, B a query tile. Not waited for.
__device__ __forceinline__ void multiply_registers(float (&d)[kGradients], const unsigned (&a)[kBlockM / 16][4],
                                                   unsigned query_tile) {
  const unsigned long long b = hopper::descriptor_mn_major(query_tile, kQueryPanel);
#pragma unroll
  for (int step = 0; step < kBlockM / 16; ++step) {
    GradientProduct::registers(d, a[step], hopper::descriptor_after(b, step * 16 * tile::kRowBytes));
  }
  hopper::wgmma_commit();
}

// This consumer's part of dQ = dS K, or its transpose. Not waited for.
__device__ __forceinline__ void multiply_dq(float (&dq)[kDqWidth / 2], unsigned ds_tile, unsigned k_tile, int group) {
  constexpr int kRows = kDqTransposed ? 0 : 64;  // and columns of each consumer
  constexpr int kColumnPanels = kDqTransposed ? 1 : 0;
  const unsigned long long ds = hopper::descriptor_k_major(ds_tile + group * kRows * tile::kRowBytes);
  const unsigned long long k = hopper::descriptor_mn_major(here(k_tile + group * kColumnPanels * kKeyPanel), kKeyPanel);
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    const unsigned long long ds_step = hopper::descriptor_after(ds, step / 4 * kQueryPanel + step % 4 * 32);
    const unsigned long long k_step = hopper::descriptor_after(k, step * 16 * tile::kRowBytes);
    if constexpr (kDqTransposed) {
      DqProduct::template shared<1, 0>(dq, k_step, ds_step, step > 0);
    } else {
      DqProduct::template shared<0, 1>(dq, ds_step, k_step, step > 0);
    }
  }
  hopper::wgmma_commit();
}

// One lane of a consumer warp: all that the warp adds to a head's dQ for a key block is there, but for its last kPending sums.
template <int kPending>
__device__ __forceinline__ void finish(const flash_attn::BwdParams& p, int head_index) {
  hopper::wait_for_sums<kPending>();
  count_finished(p, head_index, 1);
}

// A consumer's part of a key block, before which were `first_step` steps of others.
__device__ __forceinline__ int consume(const flash_attn::BwdParams& p, const Shared& shared, Work work, unsigned thread,
                                        int first_step) {
  if constexpr (kPersistent) {
    work.make_uniform();
    first_step = ptx::uniform(first_step);
  }
  const int group = ptx::uniform(thread / 128) - 1;
  const int lane = thread % 32;
  const int warp = thread / 32 % 4;
  const int first_key = group * 64 + warp * 16;  // of this warp's 16
  const unsigned k_rows = shared.k + group * 64 * tile::kRowBytes;
  const unsigned v_rows = shared.v + group * 64 * tile::kRowBytes;
  const int dq_piece = (group * 4 + warp) * (kDqBytes / 4);  // bytes of a dQ tile before this warp's
  // stmatrix: lanes 8 i to 8 i + 7 give the rows, queries, of matrix i; its columns are keys.
  const unsigned score_place =
      group * kQueryPanel +
      tile::swizzled(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
  const auto store_scores = [&](unsigned score_tile, const unsigned (&a)[kBlockM / 16][4]) {
#pragma unroll
    for (int j = 0; j < kBlockM / 16; ++j) {
      ptx::stmatrix_x4_trans(score_tile + score_place + j * 16 * tile::kRowBytes, a[j]);
    }
  };

  // Query blocks below masked_m have scores to hide: of this thread's keys, those of queries before first_query,
  // counted from the thread's first query of block 0.
  int masked_m = 0, first_query[2];
  if (kCausal) masked_m = (work.first_key + kBlockN - 1 - work.mask.shift + kBlockM - 1) / kBlockM;
  if (work.keys < kBlockN) masked_m = work.last_m;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = first_key + lane / 4 + 8 * half;
    first_query[half] = key < work.keys ? work.mask.first_query(work.first_key + key) - lane % 4 * 2
                                        : flash_attn::kUnlimited;
  }

  float dk[kGradients], dv[kGradients];
#pragma unroll
  for (int i = 0; i < kGradients; ++i) dk[i] = dv[i] = 0.0f;
  float s[kScores], ds[kScores];  // of a step: S^T, then P^T; dP^T, then dS^T
  float4 lse[kBlockM / 16], delta[kBlockM / 16];

  Position next(p, work);    // of S and dP
  if constexpr (kPersistent) {
    next.head = ptx::uniform(next.head);
    next.tile = ptx::uniform(next.tile);
  }
  int tile_now = next.tile;  // of dV and dK
  int tile_before = next.tile;  // of dQ, a step behind
  int tile_dq = next.tile;      // of dQ that leaves: with two buffers two steps behind

  // Row statistics of step `i`, of 16 queries each.
  auto load = [&](float4 (&to)[kBlockM / 16], unsigned from, int i, int first, int last) {
    const unsigned statistics = i % kStages * kRowStatBytes + lane % 4 * 16;
#pragma unroll
    for (int j = 0; j < kBlockM / 16; ++j) {
      if (j >= first && j < last) to[j] = ptx::load_shared_float4(from + statistics + j * 64);
    }
  };

  // Begins S^T = K Q^T and dP^T = V dO^T of step `i`.
  auto begin_scores = [&](int i) {
    const int stage = i % kStages;
    const unsigned q_tile = shared.q + stage * kQueryBytes;
    const unsigned dout_tile = shared.dout + stage * kQueryBytes;
    hopper::barrier_wait(shared.full(stage), parity(i));
    const int queries = work.sequence.seqlen_q - next.m * kBlockM;
    if (queries < kBlockM) {
      clear_tail<kBlockM>(q_tile, queries, threadIdx.x - 128, 128 * kConsumers);
      clear_tail<kBlockM>(dout_tile, queries, threadIdx.x - 128, 128 * kConsumers);
      hopper::fence_proxy_async();
      hopper::named_sync(kConsumersBarrier, 128 * kConsumers);
    }
    if constexpr (kEarlyLse) load(lse, shared.lse, i, 0, kBlockM / 16);
    hopper::wgmma_fence();
    multiply_transposed(s, k_rows, q_tile);
    multiply_transposed(ds, v_rows, dout_tile);
  };

  // P of step `i`; waits for its dP.
  auto finish_scores = [&](int i) {
    if constexpr (!kEarlyLse) load(lse, shared.lse, i, 0, kBlockM / 16);
    hopper::wgmma_wait<1>();
    hopper::hold(s);
    if (next.m < masked_m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = first_query[half] - next.m * kBlockM;
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j) {
          if (8 * j < first) s[4 * j + 2 * half] = ptx::kMinusInfinity;
          if (8 * j + 1 < first) s[4 * j + 2 * half + 1] = ptx::kMinusInfinity;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      const float even = j % 2 == 0 ? lse[j / 2].x : lse[j / 2].z;
      const float odd = j % 2 == 0 ? lse[j / 2].y : lse[j / 2].w;
      s[4 * j] = ptx::exp2(fmaf(s[4 * j], p.scale_log2, -even));
      s[4 * j + 1] = ptx::exp2(fmaf(s[4 * j + 1], p.scale_log2, -odd));
      s[4 * j + 2] = ptx::exp2(fmaf(s[4 * j + 2], p.scale_log2, -even));
      s[4 * j + 3] = ptx::exp2(fmaf(s[4 * j + 3], p.scale_log2, -odd));
    }
    load(delta, shared.delta, i, 0, kEarlyDelta);
    hopper::wgmma_wait<0>();
    hopper::hold(ds);
    next.advance(p, work);
  };

  // dQ leaves through shared memory; each warp adds its own piece to device memory.
  auto stage_dq = [&](const float (&dq)[kDqWidth / 2], unsigned place) {
    if (lane == 0) hopper::wait_for_reads<kDqBuffers == 2>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kDqWidth / 8; ++i) {
      ptx::store_shared_16(place + dq_piece + (i * 32 + lane) * 16,
                           make_uint4(__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                                      __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])));
    }
  };
  // One lane of each warp lets the key blocks add to a dQ tile in the order of their index. All that come before this
  // one have a lower block index. Blocks start in the order of their index, as every lock between thread blocks
  // assumes, so they are running or done: the wait ends.
  auto await_turn = [&]() {
    const int* const semaphore = p.dq_semaphore + tile_dq;
    while (ptx::load_acquire(semaphore) < work.block_n * (4 * kConsumers)) {
    }
  };
  auto pass_turn = [&]() { ptx::add_release(p.dq_semaphore + tile_dq, 1); };
  auto accumulator = [&]() {
    return p.dq_accum + static_cast<long long>(tile_dq) * (kBlockM * kHeadDim) + dq_piece / 4;
  };
  auto add_staged_dq = [&](unsigned place) {
    if (p.deterministic) {
      await_turn();
      hopper::fence_proxy_async_global();  // the sums are added by the copy engine, as those before were
    }
    hopper::add_floats(accumulator(), place + dq_piece, kDqBytes / 4);
    if (p.deterministic) {
      hopper::wait_for_sums<0>();
      pass_turn();
    }
  };
  // dP of step `i` becomes dS.
  auto finish_gradients = [&](int i) {
    load(delta, shared.delta, i, kEarlyDelta, kBlockM / 16);
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      const float even = j % 2 == 0 ? delta[j / 2].x : delta[j / 2].z;
      const float odd = j % 2 == 0 ? delta[j / 2].y : delta[j / 2].w;
      ds[4 * j] = (ds[4 * j] - even) * s[4 * j];
      ds[4 * j + 1] = (ds[4 * j + 1] - odd) * s[4 * j + 1];
      ds[4 * j + 2] = (ds[4 * j + 2] - even) * s[4 * j + 2];
      ds[4 * j + 3] = (ds[4 * j + 3] - odd) * s[4 * j + 3];
    }
  };

  // From P and dP of step `i` to its part of dV and dK, to dQ of the step before, and to P and dP of the next step.
  auto step = [&](int i, auto more) {
    const int stage = i % kStages;
    const unsigned q_tile = shared.q + stage * kQueryBytes;
    const unsigned dout_tile = shared.dout + stage * kQueryBytes;
    unsigned p_operand[kBlockM / 16][4], ds_operand[kBlockM / 16][4];
    if constexpr (kEarlyValues) {
      as_operand(p_operand, s);
      hopper::wgmma_fence();
      multiply_registers(dv, p_operand, dout_tile);
    }
    finish_gradients(i);
    as_operand(ds_operand, ds);
    if constexpr (!kEarlyValues) {
      as_operand(p_operand, s);
      hopper::wgmma_fence();
      multiply_registers(dv, p_operand, dout_tile);
    }
    // Past this barrier, the other stage of dS is complete and this one has been read. In the first step, the product
    // multiplies what happens to be there, for nothing.
    if (i > first_step) hopper::barrier_wait(shared.ds_full(stage ^ 1), parity(i - 1));
    store_scores(shared.ds + stage * kScoreBytes, ds_operand);
    float dq[kDqWidth / 2];
    hopper::wgmma_fence();
    multiply_dq(dq, shared.ds + (stage ^ 1) * kScoreBytes, shared.k, group);
    multiply_registers(dk, ds_operand, q_tile);
    hopper::wgmma_wait<1>();
    hopper::hold(dq);
    // Only where the stores are not waited for: all see dS, and staged dQ leaves. The stage, too, is given back after this
    // fence: the copy engine overwrites row statistics that were read by ordinary loads.
    const auto leave = [&](bool staged, unsigned place) {
      hopper::fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        if constexpr (kDqBuffers == 1) hopper::barrier_arrive(shared.empty(stage));
        hopper::barrier_arrive(shared.ds_full(stage));
        if (staged) add_staged_dq(place);
      }
    };
    if constexpr (kDqBuffers == 2) {
      leave(i > first_step + 1, shared.staged + (stage ^ 1) * kDqTile);
      tile_dq = tile_before;
      tile_before = tile_now;
      stage_dq(dq, shared.staged + stage * kDqTile);
    } else {
      stage_dq(dq, shared.staged);
    }
    hopper::wgmma_wait<0>();
    if (kDqBuffers == 2 && lane == 0) hopper::barrier_arrive(shared.empty(stage));
    if constexpr (decltype(more)::value) begin_scores(i + 1);
    if constexpr (kDqBuffers == 1) {
      leave(i > first_step, shared.staged);
      tile_dq = tile_now;
    }
    tile_now = next.tile;
    if constexpr (decltype(more)::value) finish_scores(i + 1);
  };

  if (work.steps > 0) {
    if constexpr (!kPersistent) hopper::barrier_wait(shared.keys_full(), 0);
    if (work.keys < kBlockN) {
      clear_tail<kBlockN>(shared.k, work.keys, threadIdx.x - 128, 128 * kConsumers);
      clear_tail<kBlockN>(shared.v, work.keys, threadIdx.x - 128, 128 * kConsumers);
      hopper::fence_proxy_async();
      hopper::named_sync(kConsumersBarrier, 128 * kConsumers);
    }
    begin_scores(first_step);
    finish_scores(first_step);
    const int last = first_step + work.steps - 1;
    for (int i = first_step; i < last; ++i) step(i, tile::True{});
    step(last, tile::False{});
    hopper::barrier_wait(shared.ds_full(last % kStages), parity(last));
    float dq[kDqWidth / 2];
    hopper::wgmma_fence();
    multiply_dq(dq, shared.ds + last % kStages * kScoreBytes, shared.k, group);
    unsigned place = shared.staged;
    if constexpr (kDqBuffers == 2) {
      hopper::fence_proxy_async();
      __syncwarp();
      if (lane == 0 && last > first_step) add_staged_dq(shared.staged + last % 2 * kDqTile);
      tile_dq = tile_before;
      place += (last + 1) % 2 * kDqTile;
    }
    hopper::wgmma_wait<0>();
    hopper::hold(dq);
    stage_dq(dq, place);
    hopper::fence_proxy_async();
    __syncwarp();
    if (lane == 0) add_staged_dq(place);
  }
  hopper::hold(dk);
  hopper::hold(dv);

  const int end_step = first_step + work.steps;
  // What is computed again is not kept in registers over the walk.
  if constexpr (kPersistent) {
    unsigned same_thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(same_thread));
    const int same_lane = same_thread % 32;
    int number = 0, head_before = 0;  // by the one lane that says when they have been read
    if (same_lane == 0) {
      number = ptx::load_shared_int(shared.number());
      head_before = ptx::load_shared_int(shared.head_before());
    }
    const Work same = Work::of(p, ptx::uniform(number));
    const int same_warp = same_thread / 32 - 4;
    if (same_lane == 0) {
      hopper::barrier_arrive(shared.keys_empty());
      if (head_before >= 0) {
        // What the last key block added is there by now, if this one added something since.
        if (same.steps > 1) {
          finish<2>(p, head_before);
        } else {
          finish<0>(p, head_before);
        }
      }
      hopper::wait_for_reads<1>();
    }
    __syncwarp();
    // dK and dV leave through the buffer that dQ did not leave through just now.
    constexpr int kPiecePanel = 16 * tile::kRowBytes;
    static_assert(kPanels * kPiecePanel <= kDqBytes / 4);
    const unsigned piece = shared.staged + (end_step + 1) % 2 * kDqTile + same_warp * (kDqBytes / 4);
    store_keys<kPiecePanel>(dk, p.scale, piece, p.dk, p.dk_stride, same, p.head_dim, same_warp * 16, same_lane);
    __syncwarp();
    store_keys<kPiecePanel>(dv, 1.0f, piece, p.dv, p.dv_stride, same, p.head_dim_v, same_warp * 16, same_lane);
    if (same_lane == 0) hopper::wait_for_reads<0>();  // the next walk begins with the other buffer
  } else {
    // dK and dV take the place of K and V, which no product reads any more.
    hopper::named_sync(kConsumersBarrier, 128 * kConsumers);
    unsigned same_block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(same_block));
    const Work same = Work::of(p, static_cast<int>(same_block));
    const unsigned rows = first_key * tile::kRowBytes;
    store_keys<kKeyPanel>(dk, p.scale, shared.k + rows, p.dk, p.dk_stride, same, p.head_dim, first_key, lane);
    store_keys<kKeyPanel>(dv, 1.0f, shared.v + rows, p.dv, p.dv_stride, same, p.head_dim_v, first_key, lane);
    __syncwarp();
    if (lane == 0) finish<0>(p, same.batch * p.heads_kv + same.head_kv);
  }
  return end_step;
}

// Every key block that the producer has taken.
__device__ __forceinline__ void consume_all(const flash_attn::BwdParams& p, const Shared& shared) {
  unsigned thread;  // kept, not read again all the time
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  int step = 0;
  for (int keys = 0;; ++keys) {
    hopper::barrier_wait(shared.keys_full(), keys & 1);
    const int number = ptx::uniform(ptx::load_shared_int(shared.number()));
    if (number < 0) break;
    step = consume(p, shared, Work::of(p, number), thread, step);
  }
  const int head_before = ptx::load_shared_int(shared.head_before());
  __syncwarp();
  if (thread % 32 == 0 && head_before >= 0) finish<0>(p, head_before);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_bwd_preprocess(const __grid_constant__ flash_attn::BwdParams p) {
  preprocess(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flash_bwd(const __grid_constant__ flash_attn::BwdTmaParams p) {
  const Work work = Work::of(p.bwd, blockIdx.x);
  if (!kPersistent && work.keys <= 0) {
    if (threadIdx.x == 0) {
      begin();
      count_finished(p.bwd, work.batch * p.bwd.heads_kv + work.head_kv, kFinished);
    }
    return;
  }
  const Shared shared(ptx::shared_address(shared_memory));
  if (threadIdx.x == 0) {
    hopper::barrier_init(shared.keys_full(), 1);
    if (kPersistent) hopper::barrier_init(shared.keys_empty(), 4 * kConsumers);
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::barrier_init(shared.full(stage), 1);
      hopper::barrier_init(shared.empty(stage), 4 * kConsumers);
      hopper::barrier_init(shared.ds_full(stage), 4 * kConsumers);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    hopper::give_registers<kConsumers == 3 ? 32 : 24>();
    if (threadIdx.x == 0) {
      if constexpr (kPersistent) {
        produce_all(p, shared);
      } else {
        produce(p, shared, work);
      }
    }
  } else {
    hopper::take_registers<kConsumers == 3 ? 160 : 240>();
    if constexpr (kPersistent) {
      consume_all(p.bwd, shared);
    } else {
      consume(p.bwd, shared, work, threadIdx.x, 0);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_bwd_postprocess(const __grid_constant__ flash_attn::BwdParams p) {
  postprocess(p);
}
