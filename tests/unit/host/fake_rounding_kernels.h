// The kernels that round q, k and v to FP8 on host memory; see fake_kernels.h.
#pragma once

#include <map>
#include <tuple>

#include "fake_fp8_kernels.h"

namespace fake {

using flash_attn::Fp8RoundingParams;
using flash_attn::Fp8RoundingTask;

inline uint8_t to_e4m3(float x) {
  if (std::isnan(x)) return 0x7f;
  const uint8_t sign = std::signbit(x) ? 128 : 0;
  const float magnitude = std::min(std::fabs(x), 448.f);
  if (magnitude < std::ldexp(1.f, -6)) return sign | static_cast<uint8_t>(std::nearbyint(std::ldexp(magnitude, 9)));
  int exponent = std::max(std::ilogb(magnitude), -6);
  int mantissa = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  if (mantissa == 16) mantissa = 8, ++exponent;
  return sign | static_cast<uint8_t>((exponent + 7) << 3 | (mantissa - 8));
}

// All of one launch's work.
class Rounding {
 public:
  Rounding(const Fp8RoundingParams& p, Kind kind, unsigned grid, unsigned threads)
      : p_(p),
        columns_(kind.head_dim),
        grid_(static_cast<int>(grid)),
        piece_(std::min(columns_, flash_attn::kFp8RotatedColumns)),
        tile_rows_(static_cast<int>(threads) / 2 * piece_ / columns_ * flash_attn::kFp8RoundingPasses) {
    for (const Fp8RoundingTask& task : p.task) {
      require(task.columns % 16 == 0 && task.columns <= columns_, "columns");
      require(reinterpret_cast<uintptr_t>(task.source) % 16 == 0 && reinterpret_cast<uintptr_t>(task.destination) % 16 == 0,
              "misaligned tensor");
      require(task.tiles == (task.rows + tile_rows_ - 1) / tile_rows_, "tiles");
    }
  }

  void sums() const {
    require(grid_ == std::max(1, 2 * p_.batch * p_.parts * p_.heads_kv), "grid of sums");
    for (int i = 0; i < 3 * p_.batch * p_.heads_kv; ++i) p_.largest[i] = 0;
    for (int number = 1; number < 3; ++number) {
      const Fp8RoundingTask& task = p_.task[number];
      if (task.smooth == 0) continue;
      require(p_.parts > 0, "no parts of a mean");
      for (int i = 0; i < p_.batch * p_.parts * p_.heads_kv; ++i) std::fill_n(sum(number, 0, 0, i), columns_, 0.f);
      for (int row = 0; row < p_.batch * task.rows; ++row) {
        for (int head = 0; head < task.heads; ++head) {
          const std::vector<float> x = read(task, row / task.rows, row % task.rows, head);
          for (int d = 0; d < columns_; ++d) sum(number, row / task.rows, head, row % p_.parts)[d] += x[d];
        }
      }
    }
  }

  void largest() const {
    for (int number = 1; number < 3; ++number) {
      for (int i = 0; p_.task[number].smooth != 0 && i < p_.batch * p_.heads_kv; ++i) {
        const std::vector<float> found = mean(number, i / p_.heads_kv, i % p_.heads_kv);
        std::copy(found.begin(), found.end(), p_.means + ((number - 1) * p_.batch * p_.heads_kv + i) * columns_);
      }
    }
    each_row([&](int number, int batch, int row, int head) {
      float& most = p_.largest[factor(number, batch, head)];
      for (const float x : rotated(number, less_mean(number, batch, row, head))) most = std::max(most, std::fabs(x));
    });
  }

