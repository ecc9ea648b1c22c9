// Boxes and labels on images.
#pragma once

#include <array>
#include <cstdint>

#include "detrt/detections.hpp"
#include "detrt/image.hpp"

namespace detrt {

// The colour of a class: the same in every image and as in Python; 16 hues in 5 tints.
std::array<std::uint8_t, 3> class_colour(std::int64_t class_id);

// A copy of the image with boxes, class names and scores. Lines and letters scale with it; non-ASCII letters become
// "?". Throws Error (image) if the image has another size than the detections.
Image draw_detections(const Image& image, const Detections& detections);

} // namespace detrt
