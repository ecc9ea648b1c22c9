// What a model returns to detections; the rules of src/detrt/data/postprocess.py, with equal results.
#pragma once

#include <optional>
#include <vector>

#include "detrt/detections.hpp"
#include "detrt/spec.hpp"
#include "detrt/tensor.hpp"

namespace detrt {

struct DecodeOptions {
  double threshold = 0.5;                             // keep scores above it
  std::optional<std::vector<std::int64_t>> class_ids; // keep these classes only
  std::optional<std::int64_t> max_detections;         // keep at most so many for each image
};

// One Detections for each image. Throws Error (session): outputs that are missing, of a wrong shape, NaN or infinite.
std::vector<Detections> decode(const Tensors& outputs, const ModelSpec& spec, const std::vector<Size>& original_sizes,
                               const DecodeOptions& options = {});

// Throws Error (usage) for a threshold that is not from 0 to 1, or max_detections below 1.
void check_options(const DecodeOptions& options);

// A box during post-processing: pixels of the original image, clipped to it.
struct Candidate {
  std::array<float, 4> box{};
  float score = 0;
  std::int64_t class_id = 0;
  std::int64_t map = 0; // index of its mask logits
};

// Non-maximum suppression inside each class by the spec's rule. candidates: best score first. Returns
// the remaining ones, best first, with lower scores for soft-NMS.
std::vector<Candidate> suppress(const std::vector<Candidate>& candidates, const DecodeSpec& rule);

} // namespace detrt
