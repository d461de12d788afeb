// From 16-bit q, k and v to e4m3, for the forward: what flash_attn/fp8.py says in operations of torch.
// Fp8RoundingParams has the order of the three kernels.
//
// A warp holds 16 rows of kPiece columns, as operands of mma.m16n8k16: of each 32 columns a lane has 8 consecutive ones of
// two rows, 16 bytes in memory, which are columns 2t, 2t + 1, 2t + 8 and 2t + 9 (t = lane % 4) of two logical tiles of 16
// columns. A Hadamard matrix of kPiece rows is the Kronecker product of one for the tiles and one of 16 rows: tensor cores
// multiply by the latter, exactly, as its numbers are 1 and -1, and tiles are then added up within a lane. An accumulator is
// where its operand was, so that all that follows is within a lane as well. Rotated numbers are never in memory but rounded.
//
// What is rotated is in bf16 (fp16 sources too, whose last bits are nothing beside the three bits of the result).
#include "common/dropout.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"

namespace {

using Params = flash_attn::Fp8RoundingParams;
using Task = flash_attn::Fp8RoundingTask;

constexpr int kHeadDim = FA_HEAD_DIM;
constexpr int kThreads = FA_WARPS * 32;
constexpr int kPiece = kHeadDim < flash_attn::kFp8RotatedColumns ? kHeadDim : flash_attn::kFp8RotatedColumns;  // columns
constexpr int kPieces = kHeadDim / kPiece;               // of a row, each another warp's
constexpr int kChunks = kPiece / 32;                     // of 8 columns, of a lane and row
constexpr int kTiles = kPiece / 16;
constexpr int kTileRows = FA_WARPS / kPieces * 16 * flash_attn::kFp8RoundingPasses;  // of a block
static_assert(FA_WARPS % kPieces == 0);
constexpr float kLargest = 448.0f;                  // of e4m3
constexpr float kSmallestFactor = 1.17549435e-38f;  // the smallest normal float32
constexpr unsigned kAll = 0xffffffffu;

// 16-bit columns in pairs: [chunk][row, row + 8][pair]. As operands, pairs 2h and 2h + 1 are of tile 2 chunk + h.
using Pairs = unsigned[kChunks][2][4];
// Their rotated numbers: [tile][pair of the tile][row, row + 8 and column of the pair].
using Sums = float[kTiles][2][4];
// The same in e4m3, four columns a register.
using Words = unsigned[kChunks][2][2];

__device__ __forceinline__ uint4 load(const Task& task, int batch, int row, int head, int column) {
  // What is outside of the tensor is read from within, and thrown away: a branch for each would cost more.
  const bool inside = row < task.rows && column < task.columns;
  const char* const source =
      static_cast<const char*>(task.source) +
      2 * (batch * task.stride.batch + head * task.stride.head + (inside ? row * task.stride.row + column : 0));
  const uint4 raw = *reinterpret_cast<const uint4*>(source);
  return inside ? raw : make_uint4(0, 0, 0, 0);
}

// Of a head of a sequence of k (task 1) or v (task 2).
__device__ __forceinline__ long long mean_index(const Params& p, int task, int batch, int head) {
  return static_cast<long long>((task - 1) * p.batch + batch) * p.heads_kv + head;
}

__device__ __forceinline__ float* sums_of(const Params& p, long long mean, int part) {
  return p.sums + (mean * p.parts + part) * kHeadDim;
}

// Which rows a block works on.
struct Place {
  int number = 0, tile, head, batch;  // of the task

  __device__ __forceinline__ explicit Place(const Params& p) {
    const int block = blockIdx.x;
    if (block >= p.task[1].first_block) number = 1;
    if (block >= p.task[2].first_block) number = 2;
    const Task& task = p.task[number];
    const int index = block - task.first_block;
    tile = index % task.tiles;
    head = index / task.tiles % task.heads;
    batch = index / task.tiles / task.heads;
  }

