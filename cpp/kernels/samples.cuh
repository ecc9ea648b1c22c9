// Common code of all methods: the levels as a table in shared memory, and a location as four pixels and their weights.
#pragma once

#include <cmath>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ms_deform_attn.hpp"

namespace detrt::kernels::device {

struct Ends {
  std::int32_t end[max_levels]; // points of the levels up to and including this one
};

struct Call {
  const void* value;
  const void* shapes;
  const float* locations;
  const void* weights;
  void* out;
  std::int64_t batch, tokens, heads, dim, queries;
  std::int64_t tiles; // of queries, for each image and head
  std::int32_t points, levels, passes;
  bool shapes_are_int64;
  Ends ends;
  std::uint32_t beside, beside_bits; // heads per group of threads, a power of two
};

// One row per point. A level that is empty, or that does not fit into the tokens, is so small that no location lies
// inside.
struct Level {
  float width, height, start, unused;

  __device__ static Level missing() { return {-2.0f, -2.0f, 0.0f, 0.0f}; }
  __device__ static Level of(std::int64_t height, std::int64_t width, std::int64_t start) {
    return {static_cast<float>(width), static_cast<float>(height), static_cast<float>(start), 0.0f};
  }
};

// The same for samples without masks. A missing level (`half`), or a missing second column or row of a level (`next_x`,
// `next_y`), is infinitely far away.
struct alignas(16) BlockLevel {
  float width, height, start, half;
  float next_x, next_y, right, under; // right, under: pixels to the next column and row

