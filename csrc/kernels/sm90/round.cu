// From 16-bit q, k and v to e4m3, for the forward of fwd_fp8.cu: what flash_attn/fp8.py says in operations of torch.
// Fp8RoundingParams has the order of the three kernels.
//
// A row of kHeadDim columns is in the registers of kRowLanes lanes, 16 columns each, in two chunks of 8. Its Hadamard
// transform is of as many steps as a column's number has bits: those of the chunk and of its half are within a lane, the
// lanes' are shuffles. Rotated and rounded numbers are never in memory but as the result.
#include "common/dropout.cuh"
#include "common/ptx.cuh"
#include "params.h"

namespace {

using Params = flash_attn::Fp8RoundingParams;
using Task = flash_attn::Fp8RoundingTask;

constexpr int kHeadDim = FA_HEAD_DIM;
constexpr int kThreads = FA_WARPS * 32;
constexpr int kColumns = 16;  // of a lane
constexpr float kLargest = 448.0f;  // of e4m3
constexpr float kSmallestFactor = 1.17549435e-38f;  // the smallest normal float32
constexpr unsigned kAll = 0xffffffffu;

struct Rounding {
  static constexpr int kRowLanes = kHeadDim / kColumns;
  static constexpr int kRowsAtOnce = kThreads / kRowLanes;
  static constexpr int kTileRows = kRowsAtOnce * flash_attn::kFp8RoundingPasses;
  static constexpr int kWarps = kThreads / 32;
  static_assert(kRowLanes <= 32 && kHeadDim <= kThreads);

  // A lane's place in its row.
  int lane = threadIdx.x % kRowLanes;
  int row_of_block = threadIdx.x / kRowLanes;

  // First of the 8 columns of a lane's chunk.
  __device__ __forceinline__ int column(int chunk) const { return (lane + chunk * kRowLanes) * 8; }

  __device__ __forceinline__ void load(float (&x)[kColumns], const Params& p, const Task& task, int batch, int row,
                                       int head) const {
    const char* const source = static_cast<const char*>(task.source) +
                               2 * (batch * task.stride.batch + row * task.stride.row + head * task.stride.head);
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (row < task.rows && column(chunk) < task.columns) {
        v = *reinterpret_cast<const uint4*>(source + 2 * column(chunk));
      }
      const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& low = x[8 * chunk + 2 * i];
        float& high = x[8 * chunk + 2 * i + 1];
        if (p.bf16) {
          ptx::unpack<true>(words[i], low, high);
        } else {
          ptx::unpack<false>(words[i], low, high);
        }
      }
    }
  }

  // Takes the mean off, where there is one; what lies past the tensor's columns stays 0.
  __device__ __forceinline__ void subtract(float (&x)[kColumns], const float* mean, const Task& task) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (column(i / 8) < task.columns) x[i] -= mean[column(i / 8) + i % 8];
    }
  }

  __device__ __forceinline__ unsigned signs(int key) const {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      bits |= (dropout::mix(static_cast<unsigned>((column(i / 8) + i % 8) ^ key)) & 1) << i;
    }
    return bits;
  }

  static __device__ __forceinline__ float signed_by(float x, unsigned bits, int i) {
    return __uint_as_float(__float_as_uint(x) ^ (bits >> i & 1) << 31);
  }

  __device__ __forceinline__ void hadamard(float (&x)[kColumns]) const {
    auto within = [&](int step) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if ((i & step) != 0) continue;
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
    };
    within(1);
    within(2);
    within(4);