  __device__ __forceinline__ int factor(const Params& p) const {
    const int group = p.task[number].heads / p.heads_kv;
    return (number * p.batch + batch) * p.heads_kv + head / group;
  }
};

// What all rows of a block share, in shared memory: the mean that is taken off, and the signs of the rotation as they are
// applied to pairs.
struct Shared {
  float mean[kHeadDim];
  unsigned signs[kHeadDim / 2];

  // By all threads of the block, which it joins. The mean comes from its parts, or is known.
  template <bool kKnown>
  __device__ __forceinline__ void fill(const Params& p, const Place& place) {
    const Task& task = p.task[place.number];
    for (int i = threadIdx.x; i < kHeadDim; i += kThreads) {
      float sum = 0.0f;
      if (task.smooth != 0) {
        const long long mean = mean_index(p, place.number, place.batch, place.head);
        float* const known = p.means + mean * kHeadDim + i;
        if (kKnown) {
          sum = *known;
        } else {
#pragma unroll 16
          for (int part = 0; part < p.parts; ++part) sum += sums_of(p, mean, part)[i];
          sum /= static_cast<float>(task.rows);
          if (place.tile == 0) *known = sum;
        }
      }
      mean[i] = sum;
    }
    for (int i = threadIdx.x; i < kHeadDim / 2; i += kThreads) {
      auto sign = [&](int column) { return dropout::mix(static_cast<unsigned>(column ^ p.key)) << 31; };
      signs[i] = task.rotate != 0 ? sign(2 * i) >> 16 | sign(2 * i + 1) : 0;
    }
    __syncthreads();
  }
};

// A warp's part of a row, and a lane's of that.
struct Lane {
  int first_row = threadIdx.x / 32 / kPieces * 16 + threadIdx.x % 32 / 4;  // of two, 8 apart, in a pass
  int first_column = threadIdx.x / 32 % kPieces * kPiece + threadIdx.x % 4 * 8;

  static constexpr int kStep = FA_WARPS / kPieces * 16;  // rows of a pass

  __device__ __forceinline__ int row(const Place& place, int pass, int half) const {
    return place.tile * kTileRows + pass * kStep + first_row + 8 * half;
  }
  __device__ __forceinline__ int column(int chunk) const { return first_column + 32 * chunk; }
};

template <bool kBf16>
__device__ __forceinline__ void unpack(float (&x)[8], uint4 raw) {
  ptx::unpack<kBf16>(raw.x, x[0], x[1]);
  ptx::unpack<kBf16>(raw.y, x[2], x[3]);
  ptx::unpack<kBf16>(raw.z, x[4], x[5]);
  ptx::unpack<kBf16>(raw.w, x[6], x[7]);
}

// For each chunk of each of a lane's two rows in a pass, f(chunk, half, its 8 numbers less the mean). Rows that the tensor
// does not have are the mean's negative.
template <bool kBf16, typename Function>
__device__ __forceinline__ void for_chunks(const Task& task, const Place& place, const Shared& shared, const Lane& lane,
                                           int pass, Function f) {
  uint4 raw[2][kChunks];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      raw[half][c] = load(task, place.batch, lane.row(place, pass, half), place.head, lane.column(c));
    }
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const float* const mean = shared.mean + lane.column(c);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[8];
      unpack<kBf16>(x, raw[half][c]);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] -= mean[i];
      f(c, half, x);
    }
  }
}

// Of a pass, in bf16, with their signs.
template <bool kBf16>
__device__ __forceinline__ void load_pairs(Pairs& pairs, const Task& task, const Place& place, const Shared& shared,
                                           const Lane& lane, int pass) {
  for_chunks<kBf16>(task, place, shared, lane, pass, [&](int c, int half, const float(&x)[8]) {
    const unsigned* const signs = shared.signs + lane.column(c) / 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[c][half][i] = ptx::pack<true>(x[2 * i], x[2 * i + 1]) ^ signs[i];
  });
}

