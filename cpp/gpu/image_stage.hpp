// What a session on a GPU does around its model: images up, resized into the inputs; candidates chosen, and only those back.
#pragma once

#include "cuda.hpp"
#include "detrt/tensor.hpp"
#include "images.hpp"
#include "jpeg_decoder.hpp"

namespace detrt::gpu {

// Not thread-safe; its memory is reused by the next batch, so a caller waits for the stream in between.
class ImageStage {
public:
  explicit ImageStage(const ModelSpec& spec); // on the current device

  // Enqueues the upload of a batch, and the kernel that writes inputs.pixels and inputs.mask. Throws Error (session).
  void write(const BatchPlan& plan, ImageInputs inputs, cudaStream_t stream);
  // Enqueues the choice of the queries that may have a score above the threshold, and their way back.
  void choose(const RawOutputs& outputs, float threshold, cudaStream_t stream);
  // Waits for them: the outputs "chosen", "logits" and "pred_boxes" of decode(). Throws Error (session): NaN or infinite values.
  Tensors chosen(cudaStream_t stream);

private:
  void decode(std::uint8_t* block, cudaStream_t stream);
  void download(std::size_t from, std::size_t to, cudaStream_t stream);

  ModelSpec spec_;
  ImageBlock images_;
  std::unique_ptr<JpegDecoder> decoder_;
  Buffer block_, chosen_;
  RawOutputs outputs_;
};

// Whether choose() knows the outputs of this model: raw logits and boxes, and nothing else for each query.
bool can_choose(const ModelSpec& spec, const std::vector<TensorInfo>& outputs);

} // namespace detrt::gpu
