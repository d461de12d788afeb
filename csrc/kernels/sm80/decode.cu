// Attention of few query tokens with a long KV cache, in slabs or pages (flash decoding, split-KV).
//
// The time is that of reading K and V once. The query heads that share a KV head, and the tokens, are packed into the 16
// rows of a tile; each warp walks its own keys with its own cp.async pipeline and never waits for another warp. A cache is
// cut into p.splits parts by its length on the device, so that the host needs no synchronisation to balance the work;
// flash_combine joins the parts.
#include "common/problem.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"

namespace {

constexpr int kHeadDim = FA_HEAD_DIM;
constexpr int kBlockM = FA_BLOCK_M;
constexpr int kBlockN = FA_BLOCK_N;  // keys a warp takes in one step
constexpr int kWarps = FA_WARPS;
constexpr int kStages = FA_STAGES;
constexpr bool kBf16 = FA_BF16;

constexpr int kThreads = kWarps * 32;
constexpr int kKeyTiles = kBlockN / 8;
constexpr int kDimTiles = kHeadDim / 8;
constexpr float kSlack = 8.0f;
constexpr float kLog2e = 1.4426950408889634074f;
constexpr float kLn2 = 0.69314718055994530942f;
static_assert(kBlockM == 16 && kBlockN % 16 == 0);

using QueryTile = tile::Copy<16, kHeadDim, 128>;  // for its layout
using KeyTile = tile::Copy<kBlockN, kHeadDim, kBlockN * 8>;
constexpr int kRowsPerPass = 4;  // a warp copies 4 rows of 128 bytes at a time
constexpr int kPasses = kBlockN / kRowsPerPass;
constexpr int kStageBytes = 2 * KeyTile::kBytes;
constexpr int kWarpBytes = kStages * kStageBytes;
static_assert(QueryTile::kBytes + kWarps * kWarpBytes == FA_SMEM_BYTES, "kernels.toml: smem of decode");
// The partial results of the warps take the place of K and V.
constexpr int kPitch = kHeadDim + 8;  // floats: rows of a half-warp's stores lie in different banks
constexpr int kPartialBytes = 16 * kPitch * 4 + 16 * 8;
static_assert(kPartialBytes <= kWarpBytes);

extern __shared__ __align__(1024) char shared_memory[];

// Where a key of a sequence lies: row `row` of slab or page `slab`; slab -1 where no memory belongs to it.
struct CacheRow {
  int slab, row;

