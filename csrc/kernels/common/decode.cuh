// Attention of few query tokens with a long KV cache, in slabs or pages (flash decoding, split-KV): what the families share.
//
// The time is that of reading K and V once. The query heads that share a KV head, and the tokens, are packed into rows. A
// unit, a warp or a warpgroup, has as many rows as its matrix product takes; it walks keys of its own with its own cp.async
// pipeline and never waits for another unit. Of more rows, some units form a team: each has rows of its own, and all of
// them use the keys that any of them copied, so that the cache is still read once. A cache is cut into p.splits parts by its
// length on the device, so that the host needs no synchronisation to balance the work; flash_combine joins the parts. A block
// has the warps that the host says, up to kWarps.
#pragma once

#include "common/problem.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"

namespace decode {

constexpr int kHeadDim = FA_HEAD_DIM;
constexpr int kBlockM = FA_BLOCK_M;  // rows of a unit
constexpr int kBlockN = FA_BLOCK_N;  // keys a unit takes in one step
constexpr int kWarps = FA_WARPS;
constexpr int kStages = FA_STAGES;
constexpr bool kBf16 = FA_BF16;

// Whether the GPU can begin a kernel before the one before it ends.
constexpr bool kBeginsEarly = __CUDA_ARCH__ >= 900;

constexpr int kThreads = kWarps * 32;
constexpr int kWarpRows = 16;
constexpr int kUnitWarps = kBlockM / kWarpRows;
constexpr int kUnits = kWarps / kUnitWarps;
constexpr int kDimTiles = kHeadDim / 8;
constexpr float kSlack = 8.0f;
constexpr float kLog2e = 1.4426950408889634074f;
constexpr float kLn2 = 0.69314718055994530942f;
static_assert(kBlockM % kWarpRows == 0 && kWarps % kUnitWarps == 0 && kBlockN % 16 == 0);

using QueryTile = tile::Copy<kBlockM, kHeadDim, 128>;  // for its layout
using KeyTile = tile::Copy<kBlockN, kHeadDim, kBlockN * 8>;
constexpr int kRowsPerPass = 4;  // a warp copies 4 rows of 128 bytes at a time
constexpr int kWarpKeys = kBlockN / kUnitWarps;
constexpr int kStageBytes = 2 * KeyTile::kBytes;
constexpr int kUnitBytes = QueryTile::kBytes + kStages * kStageBytes;
static_assert(kUnits * kUnitBytes == FA_SMEM_BYTES, "kernels.toml: smem of decode");
// The partial results of the warps take the place of Q, K and V.
constexpr int kPitch = kHeadDim + 8;  // floats: rows of a half-warp's stores lie in different banks
constexpr int kPartialBytes = kWarpRows * kPitch * 4 + kWarpRows * 8;
constexpr int kWarpBytes = kUnitBytes / kUnitWarps;
static_assert(kPartialBytes <= kWarpBytes && kWarpBytes % 16 == 0);

extern __shared__ __align__(1024) char shared_memory[];

// Where a key of a sequence lies: row `row` of slab or page `slab`; slab -1 where no memory belongs to it.
struct Place {
  int slab, row;
};

// n / d, for n from 0 up to below 2^31.
__device__ __forceinline__ int divide(int n, const flash_attn::Divisor& d) {
  return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(n)) * d.multiplier >> d.shift);
}

__device__ __forceinline__ void add(float4& sum, const float4& x, float weight) {
  sum.x = fmaf(x.x, weight, sum.x);
  sum.y = fmaf(x.y, weight, sum.y);
  sum.z = fmaf(x.z, weight, sum.z);
  sum.w = fmaf(x.w, weight, sum.w);
}

template <int kCount>
struct Int {
  static constexpr int value = kCount;
};

// Joins the warps of a team, which are neighbours.
__device__ __forceinline__ void sync_team(int team, int row_warps) {
  if (row_warps == 1) {
    __syncwarp();
  } else {
    ptx::named_sync(1 + team, row_warps * 32);
  }
}