// A lane's share of the Hadamard matrix of 16 rows, as the second operand: [columns 0 to 7, 8 to 15][rows].
template <bool kBf16>
struct Hadamard {
  unsigned of[2][2];

  __device__ __forceinline__ Hadamard() {
    const int row = threadIdx.x % 4 * 2, column = threadIdx.x % 32 / 4;
    constexpr unsigned kOne = kBf16 ? 0x3f80 : 0x3c00;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      auto number = [&](int r) { return kOne | (__popc(r & (column + i / 2 * 8)) & 1) << 15; };
      of[i / 2][i % 2] = number(row + i % 2 * 8) | number(row + i % 2 * 8 + 1) << 16;
    }
  }

  // Adds `tile` times the matrix.
  __device__ __forceinline__ void multiply(float (&sums)[2][4], const unsigned (&tile)[4]) const {
    ptx::mma_16816<kBf16>(sums[0], tile, of[0][0], of[0][1]);
    ptx::mma_16816<kBf16>(sums[1], tile, of[1][0], of[1][1]);
  }
};

// The matrix for the tiles.
__device__ __forceinline__ void add_tiles(Sums& sums) {
#pragma unroll
  for (int step = 1; step < kTiles; step *= 2) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if ((tile & step) != 0) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& low = sums[tile][i / 4][i % 4];
        float& high = sums[tile + step][i / 4][i % 4];
        const float a = low, b = high;
        low = a + b;
        high = a - b;
      }
    }
  }
}

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int i = 0; i < kTiles * 8; ++i) sums[i / 8][i / 4 % 2][i % 4] = 0.0f;
}

// sums += pairs * matrix, but for add_tiles.
__device__ __forceinline__ void multiply(Sums& sums, const Pairs& pairs, const Hadamard<true>& matrix) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const unsigned(&chunk)[2][4] = pairs[tile / 2];
    const int first = tile % 2 * 2;
    matrix.multiply(sums[tile], {chunk[0][first], chunk[1][first], chunk[0][first + 1], chunk[1][first + 1]});
  }
}

__device__ __forceinline__ void multiply(Sums& sums, const Words& words, const Hadamard<false>& matrix) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    unsigned pairs[4];
    ptx::unpack_e4m3(words[tile / 2][0][tile % 2], pairs[0], pairs[2]);
    ptx::unpack_e4m3(words[tile / 2][1][tile % 2], pairs[1], pairs[3]);
    matrix.multiply(sums[tile], pairs);
  }
}

__device__ __forceinline__ void pack(Words& words, const Sums& sums, float factor) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const first = sums[tile][0] + 2 * half;
      const float* const second = sums[tile][1] + 2 * half;
      words[tile / 2][half][tile % 2] =
          ptx::pack_e4m3(first[0] * factor, first[1] * factor, second[0] * factor, second[1] * factor);
    }
  }
}

// The pass's rows, rotated and rounded; then twice once more, where a share of an outlier's error was taken off first.
__device__ __forceinline__ void rotate_and_round(Words& words, const Pairs& x, const Params& p, const Task& task,
                                                 const Lane& lane, float descale) {
  const Hadamard<true> matrix;
  const Hadamard<false> back;
  const int columns = min(kPiece, task.columns - lane.first_column / kPiece * kPiece);
  float limit[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks * 4; ++i) {
      float low, high;
      ptx::unpack<true>(x[i / 4][half][i % 4], low, high);
      squares = fmaf(low, low, fmaf(high, high, squares));
    }
    squares += __shfl_xor_sync(kAll, squares, 1);
    squares += __shfl_xor_sync(kAll, squares, 2);
    limit[half] = p.outlier * (squares / columns);
  }
  const float factor = p.scale / descale;
  const float to_error = -descale * p.scale;
  Pairs added = {};  // to x
