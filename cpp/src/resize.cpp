// Pillow's resampling, written from its published description: every output pixel is a weighted sum of a window of
// input pixels. One pass along the rows, one along the columns; weights are integers in units of 1/2^22, and each pass
// rounds to 8 bits.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "detrt/error.hpp"
#include "detrt/image.hpp"
#include "windows.hpp"

namespace detrt {
namespace {

constexpr int precision_bits = 32 - 8 - 2;
constexpr double pi = 3.14159265358979323846;

double sinc(double x) {
  return x == 0.0 ? 1.0 : std::sin(x * pi) / (x * pi);
}

struct Filter {
  double support;
  double (*weight)(double);
};

double box(double x) {
  return x > -0.5 && x <= 0.5 ? 1.0 : 0.0;
}
double bilinear(double x) {
  return std::max(0.0, 1.0 - std::fabs(x));
}
double hamming(double x) {
  x = std::fabs(x);
  if (x == 0.0)
    return 1.0;
  if (x >= 1.0)
    return 0.0;
  x *= pi;
  return std::sin(x) / x * (0.54 + 0.46 * std::cos(x));
}
double bicubic(double x) {
  constexpr double a = -0.5;
  x = std::fabs(x);
  if (x < 1.0)
    return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  if (x < 2.0)
    return (((x - 5) * x + 8) * x - 4) * a;
  return 0.0;
}
double lanczos(double x) {
  return x >= -3.0 && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0;
}

Filter filter_of(Resample resample) {
  switch (resample) {
  case Resample::box:
    return {0.5, box};
  case Resample::hamming:
    return {1.0, hamming};
  case Resample::bicubic:
    return {2.0, bicubic};
  case Resample::lanczos:
    return {3.0, lanczos};
  default:
    return {1.0, bilinear};
  }
}

Windows filtered(int from, int to, const Filter& filter) {
  const double scale = static_cast<double>(from) / to;
  const double widening = std::max(scale, 1.0); // the filter widens when the image shrinks
  const double support = filter.support * widening;
  Windows w;
  w.stride = static_cast<int>(std::ceil(support)) * 2 + 1;
  w.first.resize(static_cast<std::size_t>(to));
  w.count.resize(static_cast<std::size_t>(to));
  w.weights.assign(static_cast<std::size_t>(to) * static_cast<std::size_t>(w.stride), 0);
  std::vector<double> exact(static_cast<std::size_t>(w.stride));
  for (int out = 0; out < to; ++out) {
    const auto at = static_cast<std::size_t>(out);
    const double centre = (out + 0.5) * scale;
    const int low = std::max(0, static_cast<int>(centre - support + 0.5));
    const int high = std::min(from, static_cast<int>(centre + support + 0.5));
    double sum = 0;
    for (int i = low; i < high; ++i) {
      exact[static_cast<std::size_t>(i - low)] = filter.weight((i - centre + 0.5) * (1.0 / widening));
      sum += exact[static_cast<std::size_t>(i - low)];
    }
    w.first[at] = low;
    w.count[at] = high - low;
    int* row = w.weights.data() + at * static_cast<std::size_t>(w.stride);
    for (int i = 0; i < high - low; ++i) {
      const double value = (sum != 0 ? exact[static_cast<std::size_t>(i)] / sum : exact[static_cast<std::size_t>(i)]) *
                           (1 << precision_bits);
      row[i] = static_cast<int>(value < 0 ? value - 0.5 : value + 0.5);
    }
  }
  return w;
}

// Centres of output pixels, accumulated step by step as in Pillow, so that they round in the same way.
std::vector<int> nearest_positions(int from, int to) {
  const double step = static_cast<double>(from) / to;
  double position = step * 0.5;
  std::vector<int> found(static_cast<std::size_t>(to));
  for (int& index : found) {
    index = std::min(static_cast<int>(position), from - 1);
    position += step;
  }
  return found;
}

std::uint8_t rounded(int sum) {
  return static_cast<std::uint8_t>(std::clamp(sum >> precision_bits, 0, 255));
}

constexpr int half = 1 << (precision_bits - 1);

// Rows [top, top + rows) of the image, resized to `width`.
Image horizontal(const Image& image, int top, int rows, int width, Resample resample) {
  const Windows w = windows(image.width, width, resample);
  Image made(rows, width);
  for (int y = 0; y < rows; ++y) {
    const std::uint8_t* in =
        image.rgb.data() + static_cast<std::size_t>(top + y) * static_cast<std::size_t>(image.width) * 3;
    std::uint8_t* out = made.rgb.data() + static_cast<std::size_t>(y) * static_cast<std::size_t>(width) * 3;
    for (int x = 0; x < width; ++x, out += 3) {
      const auto at = static_cast<std::size_t>(x);
      const std::uint8_t* pixel = in + static_cast<std::size_t>(w.first[at]) * 3;
      const int* weight = w.weights.data() + at * static_cast<std::size_t>(w.stride);
      int red = half, green = half, blue = half;
      for (int i = 0; i < w.count[at]; ++i, pixel += 3) {
        red += pixel[0] * weight[i];
        green += pixel[1] * weight[i];
        blue += pixel[2] * weight[i];
      }
      out[0] = rounded(red);
      out[1] = rounded(green);
      out[2] = rounded(blue);
    }
  }
  return made;
}

// w: windows over the rows of the original; image starts at its row `top`.
Image vertical(const Image& image, int top, int height, const Windows& w) {
  Image made(height, image.width);
  const std::size_t length = static_cast<std::size_t>(image.width) * 3;
  std::vector<int> sums(length);
  for (int y = 0; y < height; ++y) {
    const auto at = static_cast<std::size_t>(y);
    std::fill(sums.begin(), sums.end(), half);
    for (int i = 0; i < w.count[at]; ++i) {
      const int weight = w.weights[at * static_cast<std::size_t>(w.stride) + static_cast<std::size_t>(i)];
      const std::uint8_t* in = image.rgb.data() + static_cast<std::size_t>(w.first[at] - top + i) * length;
      for (std::size_t x = 0; x < length; ++x)
        sums[x] += in[x] * weight;
    }
    std::uint8_t* out = made.rgb.data() + at * length;
    for (std::size_t x = 0; x < length; ++x)
      out[x] = rounded(sums[x]);
  }
  return made;
}

Image nearest(const Image& image, Size size) {
  const std::vector<int> xs = nearest_positions(image.width, size.width),
                         ys = nearest_positions(image.height, size.height);
  Image made(size.height, size.width);
  std::uint8_t* out = made.rgb.data();
  for (int y : ys)
    for (int x : xs) {
      const std::size_t at =
          (static_cast<std::size_t>(y) * static_cast<std::size_t>(image.width) + static_cast<std::size_t>(x)) * 3;
      out = std::copy_n(image.rgb.data() + at, 3, out);
    }
  return made;
}

} // namespace

Windows windows(int from, int to, Resample resample) {
  if (from != to && resample != Resample::nearest)
    return filtered(from, to, filter_of(resample));
  const auto count = static_cast<std::size_t>(to);
  Windows w{1, nearest_positions(from, to), std::vector<int>(count, 1), std::vector<int>(count, 1 << precision_bits)};
  if (from == to)
    std::iota(w.first.begin(), w.first.end(), 0);
  return w;
}

// The order of the passes affects rounding. Pillow 13 starts with the columns if it removes more than twice as many
// rows as columns; older versions never did, which changes single pixels by a level or two.
bool columns_first(Size from, Size to) {
  const int fewer_rows = from.height - to.height, fewer_columns = from.width - to.width;
  return fewer_rows > 0 && fewer_rows > 2 * fewer_columns;
}

Image resize_image(const Image& image, Size size, Resample resample) {
  if (image.height < 1 || image.width < 1 || size.height < 1 || size.width < 1)
    throw Error(ErrorKind::image, "an image without pixels cannot be resized");
  if (image.size() == size)
    return image;
  if (resample == Resample::nearest)
    return nearest(image, size);
  if (image.height == size.height)
    return horizontal(image, 0, image.height, size.width, resample);
  const Windows w = windows(image.height, size.height, resample);
  if (image.width == size.width)
    return vertical(image, 0, size.height, w);
  if (columns_first(image.size(), size))
    return horizontal(vertical(image, 0, size.height, w), 0, size.height, size.width, resample);
  const int top = w.first.front(), bottom = w.first.back() + w.count.back(); // rows that the second pass needs
  return vertical(horizontal(image, top, bottom - top, size.width, resample), top, size.height, w);
}

} // namespace detrt
