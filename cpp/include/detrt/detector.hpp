// Images in, detections out: `detrt::Detector::open("bundle")`.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "detrt/decode.hpp"
#include "detrt/error.hpp"
#include "detrt/image.hpp"
#include "detrt/prompt.hpp"
#include "detrt/session.hpp"
#include "detrt/tiles.hpp"

namespace detrt {

struct DetectorOptions {
  double threshold = 0.5;           // keep scores above it
  std::vector<std::string> classes; // names or ids to keep; empty: all
  std::optional<std::int64_t> max_detections;
  std::optional<std::int64_t> batch; // batch size; default: the model's fixed batch, else 1
  std::optional<Size> size;          // another input size, for models with a dynamic size
  std::optional<Tiling> tiling;      // detect in tiles of large images, and join what they show
  std::string prompt;                // file of `detrt encode-prompt`, for models that take a prompt
  SessionOptions session;
};

// Milliseconds of the parts of one call.
struct Timing {
  double preprocess_ms = 0, model_ms = 0, decode_ms = 0;
  double forward_ms = 0; // part of model_ms, where that has the images' way to the GPU, their resize and the choice of candidates
};

class Detector {
public:
  // Throws Error for an invalid bundle or invalid options.
  static Detector open(const std::filesystem::path& bundle, const DetectorOptions& options = {});
  // On any session, e.g. of another backend.
  Detector(std::unique_ptr<Session> session, ModelSpec spec, const DetectorOptions& options = {},
           std::optional<Prompt> prompt = {});

  // One Detections for each image, in order; runs as many batches as needed. Throws Error.
  // Thread-safe if the session is.
  std::vector<Detections> operator()(const std::vector<Image>& images, Timing* timing = nullptr) const;
  std::vector<Detections> operator()(const std::vector<const Image*>& images, Timing* timing = nullptr) const;

  const ModelSpec& spec() const noexcept { return spec_; } // with the prompt's phrases as labels
  Session& session() const noexcept { return *session_; }
  std::int64_t batch() const noexcept { return batch_; }

private:
  std::vector<Detections> whole(const std::vector<const Image*>& images, Timing& timing) const;
  Detections in_tiles(const Image& image, Timing& timing) const;
  std::vector<Detections> run(std::vector<const Image*> images, Timing& timing) const;

  std::unique_ptr<Session> session_;
  ModelSpec spec_;
  std::optional<Prompt> prompt_;
  DecodeOptions decode_;
  std::optional<Size> size_;
  std::optional<Tiling> tiling_;
  std::optional<std::int64_t> most_; // detections of an image in tiles
  std::int64_t batch_ = 1, fixed_batch_ = 0;
};

} // namespace detrt
