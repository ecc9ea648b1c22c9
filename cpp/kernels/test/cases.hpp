// Inputs for deformable attention and the expected result in float64, for the tests of the kernel and of the plugin.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../ms_deform_attn.hpp"

namespace detrt::kernels::test {

enum class Places { uniform, local, hostile }; // of samples: anywhere, around their query, also outside and NaN

struct Case {
  std::string name;
  std::int64_t batch, heads, dim, queries;
  std::vector<std::int64_t> shapes; // height, width of each level
  std::vector<std::int32_t> points;
  Places places = Places::uniform;
  bool discrete = false, shapes64 = true;

  std::int64_t tokens() const {
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < shapes.size(); i += 2)
      sum += shapes[i] * shapes[i + 1];
    return sum;
  }
  std::int64_t all_points() const {
    std::int64_t sum = 0;
    for (const std::int32_t count : points)
      sum += count;
    return sum;
  }
  // A call without its memory and its method.
  MsDeformAttn call(FloatType type, FloatType weights_type) const {
    MsDeformAttn call;
    call.shapes_are_int64 = shapes64;
    call.value_type = type;
    call.weights_type = weights_type;
    call.discrete = discrete;
    call.batch = batch;
    call.tokens = tokens();
    call.heads = heads;
    call.dim = dim;
    call.queries = queries;
    call.points = points;
    return call;
  }
  std::int64_t samples() const { return batch * queries * heads * all_points(); }
  std::int64_t outputs() const { return batch * queries * heads * dim; }
};

inline float through(float x, FloatType type) {
  return type == FloatType::fp16   ? __half2float(__float2half_rn(x))
         : type == FloatType::bf16 ? __bfloat162float(__float2bfloat16_rn(x))
                                   : x;
}

inline std::size_t size_of(FloatType type) {
  return type == FloatType::fp32 ? 4 : 2;
}

inline std::vector<unsigned char> bytes_of(const std::vector<float>& numbers, FloatType type) {
  std::vector<unsigned char> bytes(numbers.size() * size_of(type));
  for (std::size_t i = 0; i < numbers.size(); ++i)
    if (type == FloatType::fp32)
      reinterpret_cast<float*>(bytes.data())[i] = numbers[i];
    else if (type == FloatType::fp16)
      reinterpret_cast<__half*>(bytes.data())[i] = __float2half_rn(numbers[i]);
    else
      reinterpret_cast<__nv_bfloat16*>(bytes.data())[i] = __float2bfloat16_rn(numbers[i]);
  return bytes;
}

inline std::vector<float> numbers_of(const std::vector<unsigned char>& bytes, FloatType type) {
  std::vector<float> numbers(bytes.size() / size_of(type));
  for (std::size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = type == FloatType::fp32   ? reinterpret_cast<const float*>(bytes.data())[i]
                 : type == FloatType::fp16 ? __half2float(reinterpret_cast<const __half*>(bytes.data())[i])
                                           : __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(bytes.data())[i]);
  return numbers;
}

// Numbers that are already rounded to the types that the kernel gets.
struct Inputs {
  std::vector<float> value, locations, weights;
};

inline Inputs inputs_of(const Case& c, FloatType value_type, FloatType weights_type, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  Inputs in;
  in.value.resize(static_cast<std::size_t>(c.batch * c.tokens() * c.heads * c.dim));
  for (float& x : in.value)
    x = through(normal(random), value_type);
  in.weights.resize(static_cast<std::size_t>(c.samples()));
  const std::size_t points = static_cast<std::size_t>(c.all_points());
  for (std::size_t row = 0; points > 0 && row < in.weights.size(); row += points) { // a softmax
    float sum = 0.0f;
    for (std::size_t p = 0; p < points; ++p)
      sum += in.weights[row + p] = std::exp(normal(random));
    for (std::size_t p = 0; p < points; ++p)
      in.weights[row + p] = through(in.weights[row + p] / sum, weights_type);
  }
  in.locations.reserve(in.weights.size() * 2);
  for (std::int64_t b = 0; b < c.batch; ++b)
    for (std::int64_t q = 0; q < c.queries; ++q) {
      // Reference point of a query: its own pixel if every token is a query, else anywhere.
      float x = uniform(random), y = uniform(random);
      if (c.queries == c.tokens()) {
        std::int64_t left = q;
        for (std::size_t level = 0; level < c.points.size(); ++level) {
          const std::int64_t height = c.shapes[2 * level], width = c.shapes[2 * level + 1];
          if (left < height * width) {
            x = (static_cast<float>(left % width) + 0.5f) / static_cast<float>(width);
            y = (static_cast<float>(left / width) + 0.5f) / static_cast<float>(height);
            break;
          }
          left -= height * width;
        }
      }
      for (std::int64_t h = 0; h < c.heads; ++h)
        for (std::size_t level = 0; level < c.points.size(); ++level)
          for (std::int32_t p = 0; p < c.points[level]; ++p) {
            const float height = static_cast<float>(c.shapes[2 * level]),
                        width = static_cast<float>(c.shapes[2 * level + 1]);
            float u = uniform(random), v = uniform(random);
            if (c.places ==
                Places::local) { // as in an untrained Deformable DETR: one direction per head, one step per point
              const float angle = 6.2831853f * static_cast<float>(h) / static_cast<float>(c.heads),
                          step = static_cast<float>(p + 1);
              u = x + (std::cos(angle) * step + 0.5f * normal(random)) / width;
              v = y + (std::sin(angle) * step + 0.5f * normal(random)) / height;
            } else if (c.places == Places::hostile) {
              u = 1.6f * u - 0.3f;
              v = 1.6f * v - 0.3f;
              const float what = uniform(random), inf = std::numeric_limits<float>::infinity();
              if (what < 0.02f)
                u = std::numeric_limits<float>::quiet_NaN();
              else if (what < 0.04f)
                v = inf;
              else if (what < 0.06f)
                u = -inf;
              else if (what < 0.08f)
                v = 3e38f;
              else if (what < 0.12f)
                u = -0.5f / width; // on the edge of the level
              else if (what < 0.16f)
                v = 1.0f;
            }
            in.locations.push_back(u);
            in.locations.push_back(v);
          }
    }
  return in;
}