  __device__ static BlockLevel missing() { return {1.0f, 1.0f, 0.0f, HUGE_VALF, HUGE_VALF, HUGE_VALF, 0.0f, 0.0f}; }
  __device__ static BlockLevel of(std::int64_t height, std::int64_t width, std::int64_t start) {
    BlockLevel row = missing();
    row.width = static_cast<float>(width);
    row.height = static_cast<float>(height);
    row.start = static_cast<float>(start);
    row.half = 0.5f;
    if (width > 1)
      row.next_x = row.right = 1.0f;
    if (height > 1) {
      row.next_y = 1.0f;
      row.under = row.width;
    }
    return row;
  }
};

__device__ __forceinline__ std::int64_t side_of(const Call& call, int index) {
  return call.shapes_are_int64 ? static_cast<const long long*>(call.shapes)[index]
                               : static_cast<const int*>(call.shapes)[index];
}

// rows: the points rounded up, so that whole groups may read the table.
template <class Row> __device__ __forceinline__ void fill_table(const Call& call, Row* table, int rows) {
  for (int point = static_cast<int>(threadIdx.x); point < rows; point += static_cast<int>(blockDim.x)) {
    Row row = Row::missing();
    std::int64_t start = 0;
    for (int level = 0; level < call.levels && point < call.points; ++level) {
      const std::int64_t height = side_of(call, 2 * level), width = side_of(call, 2 * level + 1);
      const bool fits = height > 0 && width > 0 && height <= call.tokens && width <= call.tokens &&
                        start <= call.tokens - height * width;
      if (point < call.ends.end[level]) {
        if (fits)
          row = Row::of(height, width, start);
        break;
      }
      // After a level that does not fit no level fits: the start remains after the last token.
      start = fits ? start + height * width : (height == 0 || width == 0 ? start : call.tokens + 1);
    }
    table[point] = row;
  }
}

// 2^23: an FP32 sum with it holds the integer in its last bits.
constexpr float whole = 8388608.0f;
constexpr unsigned whole_bits = 0x4B000000u;

template <bool Discrete> struct Sample {
  static constexpr int corners = Discrete ? 1 : 4;
  float weight[corners];
  unsigned cell[corners]; // of the image, counted from whole_bits
};

// All corners are pixels of the level, also those of a sample with weight zero. Exact: the rounding error of x is
// relative to x, which on a level of 500 pixels exceeds that of the FP32 sums; so the fractions are computed again,
// with one rounding after the large numbers have cancelled.
template <bool Discrete, bool Exact = false>
__device__ __forceinline__ Sample<Discrete> sample_of(const Level& level, float2 location, float weight) {
  Sample<Discrete> sample;
  const float last_x = level.width - 1.0f, last_y = level.height - 1.0f;
  if constexpr (Discrete) {
    // Two roundings, as in PyTorch, because the centre of a pixel is a tie.
    const float x = __fadd_rn(__fmul_rn(location.x, level.width), 0.5f),
                y = __fadd_rn(__fmul_rn(location.y, level.height), 0.5f);
    const bool number = x == x && y == y && level.width > 0.0f;
    // fmaxf returns the other argument of NaN.
    const float column = fminf(fmaxf(truncf(x), 0.0f), fmaxf(last_x, 0.0f)),
                row = fminf(fmaxf(truncf(y), 0.0f), fmaxf(last_y, 0.0f));
    sample.weight[0] = number ? weight : 0.0f;
    sample.cell[0] = __float_as_uint(fmaf(row, level.width, level.start + whole) + column);
  } else {
    float x = fmaf(location.x, level.width, -0.5f), y = fmaf(location.y, level.height, -0.5f);
    const bool inside = x > -1.0f && x < level.width && y > -1.0f && y < level.height; // false for NaN
    x = inside ? x : 0.0f;
    y = inside ? y : 0.0f;
    weight = inside ? weight : 0.0f;
    constexpr float magic = 1.5f * whole; // rounding down to integers, also below zero
    const float x0 = __fadd_rd(x, magic) - magic, y0 = __fadd_rd(y, magic) - magic;
    float right = x - x0, low = y - y0;
    if constexpr (Exact) {
      right = inside ? fmaf(location.x, level.width, -0.5f - x0) : right;
      low = inside ? fmaf(location.y, level.height, -0.5f - y0) : low;
    }
    const float x1 = x0 + 1.0f, y1 = y0 + 1.0f;
    const float left_share = x0 >= 0.0f ? 1.0f - right : 0.0f, right_share = x1 < level.width ? right : 0.0f;
    const float top_share = (y0 >= 0.0f ? 1.0f - low : 0.0f) * weight,
                low_share = (y1 < level.height ? low : 0.0f) * weight;
    sample.weight[0] = left_share * top_share;
    sample.weight[1] = right_share * top_share;
    sample.weight[2] = left_share * low_share;
    sample.weight[3] = right_share * low_share;
    const float column0 = fmaxf(x0, 0.0f), column1 = fmaxf(fminf(x1, last_x), 0.0f);
    const float row0 = fmaf(fmaxf(y0, 0.0f), level.width, level.start + whole);
    const float row1 = fmaf(fmaxf(fminf(y1, last_y), 0.0f), level.width, level.start + whole);
    sample.cell[0] = __float_as_uint(row0 + column0);
    sample.cell[1] = __float_as_uint(row0 + column1);
    sample.cell[2] = __float_as_uint(row1 + column0);
    sample.cell[3] = __float_as_uint(row1 + column1);
  }
  return sample;
}

__device__ __forceinline__ Sample<false> sample_of(const BlockLevel& level, float2 location, float weight) {
  Sample<false> sample;
  // The block of four pixels is moved into the level, and the weight of a pixel is one minus its distance, at least
  // zero, so
  // that no masks are needed. x - 1 / 2, rounded, is the pixel to the left, or exactly on a pixel possibly the one
  // before. fminf and fmaxf return the other argument of NaN, and __saturatef zero.
  constexpr float magic = 1.5f * whole;
  const float first_x = magic + fmaxf(level.width - 2.0f, 0.0f), first_y = magic + fmaxf(level.height - 2.0f, 0.0f);
  const float column = fminf(fmaxf(fmaf(location.x, level.width, magic - 1.0f), magic), first_x) - magic,
              row = fminf(fmaxf(fmaf(location.y, level.height, magic - 1.0f), magic), first_y) - magic;
  const float x = fmaf(location.x, level.width, -level.half) - column,
              y = fmaf(location.y, level.height, -level.half) - row;
  const float left = __saturatef(1.0f - fabsf(x)), right = __saturatef(1.0f - fabsf(x - level.next_x));
  const float top = __saturatef(1.0f - fabsf(y)) * weight, low = __saturatef(1.0f - fabsf(y - level.next_y)) * weight;
  sample.weight[0] = left * top;
  sample.weight[1] = right * top;
  sample.weight[2] = left * low;
  sample.weight[3] = right * low;
  const float cell = fmaf(row, level.width, level.start + whole) + column;
  sample.cell[0] = __float_as_uint(cell);
  sample.cell[1] = __float_as_uint(cell + level.right);
  sample.cell[2] = __float_as_uint(cell + level.under);
  sample.cell[3] = __float_as_uint(cell + level.under + level.right);
  return sample;
}

__device__ __forceinline__ float as_float(float x) {
  return x;
}
__device__ __forceinline__ float as_float(__half x) {
  return __half2float(x);
}
__device__ __forceinline__ float as_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <class T> __device__ __forceinline__ T rounded(float x);
template <> __device__ __forceinline__ float rounded<float>(float x) {
  return x;
}
template <> __device__ __forceinline__ __half rounded<__half>(float x) {
  return __float2half_rn(x);
}
template <> __device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

} // namespace detrt::kernels::device
