// Kernels around a model on a GPU: images to its inputs, and the choice among its raw outputs. One launch each, no
// allocation, no synchronization.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "image_block.hpp"

namespace detrt::gpu {

// The inputs of a model, row-major; written wholly.
struct ImageInputs {
  void* pixels = nullptr; // (images, 3, height, width), float or uint8; padding is 0
  bool float_pixels = false;
  void* mask = nullptr; // (images, height, width), int64 or int32: 1 = image, 0 = padding; or nullptr
  bool int32_mask = false;
  std::int32_t images = 0, height = 0, width = 0;
};

// Resizes, pads and normalises the images of a block on the device. levels: its ImageBlock::levels().
cudaError_t write_images(const std::uint8_t* block, std::size_t levels, const ImageInputs& inputs,
                         cudaStream_t stream) noexcept;

// Raw outputs of a model on the device. logits: (images, queries, columns), boxes: (images, queries, 4).
struct RawOutputs {
  const float* logits = nullptr;
  const float* boxes = nullptr;
  std::int32_t images = 0, queries = 0, columns = 0;
};

// What is chosen: this head, and after it `count` records of record_bytes(), in any order.
struct ChosenHead {
  std::int32_t count, bad_logits, bad_boxes, unused; // bad_*: there are NaN or infinite values
};
struct ChosenRecord {
  std::int32_t image, query;
  float box[4]; // and the logits of all columns
};
constexpr std::size_t record_bytes(std::int32_t columns) {
  return sizeof(ChosenRecord) + sizeof(float) * static_cast<std::size_t>(columns);
}

// Chooses the queries that have a value above `limit` in one of their columns: a logit, or with softmax the score of a column but
// the last. chosen: memory for the head and images * queries records.
cudaError_t choose_queries(const RawOutputs& outputs, bool softmax, float limit, void* chosen,
                           cudaStream_t stream) noexcept;

} // namespace detrt::gpu