inline std::vector<double> reference(const Case& c, const Inputs& in) {
  std::vector<double> out(static_cast<std::size_t>(c.outputs()), 0.0);
  const std::int64_t points = c.all_points(), tokens = c.tokens();
  for (std::int64_t b = 0; b < c.batch; ++b)
    for (std::int64_t q = 0; q < c.queries; ++q)
      for (std::int64_t h = 0; h < c.heads; ++h) {
        const std::int64_t row = (b * c.queries + q) * c.heads + h;
        std::int64_t start = 0, point = row * points;
        for (std::size_t level = 0; level < c.points.size(); ++level) {
          const std::int64_t height = c.shapes[2 * level], width = c.shapes[2 * level + 1];
          for (std::int32_t p = 0; p < c.points[level]; ++p, ++point) {
            const float u = in.locations[static_cast<std::size_t>(2 * point)],
                        v = in.locations[static_cast<std::size_t>(2 * point + 1)];
            const double weight = static_cast<double>(in.weights[static_cast<std::size_t>(point)]);
            const auto add = [&](std::int64_t x, std::int64_t y, double share) {
              const float* cell = in.value.data() + ((b * tokens + start + y * width + x) * c.heads + h) * c.dim;
              for (std::int64_t d = 0; d < c.dim; ++d)
                out[static_cast<std::size_t>(row * c.dim + d)] += share * static_cast<double>(cell[d]);
            };
            if (std::isnan(u) || std::isnan(v) || height * width == 0)
              continue;
            if (c.discrete) { // the pixel is selected in FP32, as in PyTorch
              const volatile float wide = u * static_cast<float>(width), high = v * static_cast<float>(height);
              const double x = std::fmin(std::fmax(std::trunc(static_cast<double>(wide + 0.5f)), 0.0),
                                         static_cast<double>(width - 1));
              const double y = std::fmin(std::fmax(std::trunc(static_cast<double>(high + 0.5f)), 0.0),
                                         static_cast<double>(height - 1));
              add(static_cast<std::int64_t>(x), static_cast<std::int64_t>(y), weight);
              continue;
            }
            const double x = static_cast<double>(u) * static_cast<double>(width) - 0.5,
                         y = static_cast<double>(v) * static_cast<double>(height) - 0.5;
            if (!(x > -1.0 && x < static_cast<double>(width) && y > -1.0 && y < static_cast<double>(height)))
              continue;
            const std::int64_t x0 = static_cast<std::int64_t>(std::floor(x)),
                               y0 = static_cast<std::int64_t>(std::floor(y));
            for (int down = 0; down < 2; ++down)
              for (int right = 0; right < 2; ++right) {
                const double across = x - static_cast<double>(x0), along = y - static_cast<double>(y0);
                if (x0 + right >= 0 && x0 + right < width && y0 + down >= 0 && y0 + down < height)
                  add(x0 + right, y0 + down, (right ? across : 1.0 - across) * (down ? along : 1.0 - along) * weight);
              }
          }
          start += height * width;
        }
      }
  return out;
}

// Norm of the difference and largest difference, relative to those of the reference. Infinite for NaN.
struct Error {
  double norm, largest;
};