  __device__ __forceinline__ CacheRow(const flash_attn::DecodeParams& p, int batch, int key) {
    if (p.pages.block_table == nullptr) {
      slab = p.cache_batch_idx != nullptr ? p.cache_batch_idx[batch] : batch;
      if (slab >= p.slabs) slab = -1;
      row = key;
      return;
    }
    const int index = key / p.pages.page_size;
    slab = p.pages.block_table[batch * p.pages.table_batch_stride + index];
    row = key - index * p.pages.page_size;
    if (slab < 0 || slab >= p.pages.page_count) slab = -1;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, FA_MIN_BLOCKS)
    flash_decode(const __grid_constant__ flash_attn::DecodeParams p) {
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;
  ptx::launch_dependents();

  int index = blockIdx.x;
  const int split = index % p.splits;
  index /= p.splits;
  const int row_tile = index % p.row_tiles;
  index /= p.row_tiles;
  const int batch = index / p.heads_kv;
  const int head_kv = index - batch * p.heads_kv;
  const int first_row = row_tile * kBlockM;
  const int rows = min(kBlockM, p.group * p.seqlen_q - first_row);
  const problem::Sequence sequence(p, batch);
  const problem::Mask mask(sequence, p.modifiers);

  // This block's keys: its split of what any of its rows sees.
  const int first_token = first_row / p.group;
  const int last_token = (first_row + rows - 1) / p.group;
  const int tile_first = mask.first(first_token) / kBlockN;
  const int tile_last = max(0, mask.last(last_token) + kBlockN) / kBlockN;
  const int tiles_per_split = (max(0, tile_last - tile_first) + p.splits - 1) / p.splits;
  const int begin = tile_first + split * tiles_per_split;
  const int end = min(tile_last, begin + tiles_per_split);

  const unsigned shared_q = ptx::shared_address(shared_memory);
  const unsigned shared_warp = shared_q + QueryTile::kBytes + warp * kWarpBytes;
  const char* const k_source = tile::source(p.k, p.k_stride, 0, head_kv, 0, lane);
  const char* const v_source = tile::source(p.v, p.v_stride, 0, head_kv, 0, lane);
  const int column = lane % 8 * 8;

  auto load = [&](int tile_index, int stage) {
    const unsigned k_tile = shared_warp + stage * kStageBytes;
    const unsigned v_tile = k_tile + KeyTile::kBytes;
    // All look-ups first: with page tables they are loads, which then overlap.
    const char* k_rows[kPasses];
    const char* v_rows[kPasses];
    bool exists[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int key = tile_index * kBlockN + pass * kRowsPerPass + lane / 8;
      k_rows[pass] = k_source;
      v_rows[pass] = v_source;
      exists[pass] = key < sequence.seqlen_k;
      if (exists[pass]) {
        const CacheRow at(p, batch, key + static_cast<int>(sequence.k_row));
        exists[pass] = at.slab >= 0;
        k_rows[pass] += 2 * (at.slab * p.k_stride.batch + at.row * p.k_stride.row);
        v_rows[pass] += 2 * (at.slab * p.v_stride.batch + at.row * p.v_stride.row);
      }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const unsigned offset = tile::swizzled(pass * kRowsPerPass + lane / 8, lane % 8);
#pragma unroll
      for (int panel = 0; panel < KeyTile::kPanels; ++panel) {
        ptx::cp_async_16(k_tile + offset + panel * KeyTile::kPanelBytes, k_rows[pass] + panel * tile::kRowBytes,
                         exists[pass] && column + panel * tile::kPanelColumns < p.head_dim ? 16 : 0);
      }
#pragma unroll
      for (int panel = 0; panel < KeyTile::kPanels; ++panel) {
        ptx::cp_async_16(v_tile + offset + panel * KeyTile::kPanelBytes, v_rows[pass] + panel * tile::kRowBytes,
                         exists[pass] && column + panel * tile::kPanelColumns < p.head_dim_v ? 16 : 0);
      }
    }
  };

  // Q: rows past the end are zeros.
  for (int i = thread; i < 16 * 8 * QueryTile::kPanels; i += kThreads) {
    const int panel = i / 128;
    const int row = i / 8 % 16;
    const int r = first_row + row;
    const int c = i % 8 * 8 + panel * tile::kPanelColumns;
    const char* const source = static_cast<const char*>(p.q) +
                               2 * (batch * p.q_stride.batch + r / p.group * p.q_stride.row +
                                    (head_kv * p.group + r % p.group) * p.q_stride.head + c);
    ptx::cp_async_16(shared_q + panel * QueryTile::kPanelBytes + tile::swizzled(row, i % 8), source,
                     row < rows && c < p.head_dim ? 16 : 0);
  }
  ptx::cp_async_commit();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (begin + warp + stage * kWarps < end) load(begin + warp + stage * kWarps, stage);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<kStages - 1>();
  __syncthreads();
  unsigned query[kHeadDim / 16][4];
  const tile::Fragment<true> query_fragment(shared_q, lane);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) ptx::ldmatrix_x4(query[step], query_fragment.at<16>(0, step));

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
    const int row = min(first_row + lane / 4 + 8 * half, p.group * p.seqlen_q - 1);
    const int token = row / p.group;
    first[half] = mask.first(token);
    last[half] = mask.last(token);
    position[half] = token + mask.shift;
    if (p.modifiers.alibi_slopes != nullptr) {
      slope[half] =
          p.modifiers.alibi_slopes[batch * p.modifiers.alibi_batch_stride + head_kv * p.group + row % p.group] * kLog2e;
    }
  }

