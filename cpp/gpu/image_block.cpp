#include "image_block.hpp"

#include <cstring>

namespace detrt::gpu {
namespace {

constexpr std::size_t alignment = 16, most_windows = 256;

std::size_t aligned(std::size_t bytes) {
  return (bytes + alignment - 1) / alignment * alignment;
}

} // namespace

const Windows& ImageBlock::windows_of(int from, int to) {
  const auto found = windows_.find({from, to});
  return found != windows_.end() ? found->second
                                 : windows_.emplace(std::pair(from, to), windows(from, to, input_.resample)).first->second;
}

// Windows and images that several rows share are there once.
std::size_t ImageBlock::plan(const BatchPlan& plan) {
  rows_.clear();
  tables_.clear();
  images_.clear();
  encoded_.clear();
  if (windows_.size() > most_windows)
    windows_.clear();
  levels_ = aligned(plan.images.size() * sizeof(ImageRow));
  std::size_t end = levels_ + sizeof(float) * 3 * 256;
  const auto take = [&](std::size_t bytes) {
    const std::size_t at = end;
    end = aligned(end + bytes);
    return at;
  };
  const auto axis = [&](int from, int to) {
    const Windows& w = windows_of(from, to);
    auto table = tables_.find(&w);
    if (table == tables_.end())
      table = tables_.emplace(&w, take(sizeof(int) * (w.first.size() + w.count.size() + w.weights.size()))).first;
    const auto at = static_cast<std::int32_t>(table->second / sizeof(int));
    return Axis{at, at + to, at + 2 * to, w.stride, from};
  };
  for (std::size_t i = 0; i < plan.images.size(); ++i) {
    const Size from = plan.original_sizes[i], to = plan.resized_sizes[i];
    const Axis down = axis(from.height, to.height), across = axis(from.width, to.width);
    rows_.push_back({0, to.height, to.width, down, across, columns_first(from, to)});
  }
  const auto place = [&](std::map<const Image*, std::size_t>& places, bool encoded) {
    for (std::size_t i = 0; i < plan.images.size(); ++i) {
      const Image* image = plan.images[i];
      if ((image->jpeg != nullptr) != encoded)
        continue;
      auto found = places.find(image);
      if (found == places.end())
        found = places.emplace(image, take(static_cast<std::size_t>(image->height) * static_cast<std::size_t>(image->width) * 3)).first;
      rows_[i].source = found->second;
    }
  };
  place(images_, false);
  written_ = end;
  place(encoded_, true);
  return end;
}

void ImageBlock::write(std::uint8_t* block) const {
  const auto put = [&](std::size_t at, const void* data, std::size_t bytes) {
    std::memcpy(block + at, data, bytes);
    return at + bytes;
  };
  put(0, rows_.data(), rows_.size() * sizeof(ImageRow));
  const auto levels = levels_of(input_);
  put(levels_, levels.data(), sizeof levels);
  for (const auto& [table, place] : tables_) {
    std::size_t at = place;
    for (const std::vector<int>* numbers : {&table->first, &table->count, &table->weights})
      at = put(at, numbers->data(), numbers->size() * sizeof(int));
  }
  for (const auto& [image, place] : images_)
    put(place, image->rgb.data(), image->rgb.size());
}

} // namespace detrt::gpu
