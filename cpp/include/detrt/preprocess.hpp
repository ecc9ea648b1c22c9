// Images to the input tensors of a model; the rules of src/detrt/data/preprocess.py, with equal results.
#pragma once

#include <optional>
#include <vector>

#include "detrt/image.hpp"
#include "detrt/spec.hpp"
#include "detrt/tensor.hpp"

namespace detrt {

// Images of a batch before they are resized. They are not owned.
struct BatchPlan {
  std::vector<const Image*> images;
  std::vector<Size> original_sizes, resized_sizes;
  Size canvas; // of the tensors
};

struct PreparedBatch {
  Tensors feeds; // pixel_values (n, 3, H, W); pixel_mask (n, H, W) and target_sizes (n, 2) if the model has them
  std::vector<Size> original_sizes, resized_sizes;
};

// size: another input size than the spec's, for models with symbolic height and width. Throws Error.
PreparedBatch preprocess(const std::vector<const Image*>& images, const ModelSpec& spec, std::optional<Size> size = {});

// The sizes alone, for a session that resizes on its device (`Session::run_images`). Throws Error.
BatchPlan plan_batch(const std::vector<const Image*>& images, const ModelSpec& spec, std::optional<Size> size = {});
// The feeds beside pixel_values and pixel_mask.
Tensors size_feeds(const BatchPlan& plan, const ModelSpec& spec);

// Throws Error (spec) if the model does not take images of this size.
void check_size(const InputSpec& input, std::optional<Size> size);
// Size of the image inside the tensor, without padding.
Size resized_size(Size original, const InputSpec& input, std::optional<Size> size = {});
// Indices of images whose tensors have one size, by first appearance: in a batch they do not change each other's results, as larger
// neighbours would, whose padding the model sees.
std::vector<std::vector<std::size_t>> group_by_size(const std::vector<Size>& sizes, const ModelSpec& spec,
                                                    std::optional<Size> size = {});

} // namespace detrt