  int stage = 0;
  for (int tile_index = begin + warp; tile_index < end; tile_index += kWarps) {
    const int next = tile_index + (kStages - 1) * kWarps;
    const int next_stage = stage == 0 ? kStages - 1 : stage - 1;
    __syncwarp();
    if (next < end) load(next, next_stage);
    ptx::cp_async_commit();
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
    const unsigned k_tile = shared_warp + stage * kStageBytes;
    stage = stage + 1 == kStages ? 0 : stage + 1;

    float s[kKeyTiles][4];
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] = 0.0f;
    }
    const tile::Fragment<false> k_fragment(k_tile, lane);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
      for (int j = 0; j < kKeyTiles / 2; ++j) {
        unsigned k[4];
        ptx::ldmatrix_x4(k, k_fragment.at<kBlockN>(16 * j, step));
        ptx::mma_16816<kBf16>(s[2 * j], query[step], k[0], k[1]);
        ptx::mma_16816<kBf16>(s[2 * j + 1], query[step], k[2], k[3]);
      }
    }

    const int key = tile_index * kBlockN + lane % 4 * 2;
    const float softcap = p.modifiers.softcap;
    float block_max[2] = {ptx::kMinusInfinity, ptx::kMinusInfinity};
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
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
      for (int j = 0; j < kKeyTiles; ++j) {
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
    for (int step = 0; step < kBlockN / 16; ++step) {
      const unsigned a[4] = {ptx::pack<kBf16>(s[2 * step][0], s[2 * step][1]),
                             ptx::pack<kBf16>(s[2 * step][2], s[2 * step][3]),
                             ptx::pack<kBf16>(s[2 * step + 1][0], s[2 * step + 1][1]),
                             ptx::pack<kBf16>(s[2 * step + 1][2], s[2 * step + 1][3])};
#pragma unroll
      for (int j = 0; j < kDimTiles / 2; ++j) {
        unsigned v[4];
        ptx::ldmatrix_x4_trans(v, v_fragment.at<kBlockN>(16 * step, j));
        ptx::mma_16816<kBf16>(out[2 * j], a, v[0], v[1]);
        ptx::mma_16816<kBf16>(out[2 * j + 1], a, v[2], v[3]);
      }
    }
  }

  // Each warp leaves its maxima, sums and sums of values; then all threads join them.
  ptx::cp_async_wait<0>();
  __syncthreads();
  char* const partial = shared_memory + QueryTile::kBytes;
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
    const int row = i / (kHeadDim / 4);
    const int c = i % (kHeadDim / 4) * 4;
    float m = ptx::kMinusInfinity;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      m = fmaxf(m, reinterpret_cast<const float*>(partial + w * kWarpBytes)[16 * kPitch + 2 * row]);
    }
    const int r = first_row + row;
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
    const long long flat = (static_cast<long long>(batch) * p.heads + head) * p.seqlen_q + token;
    if (last_pass) {
      if (c < p.head_dim_v) {
        uint2 pair = make_uint2(ptx::pack<kBf16>(value.x * inverse, value.y * inverse),
                                ptx::pack<kBf16>(value.z * inverse, value.w * inverse));
        *reinterpret_cast<uint2*>(static_cast<char*>(p.out) +
                                  2 * (batch * p.out_stride.batch + token * p.out_stride.row +
                                       head * p.out_stride.head + c)) = pair;
      }
      if (c == 0) p.lse[flat] = lse * kLn2;
    } else {
      const long long at = split * (static_cast<long long>(p.batch) * p.heads * p.seqlen_q) + flat;
      if (c < p.head_dim_v) {
        *reinterpret_cast<float4*>(p.partial_out + at * p.head_dim_v + c) =
            make_float4(value.x * inverse, value.y * inverse, value.z * inverse, value.w * inverse);
      }
      if (c == 0) p.partial_lse[at] = lse;
    }
  }
}

// Joins the splits of a row: one warp a row, lanes over columns.
extern "C" __global__ void __launch_bounds__(kThreads)
    flash_combine(const __grid_constant__ flash_attn::DecodeParams p) {
  ptx::wait_on_dependencies();
  const int lane = threadIdx.x % 32;
  const long long rows = static_cast<long long>(p.batch) * p.heads * p.seqlen_q;
  const long long row = static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int token = row % p.seqlen_q;
  const long long head_index = row / p.seqlen_q;
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
  if (lane == 0) p.lse[row] = sum == 0.0f ? ptx::kMinusInfinity : (m + ptx::log2(sum)) * kLn2;

  char* const out = static_cast<char*>(p.out) +
                    2 * (batch * p.out_stride.batch + token * p.out_stride.row + head * p.out_stride.head);
  for (int c = lane * 4; c < p.head_dim_v; c += 128) {
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int split = 0; split < p.splits; ++split) {
      const float weight = ptx::exp2(p.partial_lse[split * rows + row] - base) * inverse;
      const float4 x = *reinterpret_cast<const float4*>(p.partial_out + (split * rows + row) * p.head_dim_v + c);
      value.x = fmaf(x.x, weight, value.x);
      value.y = fmaf(x.y, weight, value.y);
      value.z = fmaf(x.z, weight, value.z);
      value.w = fmaf(x.w, weight, value.w);
    }
    *reinterpret_cast<uint2*>(out + 2 * c) =
        make_uint2(ptx::pack<kBf16>(value.x, value.y), ptx::pack<kBf16>(value.z, value.w));
  }
}