// flash_decode. Products: the matrix products of a unit,
//   kTogether               tiles of keys that a unit works on at once
//   Products(q_tile, lane)  once the unit's rows of Q are in shared memory
//   arrived()               by each thread, once its copies to shared memory are there and before others use them
//   scores(s, tile)         S = Q K^T of one tile, or of several: each kUnitBytes further
//   values(out, s, tile)    O += P V of the same; both are done when they return
template <typename Products>
__device__ __forceinline__ void attend_cache(const flash_attn::DecodeParams& p) {
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;
  ptx::launch_dependents();
  // The launch before, which may still be running, writes new keys, rotates q and may write lengths. One that is read before
  // the wait is a guess, with which copying begins at once after it.
  const bool guesses = kBeginsEarly && p.sequences.cu_seqlens_q == nullptr && p.sequences.leftpad_k == nullptr &&
                       p.cache_batch_idx == nullptr && p.splits > 1;
  if (!guesses) ptx::wait_on_dependencies();

  const int all_tiles = divide(blockIdx.x, p.by_splits);
  const int split = blockIdx.x - all_tiles * p.splits;
  const int all_heads = divide(all_tiles, p.by_row_tiles);
  const int row_tile = all_tiles - all_heads * p.row_tiles;
  const int batch = divide(all_heads, p.by_heads_kv);
  const int head_kv = all_heads - batch * p.heads_kv;
  const int units = p.warps / kUnitWarps;
  const int log_row_warps = __ffs(p.row_warps) - 1;
  const int team = warp >> log_row_warps;
  problem::Sequence sequence(p, batch, guesses);
  problem::Mask mask(sequence, p.modifiers);
  const int row_warp = warp & (p.row_warps - 1);
  const int all_rows = p.group * sequence.seqlen_q;
  const int first_row = row_tile * kWarpRows * p.row_warps;
  const int rows = min(kWarpRows * p.row_warps, all_rows - first_row);
  if (rows <= 0) return;  // packed sequences may be shorter than the longest

  // This block's keys: its split of what any of its rows sees.
  const int first_token = divide(first_row, p.by_group);
  const int last_token = divide(first_row + rows - 1, p.by_group);
  int begin, end;
  const auto find_keys = [&] {
    const int tile_first = mask.first(first_token) / kBlockN;
    const int tile_last = max(0, mask.last(last_token) + kBlockN) / kBlockN;
    const int tiles_per_split = divide(max(0, tile_last - tile_first) + p.splits - 1, p.by_splits);
    begin = tile_first + split * tiles_per_split;
    end = min(tile_last, begin + tiles_per_split);
  };
  find_keys();

  // This unit's rows.
  const int row_units = p.row_warps / kUnitWarps;  // of the team
  const int row_unit = row_warp / kUnitWarps;
  const int unit_warp = row_warp % kUnitWarps;
  const int unit_row = first_row + row_unit * kBlockM;
  const int unit_rows = min(kBlockM, all_rows - unit_row);

  const unsigned shared_team = ptx::shared_address(shared_memory) + team * row_units * kUnitBytes;
  const unsigned shared_unit = shared_team + row_unit * kUnitBytes;
  const char* const k_source = tile::source(p.k, p.k_stride, 0, head_kv, 0, lane);
  const char* const v_source = tile::source(p.v, p.v_stride, 0, head_kv, 0, lane);
  const int column = lane % 8 * 8;

  int own_slab = p.cache_batch_idx != nullptr ? p.cache_batch_idx[batch] : batch;
  if (own_slab >= p.slabs) own_slab = -1;
  const int* const block_table = p.pages.block_table;

  // A key is read once, but where several blocks have rows of its head.
  const unsigned long long policy = p.row_tiles == 1 ? ptx::evict_first() : ptx::evict_normal();

  // The blocks of all heads of a sequence, which begin together, each ask L2 for some of the first keys, whole rows of all
  // heads: memory is at work while copies are prepared. Twice as many keys are too many for L2, and of fewer keys in all, or
  // with the products of more rows, nothing is gained.
  const auto ask_ahead = [&] {
    constexpr int kAhead = 512;
    if (!kBeginsEarly || kUnitWarps > 1 || p.warps < kWarps || blockIdx.x >= ptx::multiprocessors()) return;
    if (p.k_stride.head != p.head_dim || p.v_stride.head != p.head_dim_v || (end - begin) * kBlockN < 8 * kAhead) return;
    const int number = head_kv * p.warps + warp + lane * p.heads_kv * p.warps;
    const int key = begin * kBlockN + number;
    if (number >= kAhead || key >= sequence.seqlen_k) return;
    int slab = own_slab, row = key + static_cast<int>(sequence.k_row);
    if (block_table != nullptr) {
      const int index = divide(row, p.pages.by_page_size);
      row -= index * p.pages.page_size;
      slab = ptx::load_past_l1(block_table + batch * p.pages.table_batch_stride + index);
    }
    if (slab < 0 || slab >= (block_table != nullptr ? p.pages.page_count : p.slabs)) return;
    ptx::prefetch_l2(static_cast<const char*>(p.k) + 2 * (slab * p.k_stride.batch + row * p.k_stride.row),
                     2 * p.heads_kv * p.head_dim);
    ptx::prefetch_l2(static_cast<const char*>(p.v) + 2 * (slab * p.v_stride.batch + row * p.v_stride.row),
                     2 * p.heads_kv * p.head_dim_v);
  };

  // The place of one key a lane, asked for a step before its copy begins: in a page table it is a load.
  auto locate = [&](int tile_index) {
    const int key = tile_index * kBlockN + unit_warp * kWarpKeys + lane % kWarpKeys;
    Place place = {own_slab, key + static_cast<int>(sequence.k_row)};
    if (block_table != nullptr) {
      const int index = divide(place.row, p.pages.by_page_size);
      place.row -= index * p.pages.page_size;
      place.slab = -1;
      if (key < sequence.seqlen_k) place.slab = block_table[batch * p.pages.table_batch_stride + index];
      if (place.slab >= p.pages.page_count) place.slab = -1;
    } else if (key >= sequence.seqlen_k) {
      place.slab = -1;
    }
    return place;
  };

  auto load = [&](int stage, const Place& place) {
    const unsigned k_tile =
        shared_unit + QueryTile::kBytes + stage * kStageBytes + unit_warp * kWarpKeys * tile::kRowBytes;
    const unsigned v_tile = k_tile + KeyTile::kBytes;
    const long long k_offset = 2 * (place.slab * p.k_stride.batch + place.row * p.k_stride.row);
    const long long v_offset = 2 * (place.slab * p.v_stride.batch + place.row * p.v_stride.row);
#pragma unroll
    for (int pass = 0; pass < kWarpKeys / kRowsPerPass; ++pass) {
      const int row = pass * kRowsPerPass + lane / 8;
      const bool exists = __shfl_sync(0xffffffffu, place.slab, row) >= 0;
      const char* const k = k_source + __shfl_sync(0xffffffffu, k_offset, row);
      const char* const v = v_source + __shfl_sync(0xffffffffu, v_offset, row);
      const unsigned offset = tile::swizzled(row, lane % 8);
#pragma unroll
      for (int panel = 0; panel < KeyTile::kPanels; ++panel) {
        ptx::cp_async_16(k_tile + offset + panel * KeyTile::kPanelBytes, k + panel * tile::kRowBytes,
                         exists && column + panel * tile::kPanelColumns < p.head_dim ? 16 : 0, policy);
      }
#pragma unroll
      for (int panel = 0; panel < KeyTile::kPanels; ++panel) {
        ptx::cp_async_16(v_tile + offset + panel * KeyTile::kPanelBytes, v + panel * tile::kRowBytes,
                         exists && column + panel * tile::kPanelColumns < p.head_dim_v ? 16 : 0, policy);
      }
    }
  };

  // Rows past the end are zeros.
  auto load_query = [&] {
#pragma unroll
    for (int pass = 0; pass < kWarpRows / kRowsPerPass; ++pass) {
      const int row = unit_warp * kWarpRows + pass * kRowsPerPass + lane / 8;
      const int r = unit_row + row;
      const int token = divide(r, p.by_group);
      const char* const source =
          tile::source(p.q, p.q_stride, batch, head_kv * p.group + r - token * p.group, sequence.q_row + token, lane);
#pragma unroll
      for (int panel = 0; panel < QueryTile::kPanels; ++panel) {
        ptx::cp_async_16(shared_unit + panel * QueryTile::kPanelBytes + tile::swizzled(row, lane % 8),
                         source + panel * tile::kRowBytes,
                         row < unit_rows && column + panel * tile::kPanelColumns < p.head_dim ? 16 : 0);
      }
    }
  };

  const int unit = warp / kUnitWarps;
  ask_ahead();
  Place next_place;
  int used = 0;
  for (;;) {
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      if (stage == 0) {
        if (guesses) {  // addresses were computed before the loop
          ptx::wait_on_dependencies();
          if (p.sequences.seqused_k != nullptr) used = ptx::load_past_l1(p.sequences.seqused_k + batch);
        }
        next_place = locate(begin + unit);
      }
      const Place place = next_place;
      next_place = locate(begin + unit + (stage + 1) * units);
      if (begin + unit + stage * units < end) load(stage, place);
      if (stage == 0) load_query();
      ptx::cp_async_commit();
    }
    if (!guesses || p.sequences.seqused_k == nullptr) break;
    // The length was asked for before the keys, behind which it would have come.
    const int seqlen_k = max(0, min(p.seqlen_k, used + p.sequences.new_keys));
    if (seqlen_k == sequence.seqlen_k) break;
    sequence.seqlen_k = seqlen_k;
    mask = problem::Mask(sequence, p.modifiers);
    find_keys();
    ptx::cp_async_wait<0>();
  }

  // While they come: the unit's tiles, of which at least one row sees a key; and the keys that all rows see.
  const int unit_token = divide(min(unit_row, all_rows - 1), p.by_group);
  const int unit_last_token = divide(min(unit_row + kBlockM, all_rows) - 1, p.by_group);
  const int unit_begin = mask.first(unit_token) / kBlockN;
  const int unit_end = unit_rows > 0 ? max(0, mask.last(unit_last_token) + kBlockN) / kBlockN : 0;
  const bool only_scaled = p.modifiers.softcap <= 0.0f && p.modifiers.alibi_slopes == nullptr;
  const int all_first = mask.first(unit_last_token);
  const int all_last = only_scaled ? mask.last(unit_token) : -1;

  ptx::cp_async_wait<kStages - 1>();  // Q came with the first tile
  __syncwarp();
  Products products(shared_unit, lane);

  float out[kDimTiles][4];
