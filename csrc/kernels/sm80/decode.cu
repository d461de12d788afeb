// Attention of few query tokens with a long KV cache, in slabs or pages (flash decoding, split-KV).
//
// The time is that of reading K and V once. The query heads that share a KV head, and the tokens, are packed into rows. Of
// up to 16 rows, each warp walks keys of its own with its own cp.async pipeline and never waits for another warp. Of more,
// p.row_warps warps form a team: each has 16 rows of its own, and all of them use the keys that any of them copied, so
// that the cache is still read once. A cache is cut into p.splits parts by its length on the device, so that the host
// needs no synchronisation to balance the work; flash_combine joins the parts.
#include "common/problem.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"

namespace {

constexpr int kHeadDim = FA_HEAD_DIM;
constexpr int kBlockM = FA_BLOCK_M;  // rows of a warp
constexpr int kBlockN = FA_BLOCK_N;  // keys a warp takes in one step
constexpr int kWarps = FA_WARPS;
constexpr int kStages = FA_STAGES;
constexpr bool kBf16 = FA_BF16;

constexpr int kThreads = kWarps * 32;
constexpr int kDimTiles = kHeadDim / 8;
constexpr float kSlack = 8.0f;
constexpr float kLog2e = 1.4426950408889634074f;
constexpr float kLn2 = 0.69314718055994530942f;
static_assert(kBlockM == 16 && kBlockN % 16 == 0);

using QueryTile = tile::Copy<kBlockM, kHeadDim, 128>;  // for its layout
using KeyTile = tile::Copy<kBlockN, kHeadDim, kBlockN * 8>;
constexpr int kRowsPerPass = 4;  // a warp copies 4 rows of 128 bytes at a time
constexpr int kPasses = kBlockN / kRowsPerPass;
constexpr int kStageBytes = 2 * KeyTile::kBytes;
constexpr int kWarpBytes = QueryTile::kBytes + kStages * kStageBytes;
static_assert(kWarps * kWarpBytes == FA_SMEM_BYTES, "kernels.toml: smem of decode");
// Tiles of keys that a warp of a team works on at once: with one alone it waits for its own products most of the time.
constexpr int kTogether = kBlockN == 16 && kHeadDim <= 128 ? 2 : 1;
// Above, Q and the accumulators do not fit into registers together: Q is read again for every tile.
constexpr bool kQueryInRegisters = kHeadDim <= 128;
// The partial results of the warps take the place of Q, K and V.
constexpr int kPitch = kHeadDim + 8;  // floats: rows of a half-warp's stores lie in different banks
constexpr int kPartialBytes = 16 * kPitch * 4 + 16 * 8;
static_assert(kPartialBytes <= kWarpBytes);

extern __shared__ __align__(1024) char shared_memory[];

// Where a key of a sequence lies: row `row` of slab or page `slab`; slab -1 where no memory belongs to it.
struct Place {
  int slab, row;
};

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

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, FA_MIN_BLOCKS)
    flash_decode(const __grid_constant__ flash_attn::DecodeParams p) {
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;
  ptx::launch_dependents();
  // The launch before, which may still be running, writes new keys and rotates q.
  ptx::wait_on_dependencies();

  int index = blockIdx.x;
  const int split = index % p.splits;
  index /= p.splits;
  const int row_tile = index % p.row_tiles;
  index /= p.row_tiles;
  const int batch = index / p.heads_kv;
  const int head_kv = index - batch * p.heads_kv;
  const problem::Sequence sequence(p, batch);
  const problem::Mask mask(sequence, p.modifiers);
  const int team = warp / p.row_warps;
  const int row_warp = warp % p.row_warps;
  const int all_rows = p.group * sequence.seqlen_q;
  const int first_row = row_tile * kBlockM * p.row_warps;
  const int rows = min(kBlockM * p.row_warps, all_rows - first_row);
  if (rows <= 0) return;  // packed sequences may be shorter than the longest

  // This block's keys: its split of what any of its rows sees.
  const int first_token = first_row / p.group;
  const int last_token = (first_row + rows - 1) / p.group;
  const int tile_first = mask.first(first_token) / kBlockN;
  const int tile_last = max(0, mask.last(last_token) + kBlockN) / kBlockN;
  const int tiles_per_split = (max(0, tile_last - tile_first) + p.splits - 1) / p.splits;
  const int begin = tile_first + split * tiles_per_split;
  const int end = min(tile_last, begin + tiles_per_split);

  // This warp's rows; its tiles, of which at least one row sees a key; and the keys that all rows see.
  const int warp_row = first_row + row_warp * kBlockM;
  const int warp_rows = min(kBlockM, all_rows - warp_row);
  const int warp_token = min(warp_row, all_rows - 1) / p.group;
  const int warp_last_token = (min(warp_row + kBlockM, all_rows) - 1) / p.group;
  const int warp_begin = mask.first(warp_token) / kBlockN;
  const int warp_end = warp_rows > 0 ? max(0, mask.last(warp_last_token) + kBlockN) / kBlockN : 0;
  const bool only_scaled = p.modifiers.softcap <= 0.0f && p.modifiers.alibi_slopes == nullptr;
  const int all_first = mask.first(warp_last_token);
  const int all_last = only_scaled ? mask.last(warp_token) : -1;

  const unsigned shared_team = ptx::shared_address(shared_memory) + team * p.row_warps * kWarpBytes;
  const unsigned shared_warp = shared_team + row_warp * kWarpBytes;
  const char* const k_source = tile::source(p.k, p.k_stride, 0, head_kv, 0, lane);
  const char* const v_source = tile::source(p.v, p.v_stride, 0, head_kv, 0, lane);
  const int column = lane % 8 * 8;

  int own_slab = p.cache_batch_idx != nullptr ? p.cache_batch_idx[batch] : batch;
  if (own_slab >= p.slabs) own_slab = -1;
  const int* const block_table = p.pages.block_table;

  // The place of one key a lane, asked for a step before its copy begins: in a page table it is a load.
  auto locate = [&](int tile_index) {
    const int key = tile_index * kBlockN + lane % kBlockN;
    Place place = {own_slab, key + static_cast<int>(sequence.k_row)};
    if (block_table != nullptr) {
      const int index = static_cast<unsigned long long>(place.row) * p.pages.multiplier >> p.pages.shift;
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
    const unsigned k_tile = shared_warp + QueryTile::kBytes + stage * kStageBytes;
    const unsigned v_tile = k_tile + KeyTile::kBytes;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = pass * kRowsPerPass + lane / 8;
      const int slab = __shfl_sync(0xffffffffu, place.slab, row);
      const int slab_row = __shfl_sync(0xffffffffu, place.row, row);
      const char* const k = k_source + 2 * (slab * p.k_stride.batch + slab_row * p.k_stride.row);
      const char* const v = v_source + 2 * (slab * p.v_stride.batch + slab_row * p.v_stride.row);
      const unsigned offset = tile::swizzled(row, lane % 8);
#pragma unroll
      for (int panel = 0; panel < KeyTile::kPanels; ++panel) {
        ptx::cp_async_16(k_tile + offset + panel * KeyTile::kPanelBytes, k + panel * tile::kRowBytes,
                         slab >= 0 && column + panel * tile::kPanelColumns < p.head_dim ? 16 : 0);
      }
#pragma unroll
      for (int panel = 0; panel < KeyTile::kPanels; ++panel) {
        ptx::cp_async_16(v_tile + offset + panel * KeyTile::kPanelBytes, v + panel * tile::kRowBytes,
                         slab >= 0 && column + panel * tile::kPanelColumns < p.head_dim_v ? 16 : 0);
      }
    }
  };

  // Q: rows past the end are zeros.
#pragma unroll
  for (int pass = 0; pass < kBlockM / kRowsPerPass; ++pass) {
    const int row = pass * kRowsPerPass + lane / 8;
    const int r = warp_row + row;
    const int token = r / p.group;
    const char* const source =
        tile::source(p.q, p.q_stride, batch, head_kv * p.group + r - token * p.group, sequence.q_row + token, lane);
#pragma unroll
    for (int panel = 0; panel < QueryTile::kPanels; ++panel) {
      ptx::cp_async_16(shared_warp + panel * QueryTile::kPanelBytes + tile::swizzled(row, lane % 8),
                       source + panel * tile::kRowBytes,
                       row < warp_rows && column + panel * tile::kPanelColumns < p.head_dim ? 16 : 0);
    }
  }
  Place next_place = locate(begin + warp);
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) {
    const Place place = next_place;
    next_place = locate(begin + warp + (stage + 1) * kWarps);
    if (begin + warp + stage * kWarps < end) load(stage, place);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<kStages - 1>();  // Q came with the first tile
  __syncwarp();
  unsigned query[kHeadDim / 16][4];
  const tile::Fragment<true> query_fragment(shared_warp, lane);
  if constexpr (kQueryInRegisters) {
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) ptx::ldmatrix_x4(query[step], query_fragment.at<kBlockM>(0, step));
  }

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
    const int row = min(warp_row + lane / 4 + 8 * half, all_rows - 1);
    const int token = row / p.group;
    first[half] = mask.first(token);
    last[half] = mask.last(token);
    position[half] = token + mask.shift;
    if (p.modifiers.alibi_slopes != nullptr) {
      slope[half] =
          p.modifiers.alibi_slopes[batch * p.modifiers.alibi_batch_stride + head_kv * p.group + row % p.group] * kLog2e;
    }
  }

  // Some tiles, one after the other in the memory of neighbouring warps.
  auto attend = [&](auto count, int tile_index, unsigned k_tile) {
    constexpr int kTiles = decltype(count)::value;
    constexpr int kKeys = kTiles * kBlockN;
    float s[kKeys / 8][4];
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] = 0.0f;
    }
    const tile::Fragment<false> k_fragment(k_tile, lane);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      if constexpr (!kQueryInRegisters) ptx::ldmatrix_x4(query[step], query_fragment.at<kBlockM>(0, step));
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        unsigned k[4];
        ptx::ldmatrix_x4(k, k_fragment.at<kBlockN>(16 * j % kBlockN, step) + 16 * j / kBlockN * kWarpBytes);
        ptx::mma_16816<kBf16>(s[2 * j], query[step], k[0], k[1]);
        ptx::mma_16816<kBf16>(s[2 * j + 1], query[step], k[2], k[3]);
      }
    }

    const int first_key = tile_index * kBlockN;
    float block_max[2] = {ptx::kMinusInfinity, ptx::kMinusInfinity};
    if (first_key >= all_first && first_key + kKeys - 1 <= all_last) {
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[j][e] *= p.scale_log2;
          block_max[e / 2] = fmaxf(block_max[e / 2], s[j][e]);
        }
      }
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
          x = ptx::exp2(x - base);
          row_sum[half] += x;
        }
      }
    }
    const tile::Fragment<true> v_fragment(k_tile + KeyTile::kBytes, lane);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      const unsigned a[4] = {ptx::pack<kBf16>(s[2 * step][0], s[2 * step][1]),
                             ptx::pack<kBf16>(s[2 * step][2], s[2 * step][3]),
                             ptx::pack<kBf16>(s[2 * step + 1][0], s[2 * step + 1][1]),
                             ptx::pack<kBf16>(s[2 * step + 1][2], s[2 * step + 1][3])};
