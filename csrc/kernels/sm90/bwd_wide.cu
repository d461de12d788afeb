// Attention backward for Hopper (sm_90a) as in bwd.cu, where dK and dV of 64 keys do not fit into one warpgroup's registers.
//
// A thread block owns 64 keys. Each of its three consumer warpgroups has products of its own:
//   values   S and dV; S and dP are computed transposed, as in bwd.cu, so that P is the A operand of dV += P^T dO
//   keys     dP and dK, for whose dK += dS^T Q the same holds of dS
//   queries  dQ = dS K, which it adds to dq_accum in device memory, straight from its registers
// Through shared memory, P goes from values to keys, thread by thread in fp32, and dS from keys to queries, as a tile.
// Values and keys wait for each of their products before they go on, as there are no registers to do otherwise: the
// others' products keep the tensor cores busy. What is added to dQ takes its time at L2, and holds up nobody but queries.
//
// Full and causal masks, as bwd.cu.
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

// Warpgroups, and registers of their threads; the first one is the producer's.
constexpr int kValues = 1;
constexpr int kQueries = 3;
constexpr int kProducerRegisters = 24;
constexpr int kValuesRegisters = 192;
constexpr int kKeysRegisters = 200;
constexpr int kQueriesRegisters = 96;
static_assert(kProducerRegisters + kValuesRegisters + kKeysRegisters + kQueriesRegisters == 65536 / 128);

constexpr int kGradients = kHeadDim / 2;
constexpr int kDqColumns = 64;  // of dQ at a time
constexpr int kDqSlices = kHeadDim / kDqColumns;

constexpr int kScoreBytes = kQueryPanel;  // of dS: queries by keys
constexpr int kProbabilityBytes = kBlockM * kBlockN * 4;
constexpr int kRowStatBytes = kBlockM * 4;
constexpr int kBarrierBytes = 128;
static_assert(kWide && kConsumers == 3 && kBlockN == 64);
static_assert(2 * kKeyBytes + kStages * (2 * kQueryBytes + 2 * kRowStatBytes + kScoreBytes) + kProbabilityBytes +
                      kBarrierBytes ==
                  FA_SMEM_BYTES,
              "kernels.toml: smem of bwd");

using GradientProduct = hopper::Wgmma<kBf16, kHeadDim / 2>;
using DqProduct = hopper::Wgmma<kBf16, kDqColumns>;

extern __shared__ __align__(1024) char shared_memory[];

struct Shared {
  unsigned k, v, q, dout, ds, probabilities, lse, delta, barriers;

  __device__ __forceinline__ explicit Shared(unsigned base) {
    k = base;
    v = k + kKeyBytes;
    q = v + kKeyBytes;
    dout = q + kStages * kQueryBytes;
    ds = dout + kStages * kQueryBytes;
    probabilities = ds + kStages * kScoreBytes;
    lse = probabilities + kProbabilityBytes;
    delta = lse + kStages * kRowStatBytes;
    barriers = delta + kStages * kRowStatBytes;
  }

  // Barriers. Full: K and V, P, or a stage of Q and lse, of dO and delta or of dS are there. Empty: they may be
  // overwritten. Q and lse are given back by keys alone: values has read them before it handed over P.
  __device__ __forceinline__ unsigned keys_full() const { return barriers; }
  __device__ __forceinline__ unsigned p_full() const { return barriers + 8; }
  __device__ __forceinline__ unsigned p_empty() const { return barriers + 16; }
  __device__ __forceinline__ unsigned q_full(int stage) const { return barriers + 24 + 8 * stage; }
  __device__ __forceinline__ unsigned q_empty(int stage) const { return barriers + 40 + 8 * stage; }
  __device__ __forceinline__ unsigned dout_full(int stage) const { return barriers + 56 + 8 * stage; }
  __device__ __forceinline__ unsigned dout_empty(int stage) const { return barriers + 72 + 8 * stage; }
  __device__ __forceinline__ unsigned ds_full(int stage) const { return barriers + 88 + 8 * stage; }
  __device__ __forceinline__ unsigned ds_empty(int stage) const { return barriers + 104 + 8 * stage; }

  __device__ __forceinline__ void init_barriers() const {
    hopper::barrier_init(keys_full(), 1);
    // Every thread for itself: P is written and read by ordinary accesses, and racecheck does not see a __syncwarp behind
    // which a lane speaks for its warp, as that is no instruction where a warp is known to be converged.
    hopper::barrier_init(p_full(), 128);
    hopper::barrier_init(p_empty(), 128);
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::barrier_init(q_full(stage), 1);
      hopper::barrier_init(q_empty(stage), 4);
      hopper::barrier_init(dout_full(stage), 1);
      hopper::barrier_init(dout_empty(stage), 8);
      hopper::barrier_init(ds_full(stage), 4);
      hopper::barrier_init(ds_empty(stage), 4);
    }
    hopper::fence_barrier_init();
  }
};

