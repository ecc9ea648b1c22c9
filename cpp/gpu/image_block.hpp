// Images of a batch and what resizes them, as one block of bytes for one copy to a GPU; and the pixels that a kernel makes of it.
// No CUDA: a CPU makes the same pixels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "detrt/preprocess.hpp"
#include "windows.hpp"

#ifdef __CUDACC__
#define DETRT_ON_GPU __host__ __device__
#else
#define DETRT_ON_GPU
#endif

namespace detrt::gpu {

// The windows of a resize along an axis: offsets in int32 from the start of the block.
struct Axis {
  std::int32_t first, count, weights, stride, length; // length: of the source, pixels
};

// An image in a block, and its size after the resize.
struct ImageRow {
  std::uint64_t source; // offset of its RGB pixels, bytes
  std::int32_t height, width;
  Axis down, across;
  std::int32_t columns_first;
};

// A block has the rows of the images at its start.
class ImageBlock {
public:
  explicit ImageBlock(const InputSpec& input) : input_(input) {}
  // Lays out a batch; returns the size of its block in bytes. Files that are still encoded come last, with room for their pixels.
  std::size_t plan(const BatchPlan& plan);
  void write(std::uint8_t* block) const; // of the batch that was planned, whose images are still there
  std::size_t written() const noexcept { return written_; } // bytes that write() writes
  const std::map<const Image*, std::size_t>& encoded() const noexcept { return encoded_; } // offset of their pixels
  std::size_t levels() const noexcept { return levels_; } // offset of levels_of(), bytes

private:
  const Windows& windows_of(int from, int to);

  InputSpec input_;
  std::map<std::pair<int, int>, Windows> windows_; // of the last batches
  std::vector<ImageRow> rows_;
  std::map<const Windows*, std::size_t> tables_; // offsets in the block
  std::map<const Image*, std::size_t> images_, encoded_; // offsets in the block
  std::size_t levels_ = 0, written_ = 0;
};

DETRT_ON_GPU inline int level_of(int sum) {
  const int level = sum >> 22;
  return level < 0 ? 0 : level > 255 ? 255 : level;
}

// A pixel of the resized image, with Pillow's integers; y and x are inside it.
DETRT_ON_GPU inline void resized_pixel(const std::uint8_t* block, const ImageRow& row, int y, int x, int* rgb) {
  constexpr int half = 1 << 21;
  const int* tables = reinterpret_cast<const int*>(block);
  const bool turned = row.columns_first != 0;
  const Axis &inner = turned ? row.down : row.across, &outer = turned ? row.across : row.down; // first and second pass
  const int i = turned ? y : x, o = turned ? x : y;
  const std::size_t line = static_cast<std::size_t>(row.across.length) * 3;
  const std::size_t inner_step = turned ? line : 3, outer_step = turned ? 3 : line;
  const int *inner_weights = tables + inner.weights + i * inner.stride,
            *outer_weights = tables + outer.weights + o * outer.stride;
  const int inner_count = tables[inner.count + i], outer_count = tables[outer.count + o];
  const std::uint8_t* start = block + row.source + static_cast<std::size_t>(tables[inner.first + i]) * inner_step +
                              static_cast<std::size_t>(tables[outer.first + o]) * outer_step;
  rgb[0] = rgb[1] = rgb[2] = half;
  for (int a = 0; a < outer_count; ++a, start += outer_step) {
    int part[3] = {half, half, half};
    const std::uint8_t* pixel = start;
    for (int b = 0; b < inner_count; ++b, pixel += inner_step)
      for (int c = 0; c < 3; ++c)
        part[c] += pixel[c] * inner_weights[b];
    for (int c = 0; c < 3; ++c)
      rgb[c] += level_of(part[c]) * outer_weights[a];
  }
  for (int c = 0; c < 3; ++c)
    rgb[c] = level_of(rgb[c]);
}

} // namespace detrt::gpu
