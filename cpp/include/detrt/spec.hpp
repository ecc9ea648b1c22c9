// ModelSpec: every fact about a model that a runtime needs, read from the JSON of detrt (Python).
// Fields, defaults and rules are those of src/detrt/spec.py. Sizes are (height, width) in pixels.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace detrt {

constexpr int schema = 1;
constexpr int largest_side = 16384; // pixels of an input

struct Size {
  int height = 0;
  int width = 0;
  bool operator==(const Size& o) const noexcept { return height == o.height && width == o.width; }
  bool operator!=(const Size& o) const noexcept { return !(*this == o); }
  bool operator<(const Size& o) const noexcept { return height != o.height ? height < o.height : width < o.width; }
};

enum class Resize { stretch, shortest_edge, fit, max_size };
enum class Resample { nearest, lanczos, bilinear, bicubic, box, hamming };
enum class Activation { sigmoid, softmax };
enum class Select { topk, query };
enum class Nms { none, nms, soft_nms };
enum class TextKind { tokens, classes };

struct InputSpec {
  Resize resize = Resize::stretch;
  Size size;
  std::optional<int> shortest_edge, longest_edge, max_height, max_width;
  bool pad = false; // every batch is padded to `size`
  Resample resample = Resample::bilinear;
  double rescale = 1.0 / 255.0;
  std::array<double, 3> mean{0, 0, 0}, std{1, 1, 1};
  bool float_pixels = false; // dtype "float32" instead of "uint8"
  bool mask = false;
  bool dynamic = false;
  int multiple_of = 1;
  bool normalize_in_graph = true;
  // No mask, but the aspect ratio is kept: only images of equal resized size share a batch.
  bool needs_equal_sizes() const noexcept { return !one_size() && !mask; }
  // Every batch has the size `size`.
  bool one_size() const noexcept { return pad || resize == Resize::stretch || resize == Resize::fit; }
};

struct DecodeSpec {
  Activation activation = Activation::sigmoid;
  Select select = Select::topk;
  std::int64_t num_queries = 0, num_classes = 0, max_detections = 0;
  bool in_graph = false;
  Nms nms = Nms::none;
  double nms_iou = 0.8, nms_min_score = 0.001;
  bool nms_in_graph = false;
  double score_threshold = 0;
  int mask_stride = 0; // pixels of the input, along one side, per value of "mask_logits"; 0: no masks
};

struct TextSpec {
  TextKind kind = TextKind::tokens;
  std::int64_t max_tokens = 0, features = 0, pad_id = 0;
  std::vector<std::int64_t> separators;
  std::string tokenizer = "tokenizer.json", encoder = "text.onnx";
};

struct ModelSpec {
  std::string family, name;
  InputSpec input;
  DecodeSpec decode;
  std::map<std::int64_t, std::string> labels;
  std::optional<TextSpec> text;
  bool has_masks = false; // task "instance-segmentation"

  // Throws Error (spec): unknown or missing fields, wrong types or values, or a newer schema.
  static ModelSpec from_json(const std::string& text);
  // Name of a class, or its number as text if it has none.
  std::string label(std::int64_t class_id) const;
  // Class ids of names, each once: a name as it is written, or without regard to case and spaces where that is one name; all
  // ids of it; else id:3, or 3 where no name is a number. Throws Error (spec) with close names.
  std::vector<std::int64_t> class_ids(const std::vector<std::string>& names) const;
};

// The names of a comma-separated text; double quotes hold a name that has commas or outer spaces. Throws Error (spec) for none.
std::vector<std::string> split_classes(const std::string& text);

} // namespace detrt
