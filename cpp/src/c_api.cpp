#include "detrt/detrt.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "detrt/detector.hpp"
#include "detrt/error.hpp"

struct detrt_detector {
  detrt::Detector detector;
};

struct detrt_result {
  detrt::Detections detections;
  std::string json;
};

namespace {

thread_local std::string last_error;

// Runs a function and converts exceptions into a status.
template <class Function> detrt_status guarded(Function&& function) noexcept {
  try {
    last_error.clear();
    function();
    return DETRT_OK;
  } catch (const detrt::Error& error) {
    last_error = error.what();
    return DETRT_BAD_INPUT;
  } catch (const std::bad_alloc&) {
    last_error = "not enough memory; use a smaller size or batch";
    return DETRT_BAD_INPUT;
  } catch (const std::exception& error) {
    last_error = std::string("a bug in libdetrt: ") + error.what();
    return DETRT_BUG;
  } catch (...) {
    last_error = "a bug in libdetrt: an unknown exception";
    return DETRT_BUG;
  }
}

void need(const void* pointer, const char* name) {
  if (pointer == nullptr)
    throw detrt::Error(detrt::ErrorKind::usage, std::string(name) + " must not be NULL");
}

detrt_result* run(const detrt_detector& detector, const detrt::Image& image, const std::string& name) {
  auto found = detector.detector({&image});
  std::string json = detrt::to_json(found.front(), name);
  return new detrt_result{std::move(found.front()), std::move(json)};
}

} // namespace

void detrt_options_init(detrt_options* options) {
  if (options == nullptr)
    return;
  std::memset(options, 0, sizeof *options);
  options->size = sizeof *options;
  options->threshold = 0.5;
  options->overlap = 0.2;
}

detrt_status detrt_open(const char* bundle, const detrt_options* options, detrt_detector** detector) {
  return guarded([&] {
    need(detector, "detector");
    *detector = nullptr;
    need(bundle, "bundle");
    detrt::DetectorOptions chosen;
    if (options != nullptr) {
      if (options->size != sizeof *options)
        throw detrt::Error(detrt::ErrorKind::usage,
                           "options must be set up with detrt_options_init of this version of libdetrt");
      chosen.threshold = options->threshold;
      if (options->max_detections != 0)
        chosen.max_detections = options->max_detections;
      if (options->batch != 0)
        chosen.batch = options->batch;
      if (options->threads < 0 || options->threads > 4096)
        throw detrt::Error(detrt::ErrorKind::usage, "threads must be from 1 to 4096, or 0 for the default of the backend; got " +
                                                        std::to_string(options->threads));
      chosen.session.threads = options->threads;
      if (options->classes != nullptr)
        chosen.classes = detrt::split_classes(options->classes);
      if (options->tile_height != 0 || options->tile_width != 0)
        chosen.tiling = detrt::Tiling{
            {options->tile_height, options->tile_width == 0 ? options->tile_height : options->tile_width}, options->overlap};
      chosen.prompt = options->prompt == nullptr ? "" : options->prompt;
      chosen.session.backend = options->backend == nullptr ? "auto" : options->backend;
      chosen.session.trust_code = options->trust_code != 0;
      chosen.session.device = options->device == nullptr ? "auto" : options->device;
    }
    *detector = new detrt_detector{detrt::Detector::open(bundle, chosen)};
  });
}

void detrt_close(detrt_detector* detector) {
  delete detector;
}

detrt_status detrt_detect_file(detrt_detector* detector, const char* path, detrt_result** result) {
  return guarded([&] {
    need(result, "result");
    *result = nullptr;
    need(detector, "detector");
    need(path, "path");
    *result = run(*detector, detrt::load_image(path), path);
  });
}

detrt_status detrt_detect_rgb(detrt_detector* detector, const uint8_t* rgb, int32_t height, int32_t width,
                              size_t stride, detrt_result** result) {
  return guarded([&] {
    need(result, "result");
    *result = nullptr;
    need(detector, "detector");
    need(rgb, "rgb");
    const std::size_t row = static_cast<std::size_t>(std::max(width, 0)) * 3;
    if (height < 1 || width < 1 || static_cast<std::int64_t>(height) * width > detrt::max_pixels ||
        (stride != 0 && stride < row))
      throw detrt::Error(detrt::ErrorKind::image, "an image must have from 1 to " + std::to_string(detrt::max_pixels) +
                                                      " pixels and at least width * 3 bytes per row; got " +
                                                      std::to_string(height) + "x" + std::to_string(width));
    detrt::Image image(height, width);
    for (int y = 0; y < height; ++y)
      std::copy_n(rgb + static_cast<std::size_t>(y) * (stride == 0 ? row : stride), row,
                  image.rgb.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(y) * row));
    *result = run(*detector, image, "");
  });
}

size_t detrt_count(const detrt_result* result) {
  return result == nullptr ? 0 : result->detections.found.size();
}

detrt_detection detrt_get(const detrt_result* result, size_t index) {
  if (index >= detrt_count(result))
    return {{0, 0, 0, 0}, 0, 0, ""};
  const detrt::Detection& d = result->detections.found[index];
  return {{d.box_xyxy[0], d.box_xyxy[1], d.box_xyxy[2], d.box_xyxy[3]}, d.score, d.class_id, d.label.c_str()};
}

int detrt_mask(const detrt_result* result, size_t index, uint8_t* pixels) {
  if (index >= detrt_count(result) || pixels == nullptr || !result->detections.found[index].mask)
    return 0;
  const std::vector<std::uint8_t> mask =
      detrt::mask_pixels(*result->detections.found[index].mask, result->detections.image_size);
  std::copy(mask.begin(), mask.end(), pixels);
  return 1;
}

const char* detrt_json(const detrt_result* result) {
  return result == nullptr ? "" : result->json.c_str();
}
void detrt_free(detrt_result* result) {
  delete result;
}
const char* detrt_last_error(void) {
  return last_error.c_str();
}
const char* detrt_version(void) {
  return "0.1.0";
}