#pragma unroll
  for (int again = 0;; ++again) {
    Sums sums;
    clear(sums);
    multiply(sums, x, matrix);
    if (again > 0) multiply(sums, added, matrix);
    add_tiles(sums);
    pack(words, sums, factor);
    if (again == 2) break;
    // The error in the columns of x: rotated back, rounded numbers are exact.
    clear(sums);
    multiply(sums, words, back);
    add_tiles(sums);
#pragma unroll
    for (int i = 0; i < kChunks * 8; ++i) {
      const int chunk = i / 8, half = i / 4 % 2, pair = i % 4;
      const float* const rounded = sums[2 * chunk + pair / 2][pair % 2] + 2 * half;
      float numbers[2], more[2];
      ptx::unpack<true>(x[chunk][half][pair], numbers[0], numbers[1]);
      ptx::unpack<true>(added[chunk][half][pair], more[0], more[1]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float error = fmaf(rounded[j], to_error, numbers[j]);
        if (numbers[j] * numbers[j] > limit[half]) more[j] = fmaf(p.share, error, more[j]);
      }
      added[chunk][half][pair] = ptx::pack<true>(more[0], more[1]);
    }
  }
}

}  // namespace

// Sums of a part of the rows of each head of each sequence of k and v; and zeros for flash_round_largest.
extern "C" __global__ void __launch_bounds__(kThreads, FA_MIN_BLOCKS)
    flash_round_sums(const __grid_constant__ flash_attn::Fp8RoundingParams p) {
  constexpr int kRowLanes = kHeadDim / 8;
  constexpr int kRows = kThreads / kRowLanes;
  constexpr int kAhead = 8;  // loads under way
  __shared__ float of_rows[kRows][kHeadDim];
  ptx::launch_dependents();
  ptx::wait_on_dependencies();
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < 3 * p.batch * p.heads_kv; i += kThreads) p.largest[i] = 0.0f;
  }
  if (p.parts == 0) return;
  const int part = blockIdx.x % p.parts;
  const int head = blockIdx.x / p.parts % p.heads_kv;
  const int batch = blockIdx.x / p.parts / p.heads_kv % p.batch;
  const int number = 1 + blockIdx.x / p.parts / p.heads_kv / p.batch;
  const Task task = p.task[number];
  if (task.smooth == 0) return;
  const int column = threadIdx.x % kRowLanes * 8;
  const int of_part = (task.rows + p.parts - 1) / p.parts;
  const int begin = part * of_part;
  const int end = min(task.rows, begin + of_part);
  float total[8] = {};
  auto add = [&](auto bf16) {
    for (int row = begin + threadIdx.x / kRowLanes; row < end; row += kAhead * kRows) {
      uint4 raw[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        raw[i] = load(task, batch, row + i * kRows < end ? row + i * kRows : task.rows, head, column);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        float x[8];
        unpack<decltype(bf16)::value>(x, raw[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) total[j] += x[j];
      }
    }
  };
  if (p.bf16) {
    add(tile::True{});
  } else {
    add(tile::False{});
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) of_rows[threadIdx.x / kRowLanes][column + j] = total[j];
  __syncthreads();
  for (int i = threadIdx.x; i < kHeadDim; i += kThreads) {
    float sum = 0.0f;
    for (int row = 0; row < kRows; ++row) sum += of_rows[row][i];
    sums_of(p, mean_index(p, number, batch, head), part)[i] = sum;
  }
}

