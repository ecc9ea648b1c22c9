#include "detrt/preprocess.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "detrt/error.hpp"
#include "windows.hpp"

namespace detrt {
namespace {

std::string text_of(Size size) {
  return std::to_string(size.height) + "x" + std::to_string(size.width);
}

// Largest size of the same aspect ratio inside the target; integers only, halves round up.
Size fit_size(Size original, Size target) {
  const std::int64_t h = original.height, w = original.width, th = target.height, tw = target.width;
  if (tw * h <= th * w) {
    const std::int64_t scaled = (2 * h * tw + w) / (2 * w);
    return {static_cast<int>(std::min(th, std::max<std::int64_t>(1, scaled))), target.width};
  }
  const std::int64_t scaled = (2 * w * th + h) / (2 * h);
  return {target.height, static_cast<int>(std::min(tw, std::max<std::int64_t>(1, scaled)))};
}

// Double precision, rounding to even, products from left to right and truncation are part of the rule.
Size shortest_edge_size(Size original, int shortest, std::optional<int> longest, bool tall_first) {
  const int h = original.height, w = original.width, low = std::min(h, w), high = std::max(h, w);
  double scale = shortest;
  if (longest && static_cast<double>(high) / low * shortest > *longest) {
    scale = static_cast<double>(static_cast<std::int64_t>(*longest) * low) / high;
    shortest = static_cast<int>(std::nearbyint(scale));
  }
  Size result;
  if (low == shortest && !(tall_first && w < h))
    result = original;
  else if (w < h)
    result = {static_cast<int>(scale * h / w), shortest};
  else
    result = {shortest, static_cast<int>(scale * w / h)};
  return {std::max(1, result.height), std::max(1, result.width)};
}

// Inside the limit with the same aspect ratio, in double precision and truncated.
Size max_size(Size original, Size limit) {
  const double scale = std::min(static_cast<double>(limit.height) / original.height,
                                static_cast<double>(limit.width) / original.width);
  return {std::max(1, static_cast<int>(original.height * scale)), std::max(1, static_cast<int>(original.width * scale))};
}

int rounded_up(int side, int multiple) {
  return (side + multiple - 1) / multiple * multiple;
}

// Height and width of a tensor for images of these sizes.
Size padded(const std::vector<Size>& resized, const InputSpec& input, std::optional<Size> size) {
  if (input.needs_equal_sizes())
    return resized.front(); // a multiple already
  if (input.one_size() || size)
    return size.value_or(input.size);
  Size most;
  for (const Size& one : resized)
    most = {std::max(most.height, one.height), std::max(most.width, one.width)};
  return {rounded_up(most.height, input.multiple_of), rounded_up(most.width, input.multiple_of)};
}

Size canvas(const std::vector<Size>& resized, const InputSpec& input, std::optional<Size> size) {
  if (input.needs_equal_sizes())
    for (const Size& other : resized)
      if (other != resized.front())
        throw Error(ErrorKind::spec,
                    "this model has no padding mask, so all images of a batch must have one size; got " +
                        text_of(resized.front()) + " and " + text_of(other) +
                        " after resizing. Use Detector, or split the batch with group_by_size");
  const Size target = padded(resized, input, size);
  for (const Size& one : resized)
    if (one.height > target.height || one.width > target.width)
      throw Error(ErrorKind::image, "an image of " + text_of(one) + " (height x width) after resizing does not fit the " +
                                        text_of(target) + " that this model pads to");
  return target;
}

// Copies interleaved pixels to the upper left corner of three planes.
template <class T, class Convert> void place(const Image& image, T* planes, Size size, const Convert& convert) {
  const std::size_t plane = static_cast<std::size_t>(size.height) * static_cast<std::size_t>(size.width);
  for (int y = 0; y < image.height; ++y) {
    const std::uint8_t* in = image.rgb.data() + static_cast<std::size_t>(y) * static_cast<std::size_t>(image.width) * 3;
    T* out = planes + static_cast<std::size_t>(y) * static_cast<std::size_t>(size.width);
    for (int x = 0; x < image.width; ++x, in += 3, ++out)
      for (std::size_t c = 0; c < 3; ++c)
        out[c * plane] = convert(in[c], c);
  }
}

} // namespace

std::array<std::array<float, 256>, 3> levels_of(const InputSpec& input) {
  std::array<std::array<float, 256>, 3> levels{};
  for (std::size_t c = 0; c < 3; ++c)
    for (std::size_t v = 0; v < 256; ++v) {
      const auto raw = static_cast<float>(v);
      levels[c][v] = input.normalize_in_graph
                         ? raw
                         : (raw * static_cast<float>(input.rescale) - static_cast<float>(input.mean[c])) /
                               static_cast<float>(input.std[c]);
    }
  return levels;
}

void check_size(const InputSpec& input, std::optional<Size> size) {
  if (!size || *size == input.size)
    return;
  if (!input.dynamic)
    throw Error(ErrorKind::spec, "size " + text_of(*size) + " (height x width) is not possible: this model takes " +
                                     text_of(input.size) +
                                     " only; leave the size out, or export it with a dynamic size");
  const int m = input.multiple_of;
  if (size->height < 1 || size->width < 1 || size->height > largest_side || size->width > largest_side || size->height % m ||
      size->width % m)
    throw Error(ErrorKind::spec, "size " + text_of(*size) +
                                     " (height x width): both sides must be positive multiples of " +
                                     std::to_string(m) + ", at most " + std::to_string(largest_side));
}

Size resized_size(Size original, const InputSpec& input, std::optional<Size> size) {
  const Size target = size.value_or(input.size);
  if (input.resize == Resize::stretch)
    return target;
  if (input.resize == Resize::fit)
    return fit_size(original, target);
  Size made;
  if (size)
    made = fit_size(original, target);
  else if (input.resize == Resize::max_size)
    made = max_size(original, {*input.max_height, *input.max_width});
  else
    made = shortest_edge_size(original, *input.shortest_edge, input.longest_edge, input.needs_equal_sizes());
  if (input.needs_equal_sizes()) {
    const int m = input.multiple_of;
    made = {std::max(m, made.height - made.height % m), std::max(m, made.width - made.width % m)};
  }
  return made;
}

BatchPlan plan_batch(const std::vector<const Image*>& images, const ModelSpec& spec, std::optional<Size> size) {
  const InputSpec& input = spec.input;
  if (images.empty())
    throw Error(ErrorKind::image, "preprocess needs at least one image; got an empty list");
  check_size(input, size);
  BatchPlan plan;
  plan.images = images;
  for (const Image* image : images) {
    const std::size_t pixels = static_cast<std::size_t>(image->height) * static_cast<std::size_t>(image->width);
    if (image->height < 1 || image->width < 1 || (image->rgb.size() != pixels * 3 && !image->jpeg))
      throw Error(ErrorKind::image, "image " + std::to_string(plan.original_sizes.size()) +
                                        " of the batch must have height * width * 3 bytes and pixels; got " +
                                        text_of(image->size()) + " with " + std::to_string(image->rgb.size()) +
                                        " bytes");
    plan.original_sizes.push_back(image->size());
    plan.resized_sizes.push_back(resized_size(image->size(), input, size));
  }
  plan.canvas = canvas(plan.resized_sizes, input, size);
  return plan;
}

Tensors size_feeds(const BatchPlan& plan, const ModelSpec& spec) {
  Tensors feeds;
  if (spec.decode.in_graph) {
    Tensor sizes(DType::int64, {static_cast<std::int64_t>(plan.images.size()), 2});
    auto* out = sizes.as<std::int64_t>();
    for (const Size& original : plan.original_sizes) {
      *out++ = original.height;
      *out++ = original.width;
    }
    feeds["target_sizes"] = std::move(sizes);
  }
  return feeds;
}

PreparedBatch preprocess(const std::vector<const Image*>& images, const ModelSpec& spec, std::optional<Size> size) {
  const BatchPlan plan = plan_batch(images, spec, size);
  PreparedBatch batch{size_feeds(plan, spec), plan.original_sizes, plan.resized_sizes};
  const InputSpec& input = spec.input;
  const Size whole = plan.canvas;
  const auto count = static_cast<std::int64_t>(images.size());
  Tensor pixels(input.float_pixels ? DType::float32 : DType::uint8, {count, 3, whole.height, whole.width});
  const std::size_t stride = 3 * static_cast<std::size_t>(whole.height) * static_cast<std::size_t>(whole.width);
  const auto levels = levels_of(input);
  for (std::size_t i = 0; i < images.size(); ++i) {
    const Size target = batch.resized_sizes[i];
    Image made;
    const Image* image = images[i];
    if (image->jpeg) {
      made = decoded(*image);
      image = &made;
    }
    if (image->size() != target) {
      made = resize_image(*image, target, input.resample);
      image = &made;
    }
    if (input.float_pixels)
      place(*image, pixels.as<float>() + i * stride, whole,
            [&](std::uint8_t v, std::size_t c) { return levels[c][v]; });
    else
      place(*image, pixels.as<std::uint8_t>() + i * stride, whole, [](std::uint8_t v, std::size_t) { return v; });
  }
  batch.feeds["pixel_values"] = std::move(pixels);
  if (input.mask) {
    Tensor mask(DType::int64, {count, whole.height, whole.width});
    auto* row = mask.as<std::int64_t>();
    for (const Size& image : batch.resized_sizes)
      for (int y = 0; y < whole.height; ++y, row += whole.width)
        if (y < image.height)
          std::fill_n(row, image.width, 1);
    batch.feeds["pixel_mask"] = std::move(mask);
  }
  return batch;
}

std::vector<std::vector<std::size_t>> group_by_size(const std::vector<Size>& sizes, const ModelSpec& spec,
                                                    std::optional<Size> size) {
  std::vector<std::vector<std::size_t>> groups;
  std::vector<Size> keys;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const Size key = padded({resized_size(sizes[i], spec.input, size)}, spec.input, size);
    const auto at = static_cast<std::size_t>(std::find(keys.begin(), keys.end(), key) - keys.begin());
    if (at == keys.size()) {
      keys.push_back(key);
      groups.emplace_back();
    }
    groups[at].push_back(i);
  }
  return groups;
}

} // namespace detrt