// Named barriers; 0 is __syncthreads.
constexpr int kConsumersBarrier = 1;
constexpr int kTailBarrier = 2;  // of values and keys

// Fetches Q with the log-sum-exps or dO with the deltas, each by a thread of its own, as they are given back at different
// times; before Q, K and V.
__device__ __forceinline__ void produce(const flash_attn::BwdTmaParams& params, const Shared& shared, const Work& work,
                                        bool q) {
  const flash_attn::BwdParams& p = params.bwd;
  const int batch_q = p.sequences.cu_seqlens_q != nullptr ? 0 : work.batch;
  Position at(p, work);
  if (q && work.steps > 0) load_keys(params, shared.k, shared.v, shared.keys_full(), work);
  begin();
  hopper::fence_proxy_async_global();  // preprocess wrote row statistics by ordinary stores
  for (int step = 0; step < work.steps; ++step) {
    const int stage = step % kStages;
    const unsigned full = q ? shared.q_full(stage) : shared.dout_full(stage);
    const int row = static_cast<int>(work.sequence.q_row) + at.m * kBlockM;
    // Row statistics are padded to whole blocks.
    const long long statistics = static_cast<long long>(at.tile) * kBlockM;
    hopper::barrier_wait(q ? shared.q_empty(stage) : shared.dout_empty(stage), parity(step) ^ 1);
    hopper::barrier_expect_bytes(full, kQueryBytes + kRowStatBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      hopper::load_box((q ? shared.q : shared.dout) + stage * kQueryBytes + panel * kQueryPanel,
                       q ? params.q_map : params.dout_map, full, panel * 64, row, at.head, batch_q);
    }
    hopper::load_bytes((q ? shared.lse : shared.delta) + stage * kRowStatBytes, (q ? p.lse_log2 : p.delta) + statistics,
                       kRowStatBytes, full);
    at.advance(p, work);
  }
}

// dK or dV, whose columns are in two halves: no instruction may have more registers than a thread has at launch.
using Gradient = float[2][kGradients / 2];

__device__ __forceinline__ void clear(Gradient& d) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kGradients / 2; ++i) d[half][i] = 0.0f;
  }
}

// d += A B over kBlockM queries: A is keys by queries, in registers, B a query tile. Waits for it.
__device__ __forceinline__ void multiply_registers(Gradient& d, const unsigned (&a)[kBlockM / 16][4],
                                                   unsigned query_tile) {
  const unsigned long long b = hopper::descriptor_mn_major(query_tile, kQueryPanel);
  hopper::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kBlockM / 16; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned place = half * (kPanels / 2 * kQueryPanel) + step * 16 * tile::kRowBytes;
      GradientProduct::registers(d[half], a[step], hopper::descriptor_after(b, place));
    }
  }
  hopper::wgmma_commit();
  hopper::wgmma_wait<0>();
  hopper::hold(d[0]);
  hopper::hold(d[1]);
}

// A slice of dQ = dS K. Not waited for.
__device__ __forceinline__ void multiply_dq(float (&dq)[kDqColumns / 2], unsigned ds_tile, unsigned k_tile, int slice) {
  static_assert(kDqColumns == 64, "a panel");
  const unsigned long long ds = hopper::descriptor_k_major(ds_tile);
  const unsigned long long k = hopper::descriptor_mn_major(here(k_tile + slice * kKeyPanel), kKeyPanel);
  hopper::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    DqProduct::template shared<0, 1>(dq, hopper::descriptor_after(ds, step * 32),
                                     hopper::descriptor_after(k, step * 16 * tile::kRowBytes), step > 0);
  }
  hopper::wgmma_commit();
}

// Consumers: K and V are there.
__device__ __forceinline__ void await_keys(const Shared& shared, const Work& work) {
  hopper::barrier_wait(shared.keys_full(), 0);
  if (work.keys < kBlockN) {
    clear_tail<kBlockN>(shared.k, work.keys, threadIdx.x - 128, 128 * kConsumers);
    clear_tail<kBlockN>(shared.v, work.keys, threadIdx.x - 128, 128 * kConsumers);
    hopper::fence_proxy_async();
    hopper::named_sync(kConsumersBarrier, 128 * kConsumers);
  }
}