#pragma unroll
  for (int j = 0; j < kDimTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) out[j][e] = 0.0f;
  }
  float row_max[2] = {ptx::kMinusInfinity, ptx::kMinusInfinity};
  float row_sum[2] = {0.0f, 0.0f};
  int first[2], last[2], position[2];
  float slope[2] = {0.0f, 0.0f};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = min(unit_row + unit_warp * kWarpRows + lane / 4 + 8 * half, all_rows - 1);
    const int token = divide(row, p.by_group);
    first[half] = mask.first(token);
    last[half] = mask.last(token);
    position[half] = token + mask.shift;
    if (p.modifiers.alibi_slopes != nullptr) {
      slope[half] =
          p.modifiers.alibi_slopes[batch * p.modifiers.alibi_batch_stride + head_kv * p.group + row - token * p.group] * kLog2e;
    }
  }

  // Some tiles, one after the other in the memory of neighbouring warps.
  auto attend = [&](auto count, int tile_index, unsigned k_tile) {
    constexpr int kTiles = decltype(count)::value;
    constexpr int kKeys = kTiles * kBlockN;
    float s[kKeys / 8][4];
    products.scores(s, k_tile);

    const int first_key = tile_index * kBlockN;
    float block_max[2] = {ptx::kMinusInfinity, ptx::kMinusInfinity};
    float scale = 1.0f;  // what the scores are to be multiplied by yet
    if (first_key >= all_first && first_key + kKeys - 1 <= all_last) {
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          block_max[e / 2] = fmaxf(block_max[e / 2], s[j][e]);
        }
      }
      scale = p.scale_log2;
      block_max[0] *= scale;
      block_max[1] *= scale;
    } else {
      const int key = first_key + lane % 4 * 2;
      const float softcap = p.modifiers.softcap;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int half = e / 2;
          const int at = key + 8 * j + e % 2;
          float x = softcap > 0.0f ? ptx::tanh(s[j][e] * (p.scale / softcap)) * softcap * kLog2e : s[j][e] * p.scale_log2;
          x -= slope[half] * fabsf(static_cast<float>(position[half] - at));
          if (at < first[half] || at > last[half]) x = ptx::kMinusInfinity;
          s[j][e] = x;
          block_max[half] = fmaxf(block_max[half], x);
        }
      }
    }
    if (__any_sync(0xffffffffu, block_max[0] > row_max[0] + kSlack || block_max[1] > row_max[1] + kSlack)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float m = fmaxf(block_max[half], row_max[half]);
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        const float factor = ptx::exp2(row_max[half] - (m == ptx::kMinusInfinity ? 0.0f : m));
        row_max[half] = m;
        row_sum[half] *= factor;
#pragma unroll
        for (int j = 0; j < kDimTiles; ++j) {
          out[j][2 * half] *= factor;
          out[j][2 * half + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = row_max[half] == ptx::kMinusInfinity ? 0.0f : row_max[half];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[j][2 * half + e];
          x = ptx::exp2(fmaf(x, scale, -base));
          row_sum[half] += x;
        }
      }
    }
    products.values(out, s, k_tile + KeyTile::kBytes);
  };

  constexpr int kTogether = Products::kTogether;
  int stage = 0;
  for (int team_tile = begin + team * row_units; team_tile < end; team_tile += units) {
    ptx::cp_async_wait<kStages - 1>();
    Products::arrived();
    sync_team(team, p.row_warps);
    const unsigned team_stage = shared_team + QueryTile::kBytes + stage * kStageBytes;
    const int last_tile = min(min(end, unit_end), team_tile + row_units);
    int tile_index = max(team_tile, unit_begin);
    for (; tile_index + kTogether <= last_tile; tile_index += kTogether) {
      attend(Int<kTogether>(), tile_index, team_stage + (tile_index - team_tile) * kUnitBytes);
    }
    if constexpr (kTogether > 1) {
      if (tile_index < last_tile) attend(Int<1>(), tile_index, team_stage + (tile_index - team_tile) * kUnitBytes);
    }
    sync_team(team, p.row_warps);
    // Into the place of what all of the team have used.
    const int next = team_tile + row_unit + kStages * units;
    const Place place = next_place;
    next_place = locate(next + units);
    if (next < end) load(stage, place);
    ptx::cp_async_commit();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  const bool last_pass = p.splits == 1;
  const auto flat_row = [&](int head, int token) {
    return batch * p.lse_batch_stride + head * p.lse_head_stride + sequence.q_row + token;
  };
  // Where a row's lse, and its columns, go.
  const auto lse_at = [&](int head, int token) { return (last_pass ? 0 : split * p.lse_count) + flat_row(head, token); };
  const auto row_at = [&](int head, int token) {
    return last_pass ? batch * p.out_stride.batch + head * p.out_stride.head + (sequence.q_row + token) * p.out_stride.row
                     : lse_at(head, token) * p.head_dim_v;
  };
  const auto store_lse = [&](long long at, float m, float sum) {
    const float lse = sum == 0.0f ? ptx::kMinusInfinity : m + ptx::log2(sum);
    if (last_pass) {
      p.lse[at] = lse * kLn2;
    } else {
      p.partial_lse[at] = lse;
    }
  };
  const auto sink_of = [&](int head) {
    return last_pass && p.modifiers.sink != nullptr ? p.modifiers.sink[head] * kLog2e : ptx::kMinusInfinity;
  };

  // Two teams, or one, of warps with many rows: results stay with the threads that have them. Of two teams, each takes half
  // of the columns, and leaves the other half to the same thread of the other.
  if constexpr (kUnits == 2) {
    constexpr int kHalf = kDimTiles / 2;
    constexpr int kUnitThreads = kUnitWarps * 32;
    const bool two_teams = p.warps >> log_row_warps == 2;
    const int unit_thread = thread % kUnitThreads;
    float4* const mine = reinterpret_cast<float4*>(shared_memory + team * kUnitBytes) + unit_thread;
    const float4* const theirs = reinterpret_cast<const float4*>(shared_memory + (1 - team) * kUnitBytes) + unit_thread;
    static_assert((kHalf + 1) * kUnitThreads * 16 <= kUnitBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_sum[half] += __shfl_xor_sync(0xffffffffu, row_sum[half], 1);
      row_sum[half] += __shfl_xor_sync(0xffffffffu, row_sum[half], 2);
    }
    const auto leave = [&](auto from) {
#pragma unroll
      for (int j = 0; j < kHalf; ++j) {
        const float(&x)[4] = out[decltype(from)::value + j];
        mine[j * kUnitThreads] = make_float4(x[0], x[1], x[2], x[3]);
      }
    };
    float4 other = make_float4(ptx::kMinusInfinity, 0.0f, ptx::kMinusInfinity, 0.0f);  // maximum and sum of both rows
    if (two_teams) {
      ptx::cp_async_wait<0>();
      sync_team(team, p.row_warps);  // that all of the team have its memory to themselves
      mine[kHalf * kUnitThreads] = make_float4(row_max[0], row_sum[0], row_max[1], row_sum[1]);
      if (team == 0) {
        leave(Int<kHalf>());
      } else {
        leave(Int<0>());
      }
      __syncthreads();
      other = theirs[kHalf * kUnitThreads];
    }
    bool exists[2];
    long long at[2];
    float own_weight[2], other_weight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int block_row = row_unit * kBlockM + unit_warp * kWarpRows + lane / 4 + 8 * half;
      exists[half] = block_row < rows;
      const int r = first_row + min(block_row, rows - 1);
      const int token = divide(r, p.by_group);
      const int head = head_kv * p.group + r - token * p.group;
      at[half] = row_at(head, token) + lane % 4 * 2;
      const float sink = sink_of(head);
      const float other_max = half == 0 ? other.x : other.z;
      const float m = fmaxf(fmaxf(row_max[half], other_max), sink);
      const float base = m == ptx::kMinusInfinity ? 0.0f : m;
      own_weight[half] = ptx::exp2(row_max[half] - base);
      other_weight[half] = ptx::exp2(other_max - base);
      const float sum = fmaf(row_sum[half], own_weight[half],
                             fmaf(half == 0 ? other.y : other.w, other_weight[half], ptx::exp2(sink - base)));
      if (exists[half] && lane % 4 == 0 && (team == 0 || !two_teams)) store_lse(lse_at(head, token), m, sum);
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      own_weight[half] *= inverse;
      other_weight[half] *= inverse;
    }
    const auto finish = [&](auto from) {
#pragma unroll
      for (int j = 0; j < kHalf; ++j) {
        const int c = 8 * (decltype(from)::value + j);
        if (c >= p.head_dim_v) break;
        const float(&x)[4] = out[decltype(from)::value + j];
        float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (two_teams) y = theirs[j * kUnitThreads];
        const float ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float low = fmaf(x[2 * half], own_weight[half], ys[2 * half] * other_weight[half]);
          const float high = fmaf(x[2 * half + 1], own_weight[half], ys[2 * half + 1] * other_weight[half]);
          if (!exists[half]) continue;
          if (last_pass) {
            *reinterpret_cast<unsigned*>(static_cast<char*>(p.out) + 2 * (at[half] + c)) = ptx::pack<kBf16>(low, high);
          } else {
            *reinterpret_cast<float2*>(p.partial_out + at[half] + c) = make_float2(low, high);
          }
        }
      }
    };
    if (team == 0 || !two_teams) finish(Int<0>());
    if (team != 0 || !two_teams) finish(Int<kHalf>());
    return;
  }

  // Each warp joins some rows. A lane is for one team and one of these rows: where that goes is found first.
  const int log_teams = __ffs(p.warps) - 1 - log_row_warps;
  const int teams = 1 << log_teams;
  const int team_step = p.row_warps * (kWarpBytes / 4);
  const int lane_row = warp + (lane >> log_teams) * p.warps;
  const int lane_team = lane & (teams - 1);
  const int r = first_row + min(lane_row, rows - 1);
  const int lane_token = divide(r, p.by_group);
  const int lane_head = head_kv * p.group + r - lane_token * p.group;
  const long long lane_lse_at = lse_at(lane_head, lane_token);
  const long long lane_row_at = row_at(lane_head, lane_token);

  // Each warp leaves its maxima, sums and sums of values.
  ptx::cp_async_wait<0>();
  __syncthreads();
  constexpr int kStatistics = kWarpRows * kPitch;
  float* const partial = reinterpret_cast<float*>(shared_memory);
  {
    float* const mine = partial + warp * (kWarpBytes / 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows - row_warp * kWarpRows <= 8 * half) break;
      float sum = row_sum[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = lane / 4 + 8 * half;
      if (lane % 4 == 0) *reinterpret_cast<float2*>(mine + kStatistics + 2 * row) = make_float2(row_max[half], sum);
#pragma unroll
      for (int j = 0; j < kDimTiles; ++j) {
        *reinterpret_cast<float2*>(mine + row * kPitch + 8 * j + lane % 4 * 2) =
            make_float2(out[j][2 * half], out[j][2 * half + 1]);
      }
    }
  }
  __syncthreads();

  const auto had_row = [&](int block_row) { return partial + block_row / kWarpRows * (kWarpBytes / 4); };
  const bool counts = lane_row < rows;
  float2 statistics = make_float2(ptx::kMinusInfinity, 0.0f);
  if (counts) {
    statistics = *reinterpret_cast<const float2*>(had_row(lane_row) + lane_team * team_step + kStatistics +
                                                  lane_row % kWarpRows * 2);
  }
  const float sink = sink_of(lane_head);
  float m = fmaxf(statistics.x, sink);
