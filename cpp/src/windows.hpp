// What a resize needs to know of both axes, and what the levels of a channel become: for the CPU and for kernels.
#pragma once

#include <array>
#include <vector>

#include "detrt/spec.hpp"

namespace detrt {

// For each output pixel along an axis the first input pixel, their number, and as many weights of 22 fractional bits, `stride` apart.
struct Windows {
  int stride = 0;
  std::vector<int> first, count, weights;
};

Windows windows(int from, int to, Resample resample);
bool columns_first(Size from, Size to); // the order of the two passes

// Normalised value of each of the 256 levels of a channel, by the float32 steps of the reference.
std::array<std::array<float, 256>, 3> levels_of(const InputSpec& input);

} // namespace detrt
