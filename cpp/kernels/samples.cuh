// What all methods share: the levels as a table in shared memory, and a location as four cells and their weights.
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
  std::uint32_t beside, beside_bits; // heads side by side, a power of two
  bool shapes_are_int64;
  Ends ends;
};

// One row a point. A level that is empty, or that does not fit into the tokens, is infinitely far away (`half`); so is
// the second column or row of a level that has one (`next_x`, `next_y`).
struct alignas(16) Level {
  float width = 1.0f, height = 1.0f, start = 0.0f, half = HUGE_VALF;
  float next_x = HUGE_VALF, next_y = HUGE_VALF, right = 0.0f, under = 0.0f; // cells to the next column and row
};

__device__ __forceinline__ std::int64_t side_of(const Call& call, int index) {
  return call.shapes_are_int64 ? static_cast<const long long*>(call.shapes)[index]
                               : static_cast<const int*>(call.shapes)[index];
}

// rows: the points rounded up, so that whole groups may read the table.
__device__ inline void fill_table(const Call& call, Level* table, int rows) {
  for (int point = static_cast<int>(threadIdx.x); point < rows; point += static_cast<int>(blockDim.x)) {
    Level row;
    std::int64_t start = 0;
    for (int level = 0; level < call.levels && point < call.points; ++level) {
      const std::int64_t height = side_of(call, 2 * level), width = side_of(call, 2 * level + 1);
      const bool fits = height > 0 && width > 0 && height <= call.tokens && width <= call.tokens &&
                        start <= call.tokens - height * width;
      if (point < call.ends.end[level]) {
        if (fits) {
          row = Level{static_cast<float>(width), static_cast<float>(height), static_cast<float>(start), 0.5f};
          row.next_x = width > 1 ? 1.0f : HUGE_VALF;
          row.next_y = height > 1 ? 1.0f : HUGE_VALF;
          row.right = width > 1 ? 1.0f : 0.0f;
          row.under = height > 1 ? row.width : 0.0f;
        }
        break;
      }
      // After a level that does not fit nothing does: the start stays behind the last token.
      start = fits ? start + height * width : (height == 0 || width == 0 ? start : call.tokens + 1);
    }
    table[point] = row;
  }
}

// 2^23: an FP32 sum with it holds the whole number in its last bits.
constexpr float whole = 8388608.0f;
constexpr unsigned whole_bits = 0x4B000000u;

template <bool Discrete> struct Sample {
  static constexpr int corners = Discrete ? 1 : 4;
  float weight[corners];
  unsigned cell[corners]; // of the image, counted from whole_bits
};

// All corners are cells of the level, also those of a sample that weighs nothing.
template <bool Discrete>
__device__ __forceinline__ Sample<Discrete> sample_of(const Level& level, float2 location, float weight) {
  Sample<Discrete> sample;
  const float last_x = level.width - 1.0f, last_y = level.height - 1.0f;
  if constexpr (Discrete) {
    // Two roundings, as PyTorch makes them: the centre of a cell lies on the border between two answers.
    const float x = __fadd_rn(__fmul_rn(location.x, level.width), 0.5f),
                y = __fadd_rn(__fmul_rn(location.y, level.height), 0.5f);
    const bool number = x == x && y == y && level.half == 0.5f;
    // fmaxf takes the other one of a NaN.
    const float column = fminf(fmaxf(truncf(x), 0.0f), fmaxf(last_x, 0.0f)),
                row = fminf(fmaxf(truncf(y), 0.0f), fmaxf(last_y, 0.0f));
    sample.weight[0] = number ? weight : 0.0f;
    sample.cell[0] = __float_as_uint(fmaf(row, level.width, level.start + whole) + column);
  } else {
    // The block of four cells is moved into the level, and a cell's share is one less its distance where that is not
    // negative: so nothing needs to be asked. Rounding to the nearest of x - 1 / 2 gives the cell to the left, or on a
    // cell perhaps the one before. fminf and fmaxf take the other one of what is no number, and __saturatef zero.
    constexpr float magic = 1.5f * whole;
    const float first_x = magic + fmaxf(last_x - 1.0f, 0.0f), first_y = magic + fmaxf(last_y - 1.0f, 0.0f);
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
  }
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