// Values, of a step's Q, and keys, of its dO: the tile is there. Each clears the rows of its own past `queries`, and they
// wait for each other: both need both.
__device__ __forceinline__ void await_queries(unsigned full, int parity, unsigned query_tile, int queries) {
  hopper::barrier_wait(full, parity);
  if (queries < kBlockM) {
    clear_tail<kBlockM>(query_tile, queries, threadIdx.x % 128, 128);
    hopper::fence_proxy_async();
    hopper::named_sync(kTailBarrier, 256);
  }
}

// The thread block's work, computed again: what it takes is not kept in registers over the walk.
__device__ __forceinline__ Work work_again(const flash_attn::BwdParams& p) {
  unsigned block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return Work::of(p, static_cast<int>(block));
}

// dK and dV take the place of K and V, once no product reads those any more.
__device__ __forceinline__ void store_gradient(const flash_attn::BwdParams& p, Gradient& d, float factor,
                                               unsigned key_tile, void* tensor, const flash_attn::Strides& stride,
                                               int columns) {
  hopper::hold(d[0]);
  hopper::hold(d[1]);
  hopper::named_sync(kConsumersBarrier, 128 * kConsumers);
  const int first_key = threadIdx.x / 32 % 4 * 16;  // of this warp's 16
  store_keys<kKeyPanel>(reinterpret_cast<float (&)[kGradients]>(d), factor, key_tile + first_key * tile::kRowBytes, tensor,
                        stride, work_again(p), columns, first_key, threadIdx.x % 32);
}

__device__ __forceinline__ void compute_values(const flash_attn::BwdParams& p, const Shared& shared, const Work& work) {
  const int lane = threadIdx.x % 32;
  const unsigned p_place = shared.probabilities + threadIdx.x % 128 * 16;
  // Query blocks below masked_m have scores to hide.
  int masked_m = 0;
  if (kCausal) masked_m = (work.first_key + kBlockN - 1 - work.mask.shift + kBlockM - 1) / kBlockM;
  if (work.keys < kBlockN) masked_m = work.last_m;

  Gradient dv;
  clear(dv);
  float s[kScores];  // S^T, then P^T
  int m = work.first_m;

  // S^T = K Q^T of step `i`.
  const auto compute_scores = [&](int i) {
    const int stage = i % kStages;
    const unsigned q_tile = shared.q + stage * kQueryBytes;
    await_queries(shared.q_full(stage), parity(i), q_tile, work.sequence.seqlen_q - m * kBlockM);
    hopper::wgmma_fence();
    multiply_transposed(s, shared.k, q_tile);
    hopper::wgmma_wait<0>();
    hopper::hold(s);
  };

  const auto hide = [&]() {
    unsigned thread;  // read again, as work_again does
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    thread %= 128;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Of this thread's queries, those before `first`, counted from the thread's first one.
      const int key = thread / 32 * 16 + thread % 32 / 4 + 8 * half;
      const int first = key < work.keys ? work.mask.first_query(work.first_key + key) - thread % 4 * 2 - m * kBlockM
                                        : flash_attn::kUnlimited;
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) {
        if (8 * j < first) s[4 * j + 2 * half] = ptx::kMinusInfinity;
        if (8 * j + 1 < first) s[4 * j + 2 * half + 1] = ptx::kMinusInfinity;
      }
    }
  };

  const auto step = [&](int i, auto more) {
    const int stage = i % kStages;
    if (m < masked_m) hide();
    const unsigned statistics = shared.lse + stage * kRowStatBytes + lane % 4 * 16;
#pragma unroll
    for (int j = 0; j < kBlockM / 16; ++j) {
      const float4 lse = ptx::load_shared_float4(statistics + j * 64);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float even = e == 0 ? lse.x : lse.z;
        const float odd = e == 0 ? lse.y : lse.w;
        float* const of = s + 8 * j + 4 * e;
        of[0] = ptx::exp2(fmaf(of[0], p.scale_log2, -even));
        of[1] = ptx::exp2(fmaf(of[1], p.scale_log2, -odd));
        of[2] = ptx::exp2(fmaf(of[2], p.scale_log2, -even));
        of[3] = ptx::exp2(fmaf(of[3], p.scale_log2, -odd));
      }
    }
    hopper::barrier_wait(shared.p_empty(), i & 1 ^ 1);
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      ptx::store_shared_16(p_place + j * 2048,
                           make_uint4(__float_as_uint(s[4 * j]), __float_as_uint(s[4 * j + 1]),
                                      __float_as_uint(s[4 * j + 2]), __float_as_uint(s[4 * j + 3])));
    }
    hopper::fence_proxy_async();  // with P, lse is given back; see compute_keys
    hopper::barrier_arrive(shared.p_full());
    unsigned operand[kBlockM / 16][4];
    as_operand(operand, s);
    hopper::barrier_wait(shared.dout_full(stage), parity(i));
    multiply_registers(dv, operand, shared.dout + stage * kQueryBytes);
    if (lane == 0) hopper::barrier_arrive(shared.dout_empty(stage));
    if (++m == work.last_m) m = work.first_m;
    if constexpr (decltype(more)::value) compute_scores(i + 1);
  };

  if (work.steps > 0) {
    await_keys(shared, work);
    compute_scores(0);
    const int last = work.steps - 1;
    for (int i = 0; i < last; ++i) step(i, tile::True{});
    step(last, tile::False{});
  }
  store_gradient(p, dv, 1.0f, shared.v, p.dv, p.dv_stride, p.head_dim_v);
}