#pragma unroll
    for (int step = 1; step < kRowLanes; step *= 2) {
      const float sign = (lane & step) != 0 ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) x[i] = fmaf(x[i], sign, __shfl_xor_sync(kAll, x[i], step));
    }
    within(8);
  }

  // The sum of a row's numbers, one of each lane.
  static __device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
    for (int step = 1; step < kRowLanes; step *= 2) x += __shfl_xor_sync(kAll, x, step);
    return x;
  }

  // Of k (task 1) or v (task 2).
  static __device__ __forceinline__ float* sums_of(const Params& p, int task, int head, int part) {
    return p.sums + (static_cast<long long>((task - 1) * p.heads_kv + head) * p.parts + part) * kHeadDim;
  }

  // The mean of k or v in `mean` (kHeadDim), from its parts; for all threads of the block, which it joins.
  static __device__ __forceinline__ void mean_of_rows(float* mean, const Params& p, int task, int head) {
    if (threadIdx.x < kHeadDim) {
      float sum = 0.0f;
      for (int part = 0; part < p.parts; ++part) sum += sums_of(p, task, head, part)[threadIdx.x];
      mean[threadIdx.x] = sum / (static_cast<float>(p.task[task].rows) * p.batch);
    }
    __syncthreads();
  }

  // Which rows a block works on.
  struct Place {
    int task = 0, tile, head, batch;

    __device__ __forceinline__ explicit Place(const Params& p) {
      const int block = blockIdx.x;
      if (block >= p.task[1].first_block) task = 1;
      if (block >= p.task[2].first_block) task = 2;
      const Task& t = p.task[task];
      const int index = block - t.first_block;
      tile = index % t.tiles;
      head = index / t.tiles % t.heads;
      batch = index / t.tiles / t.heads;
    }

    __device__ __forceinline__ int factor(const Params& p) const {
      const int group = p.task[task].heads / p.heads_kv;
      return (task * p.batch + batch) * p.heads_kv + head / group;
    }
  };

  // flash_round_sums: of a part of the rows of each head of k and v; and zeros for flash_round_largest.
  __device__ __forceinline__ void sums(const Params& p) const {
    __shared__ float of_warps[kWarps][kHeadDim];
    if (blockIdx.x == 0) {
      for (int i = threadIdx.x; i < 3 * p.batch * p.heads_kv; i += kThreads) p.largest[i] = 0.0f;
    }
    if (p.parts == 0) return;
    const int part = blockIdx.x % p.parts;
    const int head = blockIdx.x / p.parts % p.heads_kv;
    const int number = 1 + blockIdx.x / p.parts / p.heads_kv;
    const Task& task = p.task[number];
    if (task.smooth == 0) return;
    const long long rows = static_cast<long long>(p.batch) * task.rows;
    const long long of_part = (rows + p.parts - 1) / p.parts;
    const long long begin = part * of_part;
    const long long end = min(begin + of_part, rows);
    float total[kColumns] = {};
    for (long long row = begin + row_of_block; row < end; row += kRowsAtOnce) {
      float x[kColumns];
      const int batch = static_cast<int>(row / task.rows);
      load(x, p, task, batch, static_cast<int>(row - static_cast<long long>(batch) * task.rows), head);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) total[i] += x[i];
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
#pragma unroll
      for (int step = kRowLanes; step < 32; step *= 2) total[i] += __shfl_xor_sync(kAll, total[i], step);
      if (threadIdx.x % 32 < kRowLanes) of_warps[threadIdx.x / 32][column(i / 8) + i % 8] = total[i];
    }
    __syncthreads();
    if (threadIdx.x < kHeadDim) {
      float sum = 0.0f;
      for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp][threadIdx.x];
      sums_of(p, number, head, part)[threadIdx.x] = sum;
    }
  }

  // flash_round_largest: of each sequence and KV head, the largest magnitude of what is going to be rounded.
  __device__ __forceinline__ void largest(const Params& p) const {
    __shared__ float mean[kHeadDim];
    const Place place(p);
    const Task& task = p.task[place.task];
    if (task.smooth != 0) mean_of_rows(mean, p, place.task, place.head);
    const unsigned sign_bits = task.rotate ? signs(p.key) : 0;
    float most = 0.0f;
#pragma unroll 1
    for (int pass = 0; pass < flash_attn::kFp8RoundingPasses; ++pass) {
      const int row = place.tile * kTileRows + pass * kRowsAtOnce + row_of_block;
      float x[kColumns];
      load(x, p, task, place.batch, row, place.head);
      if (task.smooth != 0 && row < task.rows) subtract(x, mean, task);
      if (task.rotate) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) x[i] = signed_by(x[i], sign_bits, i);
        hadamard(x);
      }