#pragma unroll
  for (int offset = kUnits / 2; offset > 0; offset /= 2) {
    if (offset < teams) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, offset));
  }
  const float base = m == ptx::kMinusInfinity ? 0.0f : m;
  float weight = ptx::exp2(statistics.x - base);
  float sum = statistics.y * weight;
#pragma unroll
  for (int offset = kUnits / 2; offset > 0; offset /= 2) {
    if (offset < teams) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  sum += ptx::exp2(sink - base);
  weight *= sum == 0.0f ? 0.0f : 1.0f / sum;
  if (counts && lane_team == 0) store_lse(lane_lse_at, m, sum);

  constexpr int kRowsTogether = kUnits < 8 ? 8 / kUnits : 1;
#pragma unroll 1
  for (int c = lane * 4; c - lane * 4 < p.head_dim_v; c += 128) {
#pragma unroll 1
    for (int number = 0; warp + number * p.warps < rows; number += kRowsTogether) {
      float4 values[kRowsTogether];
#pragma unroll
      for (int i = 0; i < kRowsTogether; ++i) {
        const int block_row = min(warp + (number + i) * p.warps, rows - 1);
        const float* theirs = had_row(block_row) + block_row % kWarpRows * kPitch + min(c, kHeadDim - 4);
        values[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int t = 0; t < kUnits; ++t, theirs += team_step) {
          if (t >= teams) break;
          add(values[i], *reinterpret_cast<const float4*>(theirs),
              __shfl_sync(0xffffffffu, weight, ((number + i) << log_teams) + t));
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsTogether; ++i) {
        const long long at = __shfl_sync(0xffffffffu, lane_row_at, (number + i) << log_teams) + c;
        if (warp + (number + i) * p.warps >= rows || c >= p.head_dim_v) continue;
        if (last_pass) {
          *reinterpret_cast<uint2*>(static_cast<char*>(p.out) + 2 * at) =
              make_uint2(ptx::pack<kBf16>(values[i].x, values[i].y), ptx::pack<kBf16>(values[i].z, values[i].w));
        } else {
          *reinterpret_cast<float4*>(p.partial_out + at) = values[i];
        }
      }
    }
  }
}

// Few enough registers that a block of flash_combine fits beside flash_decode's and is there when that ends.
constexpr int kCombineBlocks = 10;

// flash_combine: joins the splits of a row, one warp a row, lanes over columns.
__device__ __forceinline__ void join_splits(const flash_attn::DecodeParams& p) {
  const int lane = threadIdx.x % 32;
  const long long rows = p.lse_count;
  const int row = blockIdx.x * (flash_attn::kCombineThreads / 32) + threadIdx.x / 32;
  ptx::launch_dependents();
  // Before the wait: where everything is. Of packed queries, which are one batch of all tokens, too.
  const int all_heads = row / static_cast<int>(p.lse_head_stride);
  const int token = row - all_heads * static_cast<int>(p.lse_head_stride);
  const int batch = all_heads / p.heads;
  const int head = all_heads - batch * p.heads;
  const long long out_at = batch * p.out_stride.batch + token * p.out_stride.row + head * p.out_stride.head;
  const long long values_at = row * static_cast<long long>(p.head_dim_v) + lane * 4;
  const long long lse_at = lane * rows + row;
  const long long step = rows * p.head_dim_v;
  const float* const lse = p.partial_lse + row;
  char* const out = static_cast<char*>(p.out) + 2 * out_at;
  ptx::wait_on_dependencies_after(out_at | values_at | lse_at | step);
  if (row >= rows) return;

  // Some splits at a time, so that loads are under way together; the first ones while their weights are found.
  constexpr int kTogether = 16;
  float4 values[kTogether];
  const float own = lane < p.splits ? p.partial_lse[lse_at] : ptx::kMinusInfinity;
  const auto load = [&](const float* at, int splits) {
    long long distance = step;
    asm volatile("" : "+l"(distance));  // so that no addresses are kept in registers from one time to the next
#pragma unroll
    for (int i = 0; i < kTogether; ++i, at += distance) values[i] = ptx::load_global_16(at, i < splits);
  };
  load(p.partial_out + values_at, lane * 4 < p.head_dim_v ? p.splits : 0);

  const bool has_sink = p.modifiers.sink != nullptr;
  const float sink = has_sink ? p.modifiers.sink[head] * kLog2e : ptx::kMinusInfinity;
  float m = fmaxf(own, sink);
#pragma unroll 1
  for (int split = lane + 32; split < p.splits; split += 32) m = fmaxf(m, lse[split * rows]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, offset));
  const float base = m == ptx::kMinusInfinity ? 0.0f : m;
  float sum = ptx::exp2(own - base);
#pragma unroll 1
  for (int split = lane + 32; split < p.splits; split += 32) sum += ptx::exp2(lse[split * rows] - base);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (has_sink) sum += ptx::exp2(sink - base);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (lane == 0) p.lse[row] = sum == 0.0f ? ptx::kMinusInfinity : (m + ptx::log2(sum)) * kLn2;

  for (int c = lane * 4; c - lane * 4 < p.head_dim_v; c += 128) {
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int first = 0; first < p.splits; first += kTogether) {
      float weight = own;
      if (first > 0 || c != lane * 4) {
        load(p.partial_out + values_at + first * step + c - lane * 4, c < p.head_dim_v ? p.splits - first : 0);
        weight = first + lane < p.splits ? lse[(first + lane) * rows] : ptx::kMinusInfinity;
      }
      weight = ptx::exp2(weight - base) * inverse;  // of split first + lane
#pragma unroll
      for (int i = 0; i < kTogether; ++i) add(value, values[i], __shfl_sync(0xffffffffu, weight, i));
    }
    if (c >= p.head_dim_v) continue;
    *reinterpret_cast<uint2*>(out + 2 * c) =
        make_uint2(ptx::pack<kBf16>(value.x, value.y), ptx::pack<kBf16>(value.z, value.w));
  }
}

}  // namespace decode
