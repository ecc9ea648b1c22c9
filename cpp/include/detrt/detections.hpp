// Detections of one image, and their JSON form.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "detrt/masks.hpp"
#include "detrt/spec.hpp"

namespace detrt {

struct Detection {
  std::array<float, 4> box_xyxy{}; // pixels of the original image, inside it
  float score = 0;                 // 0..1
  std::int64_t class_id = 0;
  std::string label;
  std::optional<std::pair<std::int64_t, std::int64_t>> phrase_span; // characters of the prompt, if there is one
  std::optional<Runs> mask{}; // of instance segmentation
};

struct Detections {
  Size image_size;
  std::vector<Detection> found; // best score first
  std::string prompt;           // "" of models with fixed classes and of lists of names
};

// The line of `detrt detect --json`, without the line break. image: the path of the caller.
std::string to_json(const Detections& detections, const std::string& image);

} // namespace detrt
