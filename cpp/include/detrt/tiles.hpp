// Tiles of large images; the rules of src/detrt/data/tiles.py, with equal results.
#pragma once

#include <utility>
#include <vector>

#include "detrt/detections.hpp"

namespace detrt {

// Size of tiles in pixels of the image, and the least part of a side that neighbours share.
struct Tiling {
  Size size;
  double overlap = 0.2;
};

// A part of an image, in its pixels.
struct Window {
  int y0 = 0, x0 = 0, y1 = 0, x1 = 0;
  bool operator==(const Window& o) const noexcept { return y0 == o.y0 && x0 == o.x0 && y1 == o.y1 && x1 == o.x1; }
};

// Throws Error (usage) for a side below 1 or an overlap that is not from 0 to 0.9.
void check_tiling(const Tiling& tiling);

// The windows of an image, the whole image last; one, where it is not larger than a tile. Throws Error (session) where they
// would be more than 10 000.
std::vector<Window> windows_of(const Tiling& tiling, Size image);

// The detections of an image from those of its windows, each in its own pixels; best score first.
Detections merge_tiles(std::vector<std::pair<Window, Detections>> parts, const Tiling& tiling, Size image);

} // namespace detrt
