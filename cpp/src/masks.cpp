#include "detrt/masks.hpp"

#include <algorithm>
#include <cmath>

namespace detrt {
namespace {

// The two columns of the map that an output column lies between, and the weight of the right one.
struct Tap {
  int left, right;
  double weight;
};

Tap tap_of(int column, int size, int map_size, double covered) {
  const double position = std::clamp((column + 0.5) * covered / size - 0.5, 0.0, static_cast<double>(map_size - 1));
  const int left = static_cast<int>(std::floor(position));
  return {left, std::min(left + 1, map_size - 1), position - left};
}

// Rows or columns of the map with a value above 0: first and last; first > last if there is none.
struct Span {
  int first, last;
};

} // namespace

Runs encode_mask(const float* logits, Size map, Size image, Covered covered) {
  const std::int64_t height = image.height, pixels = height * image.width;
  Span rows{map.height, -1}, columns{map.width, -1};
  for (int y = 0; y < map.height; ++y)
    for (int x = 0; x < map.width; ++x)
      if (logits[static_cast<std::ptrdiff_t>(y) * map.width + x] > 0) {
        rows = {std::min(rows.first, y), y};
        columns = {std::min(columns.first, x), std::max(columns.last, x)};
      }
  if (rows.first > rows.last)
    return {pixels};
  // Only what lies beside a value above 0 can be above 0.
  const int top = std::max(rows.first - 1, 0), bottom = std::min(rows.last + 2, map.height);
  Runs ends;
  std::int64_t furthest = 0;
  const auto add = [&](std::int64_t end) {
    furthest = std::max(furthest, end);
    if (!ends.empty() && ends.back() == furthest) // a run of length 0 between two ends at one pixel
      ends.pop_back();
    else
      ends.push_back(furthest);
  };
  for (int x = 0; x < image.width; ++x) {
    const Tap tap = tap_of(x, image.width, map.width, covered.width);
    if (tap.right < columns.first || tap.left > columns.last)
      continue;
    const std::int64_t start = x * height;
    double before = 0;
    for (int row = top; row < bottom; ++row) {
      const float* line = logits + static_cast<std::ptrdiff_t>(row) * map.width;
      const double value = static_cast<double>(line[tap.left]) * (1 - tap.weight) +
                           static_cast<double>(line[tap.right]) * tap.weight;
      if (row == top) {
        if (value > 0)
          add(start);
      } else if ((value > 0) != (before > 0)) {
        const double share = before / (before - value);
        const double y = (row - 1 + share + 0.5) * image.height / covered.height - 0.5;
        const double edge = before > 0 ? std::ceil(y) : std::floor(y) + 1;
        add(start + std::clamp(static_cast<std::int64_t>(edge), std::int64_t{0}, height));
      }
      before = value;
    }
    if (before > 0)
      add(start + height);
  }
  Runs runs;
  std::int64_t last = 0;
  for (std::int64_t end : ends) {
    runs.push_back(end - last);
    last = end;
  }
  if (runs.empty() || last < pixels)
    runs.push_back(pixels - last);
  return runs;
}

std::string coco_counts(const Runs& runs) {
  std::string text;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    // Differences to the run but one before, six bits per letter: five of the number, one for "more follow".
    std::int64_t rest = i > 2 ? runs[i] - runs[i - 2] : runs[i];
    for (bool more = true; more;) {
      const auto low = static_cast<int>(rest & 31);
      rest >>= 5;
      more = (low & 16) != 0 ? rest != -1 : rest != 0;
      text += static_cast<char>(low + 48 + (more ? 32 : 0));
    }
  }
  return text;
}

std::vector<std::uint8_t> mask_pixels(const Runs& runs, Size image) {
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(image.height) * static_cast<std::size_t>(image.width));
  std::int64_t at = 0;
  for (std::size_t i = 0; i < runs.size(); ++i)
    for (const std::int64_t end = at + runs[i]; at < end; ++at)
      if (i % 2 == 1)
        pixels[static_cast<std::size_t>(at % image.height * image.width + at / image.height)] = 1;
  return pixels;
}

} // namespace detrt