#pragma unroll
      for (int i = 0; i < kColumns; ++i) most = fmaxf(most, fabsf(x[i]));
    }
    if (task.rotate) most *= p.scale;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, step));
    // Floats that are not negative are in the order of their bits.
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<int*>(p.largest) + place.factor(p), __float_as_int(most));
  }

  // flash_round: the numbers, and their factors.
  __device__ __forceinline__ void round(const Params& p) const {
    __shared__ float mean[kHeadDim];
    const Place place(p);
    const Task& task = p.task[place.task];
    if (task.smooth != 0) mean_of_rows(mean, p, place.task, place.head);
    const float of_largest = p.largest[place.factor(p)] / kLargest;
    const float descale = of_largest >= kSmallestFactor ? of_largest : 1.0f;
    if (place.tile == 0 && threadIdx.x == 0) p.descale[place.factor(p)] = descale;
    if (place.task == 2 && task.smooth != 0 && place.tile == 0 && place.batch == 0 && threadIdx.x < kHeadDim) {
      p.v_mean[place.head * kHeadDim + threadIdx.x] = mean[threadIdx.x];
    }
    const float inverse = 1.0f / descale;
    const unsigned sign_bits = task.rotate ? signs(p.key) : 0;
    const int width = task.rotate ? kHeadDim : task.columns;
#pragma unroll 1
    for (int pass = 0; pass < flash_attn::kFp8RoundingPasses; ++pass) {
      const int row = place.tile * kTileRows + pass * kRowsAtOnce + row_of_block;
      float x[kColumns];
      load(x, p, task, place.batch, row, place.head);
      if (task.smooth != 0 && row < task.rows) subtract(x, mean, task);
      unsigned words[kColumns / 4];
      if (task.rotate) {
        rotate_and_round(x, words, p, task, sign_bits, descale);
      } else {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) x[i] *= inverse;
        pack(words, x);
      }
      if (row >= task.rows) continue;
      char* const out = static_cast<char*>(task.destination) +
                        ((static_cast<long long>(place.batch) * task.rows + row) * task.heads + place.head) * width;
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        if (column(chunk) < width) {
          *reinterpret_cast<uint2*>(out + column(chunk)) = make_uint2(words[2 * chunk], words[2 * chunk + 1]);
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ void pack(unsigned (&words)[kColumns / 4], const float (&x)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) words[i] = ptx::pack_e4m3(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }

  // Rounds the rotated row; then twice once more, where a share of an outlier's error was taken off first.
  __device__ __forceinline__ void rotate_and_round(const float (&x)[kColumns], unsigned (&words)[kColumns / 4],
                                                   const Params& p, const Task& task, unsigned sign_bits,
                                                   float descale) const {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) squares = fmaf(x[i], x[i], squares);
    const float limit = p.outlier * (sum_of_row(squares) / task.columns);
    const float factor = p.scale / descale;
    float target[kColumns], rotated[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) target[i] = x[i];
    auto round_target = [&] {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) rotated[i] = signed_by(target[i], sign_bits, i);
      hadamard(rotated);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) rotated[i] *= factor;
      pack(words, rotated);
    };
    round_target();
#pragma unroll
    for (int again = 0; again < 2; ++again) {
      // The error in the columns of x: rotated back, rounded numbers and signs are exact.
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        ptx::unpack_e4m3(words[i], rotated[4 * i], rotated[4 * i + 1], rotated[4 * i + 2], rotated[4 * i + 3]);
      }
      hadamard(rotated);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float error = x[i] - signed_by(rotated[i], sign_bits, i) * (descale * p.scale);
        if (x[i] * x[i] > limit) target[i] = fmaf(p.share, error, target[i]);
      }
      round_target();
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_round_sums(const __grid_constant__ flash_attn::Fp8RoundingParams p) {
  ptx::launch_dependents();
  ptx::wait_on_dependencies();
  Rounding().sums(p);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_round_largest(const __grid_constant__ flash_attn::Fp8RoundingParams p) {
  ptx::launch_dependents();
  ptx::wait_on_dependencies();
  Rounding().largest(p);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_round(const __grid_constant__ flash_attn::Fp8RoundingParams p) {
  ptx::wait_on_dependencies();
  Rounding().round(p);
}
