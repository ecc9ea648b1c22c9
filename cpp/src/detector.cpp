#include "detrt/detector.hpp"

#include <algorithm>
#include <chrono>

#include "detrt/preprocess.hpp"

namespace detrt {
namespace {

constexpr std::int64_t largest_batch = 1024;

class Clock {
public:
  double lap_ms() {
    const auto now = std::chrono::steady_clock::now();
    const double passed = std::chrono::duration<double, std::milli>(now - last_).count();
    last_ = now;
    return passed;
  }

private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

Image part_of(const Image& image, const Window& window) {
  Image part(window.y1 - window.y0, window.x1 - window.x0);
  const auto row = static_cast<std::ptrdiff_t>(part.width) * 3;
  for (int y = window.y0; y < window.y1; ++y)
    std::copy_n(image.rgb.begin() + (static_cast<std::ptrdiff_t>(y) * image.width + window.x0) * 3, row,
                part.rgb.begin() + (y - window.y0) * row);
  return part;
}

} // namespace

Detector Detector::open(const std::filesystem::path& folder, const DetectorOptions& options) {
  check_options({options.threshold, {}, options.max_detections});
  const Bundle bundle = Bundle::open(folder);
  std::optional<Prompt> prompt;
  if (!options.prompt.empty())
    prompt = Prompt::open(options.prompt, bundle);
  return Detector(open_session(bundle, options.session), bundle.spec(), options, std::move(prompt));
}

Detector::Detector(std::unique_ptr<Session> session, ModelSpec spec, const DetectorOptions& options,
                   std::optional<Prompt> prompt)
    : session_(std::move(session)), spec_(std::move(spec)), prompt_(std::move(prompt)), size_(options.size),
      tiling_(options.tiling) {
  decode_.threshold = options.threshold;
  decode_.max_detections = options.max_detections;
  check_options(decode_);
  if (tiling_) {
    check_tiling(*tiling_);
    std::swap(most_, decode_.max_detections);
  }
  if (spec_.text && !options.classes.empty())
    throw Error(ErrorKind::prompt,
                "this model has no classes of its own to choose from with --classes; say what to find with "
                "--prompt FILE of detrt encode-prompt");
  if (spec_.text && !prompt_)
    throw Error(ErrorKind::prompt,
                "this model finds what a prompt names, and there is none; make one with: detrt encode-prompt "
                "BUNDLE --prompt 'a cat. a dog.' -o prompt.json, and give it with --prompt prompt.json");
  if (prompt_)
    spec_ = prompt_->spec();
  if (!options.classes.empty())
    decode_.class_ids = spec_.class_ids(options.classes);
  for (const TensorInfo& info : session_->inputs())
    if (info.name == "pixel_values" && info.shape.size() == 4) {
      fixed_batch_ = std::max<std::int64_t>(info.shape[0], 0);
      if (!size_ && spec_.input.dynamic && info.shape[2] > 0 && info.shape[3] > 0) // of one size, from a model of many
        size_ = Size{static_cast<int>(info.shape[2]), static_cast<int>(info.shape[3])};
    }
  check_size(spec_.input, size_);
  const std::int64_t most = fixed_batch_ > 0 ? fixed_batch_ : session_->max_batch().value_or(largest_batch);
  batch_ = options.batch.value_or(fixed_batch_ > 0 ? fixed_batch_ : session_->max_batch() ? most : 1);
  if (batch_ < 1 || batch_ > most)
    throw Error(ErrorKind::usage, "batch must be from 1 to " + std::to_string(most) +
                                      " with this model and backend (" + session_->backend() + "); got " +
                                      std::to_string(batch_));
}

std::vector<Detections> Detector::operator()(const std::vector<Image>& images, Timing* timing) const {
  std::vector<const Image*> pointers;
  for (const Image& image : images)
    pointers.push_back(&image);
  return (*this)(pointers, timing);
}

std::vector<Detections> Detector::operator()(const std::vector<const Image*>& images, Timing* timing) const {
  Timing unused;
  Timing& spent = timing ? *timing : unused;
  if (!tiling_)
    return whole(images, spent);
  std::vector<Detections> results;
  for (const Image* image : images)
    results.push_back(in_tiles(*image, spent));
  return results;
}

Detections Detector::in_tiles(const Image& image, Timing& timing) const {
  Clock clock;
  const Image pixels = image.rgb.empty() ? decoded(image) : Image();
  const Image& source = image.rgb.empty() ? pixels : image;
  timing.preprocess_ms += clock.lap_ms();
  std::vector<std::pair<Window, Detections>> parts;
  const std::vector<Window> windows = windows_of(*tiling_, source.size());
  const auto step = static_cast<std::size_t>(batch_);
  for (std::size_t start = 0; start < windows.size(); start += step) { // no more copies of pixels than a batch has
    const std::size_t end = std::min(start + step, windows.size());
    clock.lap_ms();
    std::vector<Image> tiles;
    for (std::size_t i = start; i < end; ++i)
      tiles.push_back(part_of(source, windows[i]));
    timing.preprocess_ms += clock.lap_ms();
    std::vector<const Image*> some;
    for (const Image& tile : tiles)
      some.push_back(&tile);
    std::vector<Detections> found = whole(some, timing);
    for (std::size_t i = start; i < end; ++i)
      parts.emplace_back(windows[i], std::move(found[i - start]));
  }
  clock.lap_ms();
  Detections merged = merge_tiles(std::move(parts), *tiling_, source.size());
  if (most_ && merged.found.size() > static_cast<std::size_t>(*most_))
    merged.found.resize(static_cast<std::size_t>(*most_));
  timing.decode_ms += clock.lap_ms();
  return merged;
}

std::vector<Detections> Detector::whole(const std::vector<const Image*>& images, Timing& spent) const {
  std::vector<Detections> results(images.size());
  const auto step = static_cast<std::size_t>(batch_);
  for (std::size_t start = 0; start < images.size(); start += step) {
    std::vector<Size> sizes;
    for (std::size_t i = start; i < std::min(start + step, images.size()); ++i)
      sizes.push_back(images[i]->size());
    for (const auto& group : group_by_size(sizes, spec_, size_)) {
      std::vector<const Image*> some;
      for (std::size_t i : group)
        some.push_back(images[start + i]);
      std::vector<Detections> found = run(some, spent);
      for (std::size_t i = 0; i < group.size(); ++i)
        results[start + group[i]] = std::move(found[i]);
    }
  }
  return results;
}

std::vector<Detections> Detector::run(std::vector<const Image*> images, Timing& timing) const {
  Clock clock;
  const std::size_t count = images.size();
  if (fixed_batch_ > 0) // a fixed batch: repeat the last image and drop its results
    images.resize(std::max(count, static_cast<std::size_t>(fixed_batch_)), images.back());
  const BatchPlan plan = plan_batch(images, spec_, size_);
  const bool there = session_->takes_images();
  const Tensors feeds = there ? size_feeds(plan, spec_) : preprocess(images, spec_, size_).feeds;
  timing.preprocess_ms += clock.lap_ms();
  const auto model = [&](const Tensors& all) {
    return there ? session_->run_images(plan, all, decode_.threshold, timing.forward_ms) : session_->run(all);
  };
  Tensors outputs;
  if (prompt_) {
    std::vector<Tensors> runs;
    for (std::size_t part = 0; part < prompt_->parts().size(); ++part) {
      Tensors all = prompt_->feeds(part, static_cast<std::int64_t>(images.size()), *session_);
      for (const auto& [name, tensor] : feeds)
        all.emplace(name, tensor);
      runs.push_back(model(all));
    }
    outputs = prompt_->merged(runs, static_cast<std::int64_t>(images.size()));
  } else {
    outputs = model(feeds);
  }
  timing.model_ms += clock.lap_ms();
  std::vector<Detections> found = decode(outputs, spec_, plan.original_sizes, decode_);
  found.resize(count);
  if (prompt_)
    for (Detections& detections : found)
      prompt_->name(detections);
  timing.decode_ms += clock.lap_ms();
  return found;
}

} // namespace detrt