#pragma unroll
      for (int j = 0; j < kDimTiles / 2; ++j) {
        unsigned v[4];
        ptx::ldmatrix_x4_trans(v, v_fragment.at<kBlockN>(16 * step % kBlockN, j) + 16 * step / kBlockN * kWarpBytes);
        ptx::mma_16816<kBf16>(out[2 * j], a, v[0], v[1]);
        ptx::mma_16816<kBf16>(out[2 * j + 1], a, v[2], v[3]);
      }
    }
  };

  int stage = 0;
  for (int team_tile = begin + team * p.row_warps; team_tile < end; team_tile += kWarps) {
    ptx::cp_async_wait<kStages - 1>();
    sync_team(team, p.row_warps);
    const unsigned team_stage = shared_team + QueryTile::kBytes + stage * kStageBytes;
    const int last_tile = min(min(end, warp_end), team_tile + p.row_warps);
    int tile_index = max(team_tile, warp_begin);
    for (; tile_index + kTogether <= last_tile; tile_index += kTogether) {
      attend(Int<kTogether>(), tile_index, team_stage + (tile_index - team_tile) * kWarpBytes);
    }
    if constexpr (kTogether > 1) {
      if (tile_index < last_tile) attend(Int<1>(), tile_index, team_stage + (tile_index - team_tile) * kWarpBytes);
    }
    sync_team(team, p.row_warps);
    // Into the place of what all of the team have used.
    const int next = team_tile + row_warp + kStages * kWarps;
    const Place place = next_place;
    next_place = locate(next + kWarps);
    if (next < end) load(stage, place);
    ptx::cp_async_commit();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  // Each warp leaves its maxima, sums and sums of values; then all threads join them.
  ptx::cp_async_wait<0>();
  __syncthreads();
  char* const partial = shared_memory;
  {
    float* const mine = reinterpret_cast<float*>(partial + warp * kWarpBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = lane / 4 + 8 * half;
      if (lane % 4 == 0) {
        mine[16 * kPitch + 2 * row] = row_max[half];
        mine[16 * kPitch + 2 * row + 1] = sum;
      }
#pragma unroll
      for (int j = 0; j < kDimTiles; ++j) {
        *reinterpret_cast<float2*>(mine + row * kPitch + 8 * j + lane % 4 * 2) =
            make_float2(out[j][2 * half], out[j][2 * half + 1]);
      }
    }
  }
  __syncthreads();
  for (int i = thread; i < rows * (kHeadDim / 4); i += kThreads) {
    const int block_row = i / (kHeadDim / 4);
    const int c = i % (kHeadDim / 4) * 4;
    const int row = block_row % kBlockM;
    // The warps that had this row: one of each team.
    const auto had_row = [&](int w) { return w % p.row_warps == block_row / kBlockM; };
    float m = ptx::kMinusInfinity;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (had_row(w)) m = fmaxf(m, reinterpret_cast<const float*>(partial + w * kWarpBytes)[16 * kPitch + 2 * row]);
    }
    const int r = first_row + block_row;
    const int token = r / p.group;
    const int head = head_kv * p.group + r % p.group;
    const bool last_pass = p.splits == 1;
    const bool has_sink = last_pass && p.modifiers.sink != nullptr;
    const float sink = has_sink ? p.modifiers.sink[head] * kLog2e : ptx::kMinusInfinity;
    m = fmaxf(m, sink);
    const float base = m == ptx::kMinusInfinity ? 0.0f : m;
    float sum = has_sink ? ptx::exp2(sink - base) : 0.0f;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (!had_row(w)) continue;
      const float* const theirs = reinterpret_cast<const float*>(partial + w * kWarpBytes);
      const float factor = ptx::exp2(theirs[16 * kPitch + 2 * row] - base);
      const float4 x = *reinterpret_cast<const float4*>(theirs + row * kPitch + c);
      sum = fmaf(theirs[16 * kPitch + 2 * row + 1], factor, sum);
      value.x = fmaf(x.x, factor, value.x);
      value.y = fmaf(x.y, factor, value.y);
      value.z = fmaf(x.z, factor, value.z);
      value.w = fmaf(x.w, factor, value.w);
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const float lse = sum == 0.0f ? ptx::kMinusInfinity : m + ptx::log2(sum);
    const long long q_row = sequence.q_row + token;
    const long long flat = batch * p.lse_batch_stride + head * p.lse_head_stride + q_row;
    if (last_pass) {
      if (c < p.head_dim_v) {
        uint2 pair = make_uint2(ptx::pack<kBf16>(value.x * inverse, value.y * inverse),
                                ptx::pack<kBf16>(value.z * inverse, value.w * inverse));
        *reinterpret_cast<uint2*>(static_cast<char*>(p.out) +
                                  2 * (batch * p.out_stride.batch + q_row * p.out_stride.row +
                                       head * p.out_stride.head + c)) = pair;
      }
      if (c == 0) p.lse[flat] = lse * kLn2;
    } else {
      const long long at = split * p.lse_count + flat;
      if (c < p.head_dim_v) {
        *reinterpret_cast<float4*>(p.partial_out + at * p.head_dim_v + c) =
            make_float4(value.x * inverse, value.y * inverse, value.z * inverse, value.w * inverse);
      }
      if (c == 0) p.partial_lse[at] = lse;
    }
  }
}