  void round() const {
    for (int i = 0; i < 3 * p_.batch * p_.heads_kv; ++i) {
      const float descale = p_.largest[i] / 448;
      p_.descale[i] = descale >= std::numeric_limits<float>::min() ? descale : 1;
    }
    each_row([&](int number, int batch, int row, int head) {
      const Fp8RoundingTask& task = p_.task[number];
      const float descale = p_.descale[factor(number, batch, head)];
      const std::vector<float> x = less_mean(number, batch, row, head);
      std::vector<float> target = x, numbers = divided(rotated(number, x), descale);
      float squares = 0;
      for (const float value : x) squares += value * value;
      for (int again = 0; task.rotate && again < 2; ++again) {
        std::vector<float> back = hadamard(numbers);
        for (int d = 0; d < task.columns; ++d) {
          const float error = x[d] - back[d] * sign(d) * descale * p_.scale;
          if (x[d] * x[d] > p_.outlier * squares / task.columns) target[d] += p_.share * error;
        }
        numbers = divided(rotated(number, target), descale);
      }
      const int width = task.rotate ? columns_ : task.columns;
      uint8_t* const out = static_cast<uint8_t*>(task.destination) +
                           ((static_cast<long long>(batch) * task.rows + row) * task.heads + head) * width;
      for (int d = 0; d < width; ++d) out[d] = to_e4m3(numbers[d]);
    });
  }

 private:
  template <typename Function>
  void each_row(Function function) const {
    for (int block = 0; block < grid_; ++block) {
      const int number = block >= p_.task[2].first_block ? 2 : block >= p_.task[1].first_block ? 1 : 0;
      const Fp8RoundingTask& task = p_.task[number];
      const int index = block - task.first_block, head_index = index / task.tiles;
      require(head_index < p_.batch * task.heads, "more blocks than tiles");
      const int first = index % task.tiles * tile_rows_;
      for (int row = first; row < std::min(first + tile_rows_, task.rows); ++row) {
        function(number, head_index / task.heads, row, head_index % task.heads);
      }
    }
  }

  int factor(int number, int batch, int head) const {
    return (number * p_.batch + batch) * p_.heads_kv + head / (p_.task[number].heads / p_.heads_kv);
  }

  std::vector<float> read(const Fp8RoundingTask& task, int batch, int row, int head) const {
    const uint16_t* const source = static_cast<const uint16_t*>(task.source) + batch * task.stride.batch +
                                   row * task.stride.row + head * task.stride.head;
    std::vector<float> x(columns_, 0.f);
    for (int d = 0; d < task.columns; ++d) x[d] = from_half(source[d], p_.bf16 != 0);
    return x;
  }

  std::vector<float> less_mean(int number, int batch, int row, int head) const {
    const Fp8RoundingTask& task = p_.task[number];
    std::vector<float> x = read(task, batch, row, head);
    if (task.smooth == 0) return x;
    std::vector<float>& off = means_[{number, batch, head}];
    if (off.empty()) off = mean(number, batch, head);
    for (int d = 0; d < task.columns; ++d) x[d] -= off[d];
    return x;
  }

  float* sum(int number, int batch, int head, int part) const {
    return p_.sums + ((((number - 1) * p_.batch + batch) * p_.heads_kv + head) * p_.parts + part) * columns_;
  }

  std::vector<float> mean(int number, int batch, int head) const {
    std::vector<float> found(columns_, 0.f);
    for (int part = 0; part < p_.parts; ++part) {
      for (int d = 0; d < columns_; ++d) {
        found[d] += sum(number, batch, head, part)[d] / static_cast<float>(p_.task[number].rows);
      }
    }
    return found;
  }

  float sign(int column) const {
    return (dropout::mix(static_cast<unsigned>(column ^ p_.key)) & 1) != 0 ? -1.f : 1.f;
  }

  std::vector<float> hadamard(std::vector<float> x) const {
    for (int step = 1; step < piece_; step *= 2) {
      for (int d = 0; d < columns_; ++d) {
        if ((d & step) != 0) continue;
        const float a = x[d], b = x[d + step];
        x[d] = a + b;
        x[d + step] = a - b;
      }
    }
    return x;
  }

  std::vector<float> rotated(int number, std::vector<float> x) const {
    if (p_.task[number].rotate == 0) return x;
    for (int d = 0; d < columns_; ++d) x[d] *= sign(d);
    x = hadamard(x);
    for (float& value : x) value *= p_.scale;
    return x;
  }

  // In numbers of e4m3.
  static std::vector<float> divided(std::vector<float> x, float descale) {
    for (float& value : x) value = from_e4m3(to_e4m3(value / descale));
    return x;
  }

  const Fp8RoundingParams p_;
  mutable std::map<std::tuple<int, int, int>, std::vector<float>> means_;
  int columns_, grid_, piece_, tile_rows_;
};

}  // namespace fake