__device__ __forceinline__ void compute_keys(const flash_attn::BwdParams& p, const Shared& shared, const Work& work) {
  const int lane = threadIdx.x % 32;
  const unsigned p_place = shared.probabilities + threadIdx.x % 128 * 16;
  // stmatrix: lanes 8 i to 8 i + 7 give the rows, queries, of matrix i; its columns are keys.
  const unsigned score_place = tile::swizzled(lane / 16 * 8 + lane % 8, threadIdx.x / 32 % 4 * 2 + lane / 8 % 2);

  Gradient dk;
  clear(dk);
  float ds[kScores];  // dP^T, then dS^T
  int m = work.first_m;

  // dP^T = V dO^T of step `i`.
  const auto compute_dp = [&](int i) {
    const int stage = i % kStages;
    const unsigned dout_tile = shared.dout + stage * kQueryBytes;
    await_queries(shared.dout_full(stage), parity(i), dout_tile, work.sequence.seqlen_q - m * kBlockM);
    if (++m == work.last_m) m = work.first_m;
    hopper::wgmma_fence();
    multiply_transposed(ds, shared.v, dout_tile);
    hopper::wgmma_wait<0>();
    hopper::hold(ds);
  };

  const auto step = [&](int i, auto more) {
    const int stage = i % kStages;
    hopper::barrier_wait(shared.p_full(), i & 1);
    const unsigned statistics = shared.delta + stage * kRowStatBytes + lane % 4 * 16;
#pragma unroll
    for (int j = 0; j < kBlockM / 16; ++j) {
      const float4 delta = ptx::load_shared_float4(statistics + j * 64);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 probability = ptx::load_shared_float4(p_place + (2 * j + e) * 2048);
        const float even = e == 0 ? delta.x : delta.z;
        const float odd = e == 0 ? delta.y : delta.w;
        float* const of = ds + 8 * j + 4 * e;
        of[0] = (of[0] - even) * probability.x;
        of[1] = (of[1] - odd) * probability.y;
        of[2] = (of[2] - even) * probability.z;
        of[3] = (of[3] - odd) * probability.w;
      }
    }
    unsigned operand[kBlockM / 16][4];
    as_operand(operand, ds);
    hopper::barrier_wait(shared.ds_empty(stage), parity(i) ^ 1);
#pragma unroll
    for (int j = 0; j < kBlockM / 16; ++j) {
      ptx::stmatrix_x4_trans(shared.ds + stage * kScoreBytes + score_place + j * 16 * tile::kRowBytes, operand[j]);
    }
    // The stages, too, are given back after this fence: the copy engine overwrites row statistics that were read by
    // ordinary loads.
    hopper::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      hopper::barrier_arrive(shared.ds_full(stage));
      hopper::barrier_arrive(shared.dout_empty(stage));
    }
    hopper::barrier_arrive(shared.p_empty());
    hopper::barrier_wait(shared.q_full(stage), parity(i));
    multiply_registers(dk, operand, shared.q + stage * kQueryBytes);
    if (lane == 0) hopper::barrier_arrive(shared.q_empty(stage));
    if constexpr (decltype(more)::value) compute_dp(i + 1);
  };

  if (work.steps > 0) {
    await_keys(shared, work);
    compute_dp(0);
    const int last = work.steps - 1;
    for (int i = 0; i < last; ++i) step(i, tile::True{});
    step(last, tile::False{});
  }
  store_gradient(p, dk, p.scale, shared.k, p.dk, p.dk_stride, p.head_dim);
}