inline Error error_of(const std::vector<float>& got, const std::vector<double>& wanted) {
  double difference = 0.0, total = 0.0, largest = 0.0, highest = 0.0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const double d = std::abs(static_cast<double>(got[i]) - wanted[i]);
    if (!std::isfinite(d))
      return {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
    difference += d * d;
    total += wanted[i] * wanted[i];
    largest = std::fmax(largest, d);
    highest = std::fmax(highest, std::abs(wanted[i]));
  }
  if (total == 0.0)
    return {difference == 0.0 ? 0.0 : std::numeric_limits<double>::infinity(), largest};
  return {std::sqrt(difference / total), largest / highest};
}

// Allowed norm of the error, against float64 on the same rounded inputs.
inline double allowed(FloatType type) {
  return type == FloatType::fp32 ? 1e-5 : type == FloatType::fp16 ? 1e-3 : 8e-3;
}
inline const char* name_of(FloatType type) {
  return type == FloatType::fp32 ? "fp32" : type == FloatType::fp16 ? "fp16" : "bf16";
}

inline const std::vector<std::int64_t>& coco_levels() { // 800x1333 with strides 8 to 64: 22 223 tokens
  static const std::vector<std::int64_t> levels{100, 167, 50, 84, 25, 42, 13, 21};
  return levels;
}

// Every path of the kernel once: dims with and without whole words, levels, points, edges, empty sides.
inline std::vector<Case> small_cases() {
  using V = std::vector<std::int64_t>;
  using P = std::vector<std::int32_t>;
  std::vector<Case> cases{
      {"32 channels", 2, 8, 32, 150, V{20, 30, 10, 15, 5, 8, 3, 4}, P{4, 4, 4, 4}},
      {"every token a query", 1, 8, 32, 155, V{10, 12, 5, 6, 1, 5}, P{4, 4, 4}, Places::local},
      {"hostile places", 2, 8, 32, 133, V{20, 30, 10, 15, 5, 8, 3, 4}, P{4, 4, 4, 4}, Places::hostile},
      {"hostile places, 64 channels", 1, 4, 64, 77, V{9, 13, 4, 5}, P{4, 4}, Places::hostile},
      {"hostile places, 16 channels", 1, 4, 16, 77, V{9, 13, 4, 5}, P{4, 4}, Places::hostile},
      {"hostile places, 20 channels", 1, 4, 20, 77, V{9, 13, 4, 5}, P{4, 4}, Places::hostile, false, false},
      {"discrete", 2, 8, 32, 90, V{20, 30, 10, 15, 5, 8}, P{4, 4, 4}, Places::hostile, true},
      {"discrete, 20 channels", 1, 3, 20, 31, V{7, 9}, P{3}, Places::hostile, true, false},
      {"24 channels, 3 heads", 1, 3, 24, 41, V{11, 7, 6, 4}, P{3, 5}},
      {"40 channels", 1, 2, 40, 33, V{11, 7}, P{4}},
      {"48 channels, int32 shapes", 2, 6, 48, 33, V{11, 7, 5, 3}, P{4, 2}, Places::uniform, false, false},
      {"56 channels", 1, 2, 56, 9, V{11, 7}, P{7}},
      {"8 channels", 1, 2, 8, 33, V{11, 7}, P{4}},
      {"128 channels", 1, 2, 128, 33, V{11, 7}, P{4}},
      {"1 channel", 1, 1, 1, 5, V{3, 3}, P{1}},
      {"odd channels", 1, 5, 7, 21, V{11, 7, 1, 1}, P{2, 1}},
      {"1 query, 1 point", 1, 8, 32, 1, V{13, 17}, P{1}},
      {"uneven points", 1, 8, 32, 50, V{16, 16, 8, 8, 4, 4}, P{3, 6, 3}},
      {"a level without points", 1, 8, 32, 50, V{16, 16, 8, 8, 4, 4}, P{4, 0, 5}},
      {"40 points", 1, 8, 32, 20, V{16, 16, 8, 8}, P{25, 15}},
      {"cells of one row", 1, 8, 32, 20, V{1, 40, 40, 1, 1, 1}, P{4, 4, 4}, Places::hostile},
      {"an empty level", 1, 8, 32, 20, V{8, 8, 0, 5, 4, 4}, P{4, 4, 4}, Places::hostile},
      {"an empty level, discrete", 1, 8, 32, 20, V{8, 8, 0, 5, 4, 4}, P{4, 4, 4}, Places::hostile, true},
      {"wide levels", 1, 1, 32, 500, V{300, 480, 150, 240}, P{4, 4}},
      {"empty batch", 0, 8, 32, 20, V{8, 8}, P{4}},
      {"no queries", 2, 8, 32, 0, V{8, 8}, P{4}},
      {"no points", 1, 8, 32, 20, V{8, 8}, P{0}},
      {"no tokens", 1, 8, 32, 20, V{0, 0}, P{4}},
  };
  return cases;
}

} // namespace detrt::kernels::test