// Joins the splits of a row: one block a row, lanes over columns, warps over splits.
extern "C" __global__ void __launch_bounds__(kThreads)
    flash_combine(const __grid_constant__ flash_attn::DecodeParams p) {
  ptx::wait_on_dependencies();
  __shared__ float4 parts[kWarps][32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const long long rows = p.lse_count;
  const long long row = blockIdx.x;
  // Of packed queries, which are one batch of all tokens, too.
  const int token = row % p.lse_head_stride;
  const long long head_index = row / p.lse_head_stride;
  const int head = head_index % p.heads;
  const int batch = head_index / p.heads;

  const bool has_sink = p.modifiers.sink != nullptr;
  const float sink = has_sink ? p.modifiers.sink[head] * kLog2e : ptx::kMinusInfinity;
  float m = sink;
  for (int split = lane; split < p.splits; split += 32) m = fmaxf(m, p.partial_lse[split * rows + row]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, offset));
  const float base = m == ptx::kMinusInfinity ? 0.0f : m;
  float sum = 0.0f;
  for (int split = lane; split < p.splits; split += 32) sum += ptx::exp2(p.partial_lse[split * rows + row] - base);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (has_sink) sum += ptx::exp2(sink - base);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (threadIdx.x == 0) p.lse[row] = sum == 0.0f ? ptx::kMinusInfinity : (m + ptx::log2(sum)) * kLn2;

  char* const out = static_cast<char*>(p.out) +
                    2 * (batch * p.out_stride.batch + token * p.out_stride.row + head * p.out_stride.head);
  const auto add = [](float4& sum, const float4& x, float weight) {
    sum.x = fmaf(x.x, weight, sum.x);
    sum.y = fmaf(x.y, weight, sum.y);
    sum.z = fmaf(x.z, weight, sum.z);
    sum.w = fmaf(x.w, weight, sum.w);
  };
  for (int first = 0; first < p.head_dim_v; first += 128) {
    const int c = first + lane * 4;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int split = warp; split < p.splits; split += kWarps) {
      const long long at = split * rows + row;
      const float weight = ptx::exp2(p.partial_lse[at] - base) * inverse;
      if (c < p.head_dim_v) add(value, *reinterpret_cast<const float4*>(p.partial_out + at * p.head_dim_v + c), weight);
    }
    __syncthreads();  // the columns before are read
    parts[warp][lane] = value;
    __syncthreads();
    if (warp != 0 || c >= p.head_dim_v) continue;
#pragma unroll
    for (int w = 1; w < kWarps; ++w) add(value, parts[w][lane], 1.0f);
    *reinterpret_cast<uint2*>(out + 2 * c) =
        make_uint2(ptx::pack<kBf16>(value.x, value.y), ptx::pack<kBf16>(value.z, value.w));
  }
}