__device__ __forceinline__ void compute_queries(const flash_attn::BwdParams& p, const Shared& shared,
                                                const Work& work) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  constexpr int kPiece = kDqBytes / 16;  // floats of this warp in one of the two parts of a dQ tile
  static_assert(kDqWidth == 2 * kDqColumns && kDqSlices == 4);

  float dq[2][kDqColumns / 2];  // of two slices
  const auto add = [&](float* accumulator, int slice) {
    float* const destination = accumulator + slice / 2 * (4 * kPiece) + slice % 2 * (kPiece / 2);
#pragma unroll
    for (int i = 0; i < kDqColumns / 8; ++i) {
      const float* const of = dq[slice % 2] + 4 * i;
      const float sums[4] = {of[0], of[1], of[2], of[3]};
      ptx::red_add_4(destination + i * 128, sums);
    }
  };

  if (work.steps > 0) {
    await_keys(shared, work);
    Position at(p, work);
    const auto begin_slice = [&](int i, int slice) {
      if (slice == 0) hopper::barrier_wait(shared.ds_full(i % kStages), parity(i));
      multiply_dq(dq[slice % 2], shared.ds + i % kStages * kScoreBytes, shared.k, slice);
    };
    const auto step = [&](int i, auto more) {
      float* const accumulator =
          p.dq_accum + static_cast<long long>(at.tile) * (kBlockM * kHeadDim) + warp * kPiece + lane * 4;
      // The key blocks add to a dQ tile in the order of their index. All that come before this one have a lower block
      // index. Blocks start in the order of their index, as every lock between thread blocks assumes, so they are running
      // or done: the wait ends.
      if (p.deterministic) {
        if (lane == 0) {
          while (ptx::load_acquire(p.dq_semaphore + at.tile) < work.block_n * 4) {
          }
        }
        __syncwarp();
      }
      // A slice is added under the product of the next one, be it of the next step: L2 is always to have sums to do.
#pragma unroll
      for (int slice = 0; slice < kDqSlices; ++slice) {
        const bool last = slice + 1 == kDqSlices;
        if (!last) begin_slice(i, slice + 1);
        if constexpr (decltype(more)::value) {
          if (last) begin_slice(i + 1, 0);
        }
        add(accumulator, slice);
        hopper::wgmma_wait<0>();
        hopper::hold(dq[(slice + 1) % 2]);
        if (slice + 2 == kDqSlices && lane == 0) hopper::barrier_arrive(shared.ds_empty(i % kStages));
      }
      if (p.deterministic) {
        __threadfence();
        __syncwarp();
        if (lane == 0) ptx::add_release(p.dq_semaphore + at.tile, 1);
      }
      at.advance(p, work);
    };
    begin_slice(0, 0);
    hopper::wgmma_wait<0>();
    hopper::hold(dq[0]);
    const int last = work.steps - 1;
    for (int i = 0; i < last; ++i) step(i, tile::True{});
    step(last, tile::False{});
  }
  hopper::named_sync(kConsumersBarrier, 128 * kConsumers);
  const Work same = work_again(p);
  // All that this warp adds to dQ is there.
  __syncwarp();
  if (lane == 0) count_finished(p, same.batch * p.heads_kv + same.head_kv, 1);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_bwd_preprocess(const __grid_constant__ flash_attn::BwdParams p) {
  preprocess(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flash_bwd(const __grid_constant__ flash_attn::BwdTmaParams p) {
  const Work work = Work::of(p.bwd, blockIdx.x);
  if (work.keys <= 0) {
    if (threadIdx.x == 0) {
      begin();
      count_finished(p.bwd, work.batch * p.bwd.heads_kv + work.head_kv, kFinished);
    }
    return;
  }
  const Shared shared(ptx::shared_address(shared_memory));
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();

  const int group = ptx::uniform(threadIdx.x / 128);
  if (group == 0) {
    hopper::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0 || threadIdx.x == 32) produce(p, shared, work, threadIdx.x == 0);
  } else if (group == kQueries) {
    hopper::give_registers<kQueriesRegisters>();
    compute_queries(p.bwd, shared, work);
  } else if (group == kValues) {
    hopper::take_registers<kValuesRegisters>();
    compute_values(p.bwd, shared, work);
  } else {
    hopper::take_registers<kKeysRegisters>();
    compute_keys(p.bwd, shared, work);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_bwd_postprocess(const __grid_constant__ flash_attn::BwdParams p) {
  postprocess(p);
}
