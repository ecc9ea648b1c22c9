// From mask logits to masks of the image's size, as run lengths; the rules of src/detrt/tasks/masks.py, with equal results.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "detrt/spec.hpp"

namespace detrt {

// Lengths of the runs of zeros and of ones in turn, zeros first, column by column, as in COCO.
using Runs = std::vector<std::int64_t>;

// The part of a map that the image covers, in values; the rest is padding.
struct Covered {
  double height, width;
};

// The mask of an image of this size from its logits, (map.height, map.width), all finite.
Runs encode_mask(const float* logits, Size map, Size image, Covered covered);

// The compressed text of COCO.
std::string coco_counts(const Runs& runs);

// One byte per pixel, row by row: 1 = object. runs: of an image of this size.
std::vector<std::uint8_t> mask_pixels(const Runs& runs, Size image);

} // namespace detrt
