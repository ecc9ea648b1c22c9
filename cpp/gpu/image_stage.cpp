#include "image_stage.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "chosen.hpp"

namespace detrt::gpu {
namespace {

constexpr std::size_t first_records = 64; // that come back without being asked for

// A limit for what the device compares, below the threshold by more than rounding can be: the CPU decides about the rest.
float limit_of(float threshold, bool softmax) {
  const double least = static_cast<double>(threshold) - 1e-5;
  if (softmax)
    return static_cast<float>(least);
  return least <= 0 ? -std::numeric_limits<float>::infinity() : static_cast<float>(std::log(least / (1 - least)));
}

} // namespace

bool can_choose(const ModelSpec& spec, const std::vector<TensorInfo>& outputs) {
  if (spec.decode.in_graph || spec.text || outputs.size() != 2)
    return false;
  return std::all_of(outputs.begin(), outputs.end(), [](const TensorInfo& info) {
    return info.dtype == DType::float32 && (info.name == "logits" || info.name == "pred_boxes");
  });
}

ImageStage::ImageStage(const ModelSpec& spec) : spec_(spec), images_(spec.input) {}

void ImageStage::write(const BatchPlan& plan, ImageInputs inputs, cudaStream_t stream) {
  const std::size_t bytes = images_.plan(plan);
  block_.ensure(bytes);
  images_.write(static_cast<std::uint8_t*>(block_.host.get()));
  check(cudaMemcpyAsync(block_.device.get(), block_.host.get(), images_.written(), cudaMemcpyHostToDevice, stream),
        "the copy to the GPU");
  decode(static_cast<std::uint8_t*>(block_.device.get()), stream);
  inputs.images = static_cast<std::int32_t>(plan.images.size());
  inputs.height = plan.canvas.height;
  inputs.width = plan.canvas.width;
  inputs.float_pixels = spec_.input.float_pixels;
  check(gpu::write_images(static_cast<const std::uint8_t*>(block_.device.get()), images_.levels(), inputs, stream),
        "the resize on the GPU");
}

// What nvJPEG refuses, the CPU decodes.
void ImageStage::decode(std::uint8_t* block, cudaStream_t stream) {
  if (!images_.encoded().empty() && !decoder_)
    decoder_ = make_jpeg_decoder();
  bool decoding = false;
  for (const auto& [image, place] : images_.encoded()) {
    if (std::exchange(decoding, true))
      check(cudaStreamSynchronize(stream), "the decoding of a JPEG file");
    if (decoder_ && decoder_->decode(image->jpeg->data, image->height, image->width, block + place, stream))
      continue;
    (void)cudaGetLastError();
    const Image pixels = decoded(*image);
    check(cudaMemcpyAsync(block + place, pixels.rgb.data(), pixels.rgb.size(), cudaMemcpyHostToDevice, stream), "the copy to the GPU");
    check(cudaStreamSynchronize(stream), "the copy to the GPU"); // before the pixels go
  }
}

void ImageStage::download(std::size_t from, std::size_t to, cudaStream_t stream) {
  auto* host = static_cast<std::uint8_t*>(chosen_.host.get());
  const auto* device = static_cast<const std::uint8_t*>(chosen_.device.get());
  if (from < to)
    check(cudaMemcpyAsync(host + from, device + from, to - from, cudaMemcpyDeviceToHost, stream), "the copy from the GPU");
}

void ImageStage::choose(const RawOutputs& outputs, float threshold, cudaStream_t stream) {
  outputs_ = outputs;
  const bool softmax = spec_.decode.activation == Activation::softmax;
  const auto queries = static_cast<std::size_t>(outputs.images) * static_cast<std::size_t>(outputs.queries);
  chosen_.ensure(sizeof(ChosenHead) + queries * record_bytes(outputs.columns));
  check(choose_queries(outputs, softmax, limit_of(threshold, softmax), chosen_.device.get(), stream), "the choice on the GPU");
  download(0, sizeof(ChosenHead) + std::min(queries, first_records) * record_bytes(outputs.columns), stream);
}

Tensors ImageStage::chosen(cudaStream_t stream) {
  check(cudaStreamSynchronize(stream), "the run");
  const auto* head = static_cast<const ChosenHead*>(chosen_.host.get());
  if (head->bad_logits || head->bad_boxes)
    throw not_finite(head->bad_logits ? "logits" : "pred_boxes");
  const std::size_t size = record_bytes(outputs_.columns);
  const auto count = static_cast<std::size_t>(head->count);
  if (count > first_records) {
    download(sizeof(ChosenHead) + first_records * size, sizeof(ChosenHead) + count * size, stream);
    check(cudaStreamSynchronize(stream), "the run");
  }
  Tensor places(DType::int64, {head->count, 2}), logits(DType::float32, {head->count, outputs_.columns}),
      boxes(DType::float32, {head->count, 4});
  for (std::size_t i = 0; i < count; ++i) {
    const auto* record = reinterpret_cast<const ChosenRecord*>(reinterpret_cast<const std::uint8_t*>(head + 1) + i * size);
    places.as<std::int64_t>()[2 * i] = record->image;
    places.as<std::int64_t>()[2 * i + 1] = record->query;
    std::copy_n(record->box, 4, boxes.as<float>() + 4 * i);
    std::memcpy(logits.as<float>() + i * static_cast<std::size_t>(outputs_.columns), record + 1, size - sizeof *record);
  }
  Tensors outputs;
  outputs.emplace(chosen_queries, std::move(places));
  outputs.emplace("logits", std::move(logits));
  outputs.emplace("pred_boxes", std::move(boxes));
  return outputs;
}

} // namespace detrt::gpu
