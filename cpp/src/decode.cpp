#include "detrt/decode.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "chosen.hpp"
#include "detrt/preprocess.hpp"

namespace detrt {
namespace {

constexpr const char* overflow =
    ": numbers overflowed inside the model; build it again with --precision fp32, and check the "
    "checkpoint if it happens there too";
constexpr const char* foreign = "the spec does not belong to this file: export it again";

// A pointer: g++ 13 warns that a reference might refer to a temporary among the arguments.
const Tensor* take(const Tensors& outputs, const char* name, DType dtype, std::vector<std::int64_t> shape) {
  const auto found = outputs.find(name);
  if (found == outputs.end())
    throw Error(ErrorKind::session,
                "the model did not return '" + std::string(name) + "', which its spec promises; " + foreign);
  const Tensor& tensor = found->second;
  if (tensor.shape() != shape || tensor.dtype() != dtype)
    throw Error(ErrorKind::session, "the model returned '" + std::string(name) + "' as " + name_of(tensor.dtype()) +
                                        " " + shape_text(tensor.shape()) + "; its spec promises " + name_of(dtype) +
                                        " " + shape_text(shape) + "; " + foreign);
  return &tensor;
}

void check_finite(const float* values, std::int64_t count, bool minus_infinity, const std::string& name) {
  for (std::int64_t i = 0; i < count; ++i)
    if (!(std::isfinite(values[i]) || (minus_infinity && values[i] == -std::numeric_limits<float>::infinity())))
      throw not_finite(name);
}

float sigmoid(float x) {
  const float small = std::exp(-std::fabs(x));
  return (x >= 0 ? 1.0f : small) / (1.0f + small);
}

// Scores of one query: sigmoid of each column, or softmax over all columns without the last.
void scores_of(const float* logits, const DecodeSpec& rule, float* scores) {
  const std::int64_t classes = rule.num_classes;
  if (rule.activation == Activation::sigmoid) {
    std::transform(logits, logits + classes, scores, sigmoid);
    return;
  }
  const float top = *std::max_element(logits, logits + classes + 1);
  const float shift = std::isfinite(top) ? top : 0.0f;
  float total = std::exp(logits[classes] - shift);
  for (std::int64_t c = 0; c < classes; ++c)
    total += scores[c] = std::exp(logits[c] - shift);
  for (std::int64_t c = 0; c < classes; ++c)
    scores[c] = total > 0 ? scores[c] / total : 0.0f;
}

std::array<float, 4> corners(const float* box, Size size) {
  const auto w = static_cast<float>(size.width), h = static_cast<float>(size.height);
  const float half_w = box[2] / 2, half_h = box[3] / 2;
  return {(box[0] - half_w) * w, (box[1] - half_h) * h, (box[0] + half_w) * w, (box[1] + half_h) * h};
}

// The raw outputs of a batch: of all queries, or of those that a device chose.
struct RawOutputs {
  const float *logits = nullptr, *boxes = nullptr;
  const std::int64_t* chosen = nullptr; // image and query of each row
  std::int64_t rows = 0;                // of all images, if chosen; else of each
};

RawOutputs read_raw(const Tensors& outputs, const DecodeSpec& rule, std::int64_t images) {
  const std::int64_t columns = rule.num_classes + (rule.activation == Activation::softmax);
  RawOutputs raw{nullptr, nullptr, nullptr, rule.num_queries};
  std::vector<std::int64_t> shape{images, rule.num_queries};
  if (const auto found = outputs.find(chosen_queries); found != outputs.end()) {
    raw.rows = found->second.shape().front();
    raw.chosen = found->second.as<std::int64_t>();
    shape = {raw.rows};
  }
  const auto values = [&](const char* name, std::int64_t last) {
    std::vector<std::int64_t> whole = shape;
    whole.push_back(last);
    const Tensor& tensor = *take(outputs, name, DType::float32, whole);
    check_finite(tensor.as<float>(), tensor.elements(), last == columns, name);
    return tensor.as<float>();
  };
  raw.logits = values("logits", columns);
  raw.boxes = values("pred_boxes", 4);
  return raw;
}

// The best candidates of one image, best first; equal scores by query and class.
std::vector<Candidate> candidates_of(const RawOutputs& raw, std::int64_t image, Size size, const DecodeSpec& rule,
                                     float threshold) {
  struct Picked {
    float score;
    std::size_t flat, row; // query * classes + class, row of the outputs
  };
  const auto classes = static_cast<std::size_t>(rule.num_classes), rows = static_cast<std::size_t>(raw.rows);
  const std::size_t columns = classes + (rule.activation == Activation::softmax);
  const std::size_t start = raw.chosen ? 0 : static_cast<std::size_t>(image) * rows;
  std::vector<float> scores(classes);
  std::vector<Picked> picked;
  for (std::size_t row = start; row < start + rows; ++row) {
    if (raw.chosen && raw.chosen[2 * row] != image)
      continue;
    const std::size_t query = raw.chosen ? static_cast<std::size_t>(raw.chosen[2 * row + 1]) : row - start;
    scores_of(raw.logits + row * columns, rule, scores.data());
    if (rule.select == Select::query) {
      const auto best = static_cast<std::size_t>(std::max_element(scores.begin(), scores.end()) - scores.begin());
      if (scores[best] > threshold)
        picked.push_back({scores[best], query * classes + best, row});
      continue;
    }
    for (std::size_t c = 0; c < classes; ++c)
      if (scores[c] > threshold)
        picked.push_back({scores[c], query * classes + c, row});
  }
  const auto most = static_cast<std::size_t>(rule.nms == Nms::none ? rule.max_detections : rule.num_queries);
  const auto end = picked.begin() + static_cast<std::ptrdiff_t>(std::min(most, picked.size()));
  std::partial_sort(picked.begin(), end, picked.end(), [](const Picked& a, const Picked& b) {
    return a.score != b.score ? a.score > b.score : a.flat < b.flat;
  });
  std::vector<Candidate> found;
  for (auto it = picked.begin(); it != end; ++it)
    found.push_back({corners(raw.boxes + it->row * 4, size), it->score, static_cast<std::int64_t>(it->flat % classes),
                     static_cast<std::int64_t>(it->flat / classes)});
  return found;
}

std::vector<Candidate> read_decoded(const Tensors& outputs, const DecodeSpec& rule, std::int64_t images,
                                    std::int64_t image) {
  const std::int64_t k = rule.max_detections;
  const float* boxes = take(outputs, "boxes", DType::float32, {images, k, 4})->as<float>() + image * k * 4;
  const float* scores = take(outputs, "scores", DType::float32, {images, k})->as<float>() + image * k;
  const std::int64_t* ids = take(outputs, "labels", DType::int64, {images, k})->as<std::int64_t>() + image * k;
  const std::int64_t count = take(outputs, "num_detections", DType::int64, {images})->as<std::int64_t>()[image];
  if (count < 0 || count > k)
    throw Error(ErrorKind::session, "the model returned num_detections = " + std::to_string(count) +
                                        "; it must be from 0 to " + std::to_string(k));
  check_finite(boxes, count * 4, false, "boxes");
  check_finite(scores, count, false, "scores");
  std::vector<Candidate> found(static_cast<std::size_t>(count));
  for (Candidate& candidate : found) {
    std::copy_n(boxes, 4, candidate.box.begin());
    candidate.score = *scores++;
    candidate.class_id = *ids++;
    candidate.map = &candidate - found.data();
    boxes += 4;
  }
  return found;
}

// The mask logits of a batch.
struct Maps {
  const float* values = nullptr;
  std::int64_t count = 0; // of one image
  Size size;