// Of each sequence and KV head, the largest magnitude of what is going to be rounded.
extern "C" __global__ void __launch_bounds__(kThreads, FA_MIN_BLOCKS)
    flash_round_largest(const __grid_constant__ flash_attn::Fp8RoundingParams p) {
  __shared__ Shared shared;
  ptx::launch_dependents();
  ptx::wait_on_dependencies();
  const Place place(p);
  const Task task = p.task[place.number];
  shared.fill<false>(p, place);
  const Lane lane;
  const Hadamard<true> matrix;
  float most = 0.0f;
  auto work = [&](auto bf16) {
    constexpr bool kBf16 = decltype(bf16)::value;
#pragma unroll 1
    for (int pass = 0; pass < flash_attn::kFp8RoundingPasses; ++pass) {
      if (place.tile * kTileRows + pass * Lane::kStep >= task.rows) break;
      float of_row[2] = {};
      if (task.rotate != 0) {
        Pairs x;
        load_pairs<kBf16>(x, task, place, shared, lane, pass);
        Sums sums;
        clear(sums);
        multiply(sums, x, matrix);
        add_tiles(sums);
#pragma unroll
        for (int i = 0; i < kTiles * 8; ++i) of_row[i / 2 % 2] = fmaxf(of_row[i / 2 % 2], fabsf(sums[i / 8][i / 4 % 2][i % 4]));
      } else {
        for_chunks<kBf16>(task, place, shared, lane, pass, [&](int, int half, const float(&x)[8]) {
#pragma unroll
          for (int i = 0; i < 8; ++i) of_row[half] = fmaxf(of_row[half], fabsf(x[i]));
        });
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (lane.row(place, pass, half) < task.rows) most = fmaxf(most, of_row[half]);
      }
    }
  };
  if (p.bf16) {
    work(tile::True{});
  } else {
    work(tile::False{});
  }
  if (task.rotate != 0) most *= p.scale;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, step));
  // Floats that are not negative are in the order of their bits.
  if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<int*>(p.largest) + place.factor(p), __float_as_int(most));
}

// The numbers, and their factors.
extern "C" __global__ void __launch_bounds__(kThreads, FA_MIN_BLOCKS)
    flash_round(const __grid_constant__ flash_attn::Fp8RoundingParams p) {
  __shared__ Shared shared;
  ptx::wait_on_dependencies();
  const Place place(p);
  const Task task = p.task[place.number];
  shared.fill<true>(p, place);
  const Lane lane;
  const float of_largest = p.largest[place.factor(p)] / kLargest;
  const float descale = of_largest >= kSmallestFactor ? of_largest : 1.0f;
  const float inverse = 1.0f / descale;
  if (place.tile == 0 && threadIdx.x == 0) p.descale[place.factor(p)] = descale;
  const int width = task.rotate != 0 ? kHeadDim : task.columns;
#pragma unroll 1
  for (int pass = 0; pass < flash_attn::kFp8RoundingPasses; ++pass) {
    if (place.tile * kTileRows + pass * Lane::kStep >= task.rows) break;
    Words words;
    Pairs pairs;
    auto read = [&](auto bf16) {
      constexpr bool kBf16 = decltype(bf16)::value;
      if (task.rotate != 0) {
        load_pairs<kBf16>(pairs, task, place, shared, lane, pass);
      } else {
        for_chunks<kBf16>(task, place, shared, lane, pass, [&](int c, int half, float(&x)[8]) {
#pragma unroll
          for (int i = 0; i < 8; ++i) x[i] *= inverse;
          words[c][half][0] = ptx::pack_e4m3(x[0], x[1], x[2], x[3]);
          words[c][half][1] = ptx::pack_e4m3(x[4], x[5], x[6], x[7]);
        });
      }
    };
    if (p.bf16) {
      read(tile::True{});
    } else {
      read(tile::False{});
    }
    if (task.rotate != 0) rotate_and_round(words, pairs, p, task, lane, descale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row(place, pass, half);
      char* const out = static_cast<char*>(task.destination) +
                        ((static_cast<long long>(place.batch) * task.rows + row) * task.heads + place.head) * width;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (row < task.rows && lane.column(c) < width) {
          *reinterpret_cast<uint2*>(out + lane.column(c)) = make_uint2(words[c][half][0], words[c][half][1]);
        }
      }
    }
  }
}
