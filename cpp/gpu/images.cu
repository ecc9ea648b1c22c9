#include "images.hpp"

namespace detrt::gpu {
namespace {

constexpr int tile_x = 32, tile_y = 8, warp = 32, warps = 4;

// One thread writes one pixel. It computes the first pass of its window itself, which saves the image between the passes.
template <class Pixel, class Mask>
__global__ void resize(const std::uint8_t* block, const float* levels, Pixel* pixels, Mask* mask, int height, int width) {
  const int x = blockIdx.x * tile_x + threadIdx.x, y = blockIdx.y * tile_y + threadIdx.y;
  if (x >= width || y >= height)
    return;
  const ImageRow& row = reinterpret_cast<const ImageRow*>(block)[blockIdx.z];
  const bool inside = x < row.width && y < row.height;
  int rgb[3] = {0, 0, 0};
  if (inside)
    resized_pixel(block, row, y, x, rgb);
  const std::size_t plane = static_cast<std::size_t>(height) * width;
  const std::size_t at = static_cast<std::size_t>(y) * width + x;
  Pixel* out = pixels + blockIdx.z * 3 * plane + at;
  for (int c = 0; c < 3; ++c) {
    if constexpr (sizeof(Pixel) == 1)
      out[c * plane] = static_cast<Pixel>(rgb[c]);
    else
      out[c * plane] = inside ? levels[c * 256 + rgb[c]] : 0.0f;
  }
  if (mask)
    mask[blockIdx.z * plane + at] = inside;
}

template <class Pixel, class Mask>
cudaError_t launch(const std::uint8_t* block, std::size_t levels, const ImageInputs& in, cudaStream_t stream) {
  const dim3 grid((in.width + tile_x - 1) / tile_x, (in.height + tile_y - 1) / tile_y, in.images), threads(tile_x, tile_y);
  resize<<<grid, threads, 0, stream>>>(block, reinterpret_cast<const float*>(block + levels), static_cast<Pixel*>(in.pixels),
                                       static_cast<Mask*>(in.mask), in.height, in.width);
  return cudaGetLastError();
}

// One warp reads one query.
__global__ void choose(RawOutputs out, bool softmax, float limit, std::uint8_t* chosen, std::size_t bytes) {
  const int at = blockIdx.x * warps + threadIdx.y, lane = threadIdx.x;
  if (at >= out.images * out.queries)
    return;
  constexpr unsigned all = 0xffffffff;
  auto* head = reinterpret_cast<ChosenHead*>(chosen);
  const float* logits = out.logits + static_cast<std::size_t>(at) * out.columns;
  const float* box = out.boxes + static_cast<std::size_t>(at) * 4;
  bool bad = false;
  float best = -INFINITY, top = -INFINITY; // of the columns that are classes, of all
  for (int c = lane; c < out.columns; c += warp) {
    const float value = logits[c];
    bad |= isnan(value) || value == INFINITY;
    top = fmaxf(top, value);
    if (!softmax || c < out.columns - 1)
      best = fmaxf(best, value);
  }
  for (int step = warp / 2; step > 0; step /= 2) {
    best = fmaxf(best, __shfl_xor_sync(all, best, step));
    top = fmaxf(top, __shfl_xor_sync(all, top, step));
  }
  if (bad)
    head->bad_logits = 1;
  if (lane < 4 && !isfinite(box[lane]))
    head->bad_boxes = 1;
  if (softmax) {
    const float shift = isfinite(top) ? top : 0.0f;
    float total = 0;
    for (int c = lane; c < out.columns; c += warp)
      total += expf(logits[c] - shift);
    for (int step = warp / 2; step > 0; step /= 2)
      total += __shfl_xor_sync(all, total, step);
    best = total > 0 ? expf(best - shift) / total : 0.0f;
  }
  if (!(best > limit))
    return;
  int slot = 0;
  if (lane == 0)
    slot = atomicAdd(&head->count, 1);
  slot = __shfl_sync(all, slot, 0);
  auto* record = reinterpret_cast<ChosenRecord*>(chosen + sizeof(ChosenHead) + slot * bytes);
  if (lane == 0) {
    record->image = at / out.queries;
    record->query = at % out.queries;
  }
  if (lane < 4)
    record->box[lane] = box[lane];
  for (int c = lane; c < out.columns; c += warp)
    reinterpret_cast<float*>(record + 1)[c] = logits[c];
}

} // namespace

cudaError_t write_images(const std::uint8_t* block, std::size_t levels, const ImageInputs& inputs,
                         cudaStream_t stream) noexcept {
  if (inputs.float_pixels)
    return inputs.int32_mask ? launch<float, std::int32_t>(block, levels, inputs, stream)
                             : launch<float, std::int64_t>(block, levels, inputs, stream);
  return inputs.int32_mask ? launch<std::uint8_t, std::int32_t>(block, levels, inputs, stream)
                           : launch<std::uint8_t, std::int64_t>(block, levels, inputs, stream);
}

cudaError_t choose_queries(const RawOutputs& outputs, bool softmax, float limit, void* chosen,
                           cudaStream_t stream) noexcept {
  if (const cudaError_t cleared = cudaMemsetAsync(chosen, 0, sizeof(ChosenHead), stream); cleared != cudaSuccess)
    return cleared;
  const int queries = outputs.images * outputs.queries;
  choose<<<(queries + warps - 1) / warps, dim3(warp, warps), 0, stream>>>(
      outputs, softmax, limit, static_cast<std::uint8_t*>(chosen), record_bytes(outputs.columns));
  return cudaGetLastError();
}

} // namespace detrt::gpu