  Runs encode(std::int64_t image, std::int64_t index, Size original, const ModelSpec& spec) const {
    const std::int64_t elements = static_cast<std::int64_t>(size.height) * size.width;
    const float* map = values + (image * count + index) * elements;
    check_finite(map, elements, false, "mask_logits");
    Covered covered{static_cast<double>(size.height), static_cast<double>(size.width)};
    if (spec.input.mask) {
      const Size resized = resized_size(original, spec.input);
      const double stride = spec.decode.mask_stride;
      covered = {resized.height / stride, resized.width / stride};
    }
    return encode_mask(map, size, original, covered);
  }
};

Maps read_maps(const Tensors& outputs, const ModelSpec& spec, std::int64_t images) {
  Maps maps;
  maps.count = spec.decode.in_graph ? spec.decode.max_detections : spec.decode.num_queries;
  maps.size = {spec.input.size.height / spec.decode.mask_stride, spec.input.size.width / spec.decode.mask_stride};
  const auto found = outputs.find("mask_logits");
  // Sides of maps follow those of the input, which may be symbolic.
  if (found != outputs.end() && found->second.shape().size() == 4) {
    const auto& shape = found->second.shape();
    if (shape[2] > 0 && shape[3] > 0)
      maps.size = {static_cast<int>(shape[2]), static_cast<int>(shape[3])};
  }
  maps.values =
      take(outputs, "mask_logits", DType::float32, {images, maps.count, maps.size.height, maps.size.width})->as<float>();
  return maps;
}

} // namespace

Error not_finite(const std::string& output) {
  return Error(ErrorKind::session, "the model returned NaN or infinite values in '" + output + "'" + overflow);
}

void check_options(const DecodeOptions& options) {
  if (!(options.threshold >= 0 && options.threshold <= 1))
    throw Error(ErrorKind::usage, "threshold must be from 0 to 1; got " + std::to_string(options.threshold));
  if (options.max_detections && *options.max_detections < 1)
    throw Error(ErrorKind::usage, "max_detections must be at least 1; got " + std::to_string(*options.max_detections));
}

std::vector<Detections> decode(const Tensors& outputs, const ModelSpec& spec, const std::vector<Size>& original_sizes,
                               const DecodeOptions& options) {
  check_options(options);
  const DecodeSpec& rule = spec.decode;
  const auto images = static_cast<std::int64_t>(original_sizes.size());
  const auto threshold = static_cast<float>(options.threshold);
  const RawOutputs raw = rule.in_graph ? RawOutputs{} : read_raw(outputs, rule, images);
  const Maps maps = spec.has_masks ? read_maps(outputs, spec, images) : Maps{};
  std::vector<Detections> results;
  for (std::int64_t i = 0; i < images; ++i) {
    const Size size = original_sizes[static_cast<std::size_t>(i)];
    std::vector<Candidate> candidates =
        rule.in_graph ? read_decoded(outputs, rule, images, i) : candidates_of(raw, i, size, rule, threshold);
    for (Candidate& candidate : candidates)
      for (std::size_t c = 0; c < 4; ++c)
        candidate.box[c] =
            std::clamp(candidate.box[c], 0.0f, static_cast<float>(c % 2 == 0 ? size.width : size.height));
    if (rule.nms != Nms::none && !rule.nms_in_graph) {
      candidates = suppress(candidates, rule);
      candidates.resize(std::min(candidates.size(), static_cast<std::size_t>(rule.max_detections)));
    }
    Detections detections;
    detections.image_size = size;
    for (const Candidate& candidate : candidates) {
      const auto& ids = options.class_ids;
      const bool wanted = !ids || std::find(ids->begin(), ids->end(), candidate.class_id) != ids->end();
      if (!(candidate.score > threshold) || !wanted)
        continue;
      if (options.max_detections && detections.found.size() == static_cast<std::size_t>(*options.max_detections))
        break;
      detections.found.push_back(
          {candidate.box, candidate.score, candidate.class_id, spec.label(candidate.class_id), {}, {}});
      if (spec.has_masks)
        detections.found.back().mask = maps.encode(i, candidate.map, size, spec);
    }
    results.push_back(std::move(detections));
  }
  return results;
}

std::vector<Candidate> suppress(const std::vector<Candidate>& candidates, const DecodeSpec& rule) {
  if (rule.nms == Nms::none)
    return candidates;
  std::vector<Candidate> kept;
  std::vector<float> left, area;
  for (const Candidate& c : candidates) {
    left.push_back(c.score);
    area.push_back((c.box[2] - c.box[0]) * (c.box[3] - c.box[1]));
  }
  std::vector<std::size_t> alive(candidates.size());
  std::iota(alive.begin(), alive.end(), std::size_t{0});
  const auto limit = static_cast<float>(rule.nms_iou), least = static_cast<float>(rule.nms_min_score);
  while (!alive.empty()) {
    // Stable: the first of equal scores.
    const auto at =
        std::max_element(alive.begin(), alive.end(), [&](std::size_t a, std::size_t b) { return left[a] < left[b]; });
    const std::size_t best = *at;
    alive.erase(at);
    kept.push_back(candidates[best]);
    kept.back().score = left[best];
    const auto& a = candidates[best].box;
    const auto covered = [&](std::size_t other) {
      if (candidates[other].class_id != candidates[best].class_id)
        return false;
      const auto& b = candidates[other].box;
      const float width = std::max(std::min(a[2], b[2]) - std::max(a[0], b[0]), 0.0f);
      const float height = std::max(std::min(a[3], b[3]) - std::max(a[1], b[1]), 0.0f);
      const float inner = width * height, whole = area[other] + area[best] - inner;
      const float iou = whole > 0 ? inner / whole : 0.0f;
      if (rule.nms == Nms::nms)
        return iou > limit;
      if (iou >= limit)
        left[other] *= 1.0f - iou;
      return false;
    };
    alive.erase(std::remove_if(alive.begin(), alive.end(), covered), alive.end());
    if (rule.nms == Nms::soft_nms) // every pass drops low scores, also of other classes
      alive.erase(std::remove_if(alive.begin(), alive.end(), [&](std::size_t i) { return left[i] < least; }),
                  alive.end());
  }
  return kept;
}

} // namespace detrt
