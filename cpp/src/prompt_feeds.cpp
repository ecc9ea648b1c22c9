// Text inputs of a batch, and outputs of the chunks of a prompt as those of a model of fixed classes.
// The rules of src/detrt/backends/prompted.py and src/detrt/backends/merge_chunks.py.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "detrt/error.hpp"
#include "detrt/prompt.hpp"

namespace detrt {
namespace {

constexpr double same_place_iou = 0.9;
constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// Kind of each axis of the text inputs: 't' tokens, 'c' classes, 'p' phrases, '.' none.
const char* axes_of(const std::string& input) {
  static const std::map<std::string, const char*> axes{
      {"input_ids", ".t"},         {"attention_mask", ".t"}, {"text_features", ".t."}, {"text_self_mask", ".tt"},
      {"text_position_ids", ".t"}, {"phrase_mask", ".pt"},   {"task_features", ".t."}, {"task_mask", ".t"},
      {"class_features", ".c."},   {"class_mask", ".c"}};
  const auto found = axes.find(input);
  return found == axes.end() ? nullptr : found->second;
}

std::int64_t fitted(std::int64_t length, char axis, const Session& session) {
  const std::int64_t step = axis == 't' ? session.length_step() : 1;
  std::int64_t low = 1, high = std::numeric_limits<std::int64_t>::max();
  for (const TensorInfo& info : session.inputs()) {
    const char* axes = axes_of(info.name);
    const auto limits = session.limits(info.name);
    for (std::size_t i = 0; axes != nullptr && axes[i] != '\0' && i < info.shape.size(); ++i) {
      if (axes[i] != axis)
        continue;
      if (limits && i < limits->first.size() && i < limits->second.size()) {
        low = std::max(low, limits->first[i]);
        high = std::min(high, limits->second[i]);
      } else if (info.shape[i] >= 0) {
        low = std::max(low, info.shape[i]);
        high = std::min(high, info.shape[i]);
      }
    }
  }
  if (length > high)
    throw Error(ErrorKind::prompt, "the prompt has " + std::to_string(length) + (axis == 't' ? " tokens" : " phrases") +
                                       ", this model takes at most " + std::to_string(high) + "; make it shorter");
  return std::min(high, std::max(low, (length + step - 1) / step * step));
}

// `from` (1, ...) in the upper left corner of every image of `to` (n, ...).
void copy_rows(const Tensor& from, Tensor& to) {
  const std::size_t size = size_of(from.dtype());
  std::vector<std::int64_t> a = from.shape(), b = to.shape();
  a.resize(4, 1);
  b.resize(4, 1);
  const auto* in = static_cast<const char*>(from.data());
  auto* out = static_cast<char*>(to.data());
  const std::size_t run = static_cast<std::size_t>(a[3]) * size;
  for (std::int64_t image = 0; image < b[0]; ++image)
    for (std::int64_t i = 0; i < a[1]; ++i)
      for (std::int64_t j = 0; j < a[2]; ++j) {
        const std::int64_t source = (i * a[2] + j) * a[3], target = ((image * b[1] + i) * b[2] + j) * b[3];
        std::memcpy(out + static_cast<std::size_t>(target) * size, in + static_cast<std::size_t>(source) * size, run);
      }
}

double iou(const float* a, const float* b) {
  const double width = std::min<double>(a[2], b[2]) - std::max<double>(a[0], b[0]);
  const double height = std::min<double>(a[3], b[3]) - std::max<double>(a[1], b[1]);
  const double inner = std::max(width, 0.0) * std::max(height, 0.0);
  const auto area = [](const float* c) {
    return std::max(static_cast<double>(c[2]) - c[0], 0.0) * std::max(static_cast<double>(c[3]) - c[1], 0.0);
  };
  const double whole = area(a) + area(b) - inner;
  return whole > 0 ? inner / whole : 0.0;
}

struct Place {
  std::array<float, 4> box;
  std::size_t part, index;
};

// Cross-chunk NMS: the `most` best boxes that no better box of another chunk overlaps.
std::vector<Place> one_a_place(const std::vector<Place>& places, std::size_t most) {
  std::vector<Place> kept;
  for (const Place& place : places) {
    const bool taken = std::any_of(kept.begin(), kept.end(), [&](const Place& other) {
      return other.part != place.part && iou(other.box.data(), place.box.data()) > same_place_iou;
    });
    if (!taken && kept.size() < most)
      kept.push_back(place);
  }
  return kept;
}

const Tensor& output(const Tensors& outputs, const char* name, DType dtype, std::size_t rank, std::int64_t images,
                     std::int64_t second) {
  const auto found = outputs.find(name);
  const bool ok = found != outputs.end() && found->second.dtype() == dtype && found->second.shape().size() == rank &&
                  found->second.shape()[0] == images && (rank < 2 || found->second.shape()[1] == second);
  if (!ok)
    throw Error(ErrorKind::session, "the model did not return '" + std::string(name) +
                                        "' as its spec promises; the spec does not belong to "
                                        "this file: export it again");
  return found->second;
}

} // namespace

Tensors Prompt::feeds(std::size_t part, std::int64_t images, const Session& session) const {
  const PromptPart& chosen = parts_.at(part);
  Tensors feeds;
  for (const TensorInfo& info : session.inputs()) {
    const char* axes = axes_of(info.name);
    if (axes == nullptr)
      continue;
    const auto found = chosen.feeds.find(info.name);
    if (found == chosen.feeds.end() || found->second.shape().size() != std::strlen(axes))
      throw Error(ErrorKind::prompt,
                  "the prompt has no input '" + info.name + "' of this model; make it again with detrt encode-prompt");
    std::vector<std::int64_t> shape = found->second.shape();
    shape[0] = images;
    for (std::size_t i = 1; i < shape.size(); ++i)
      if (axes[i] != '.')
        shape[i] = fitted(shape[i], axes[i], session);
    Tensor tensor(found->second.dtype(), shape);
    if (info.name == "input_ids")
      std::fill_n(tensor.as<std::int64_t>(), tensor.elements(), pad_id_);
    if (info.name == "text_self_mask") // padding attends to itself only: a softmax over nothing is NaN
      for (std::int64_t row = 0; row < images * shape[1]; ++row)
        tensor.as<std::int64_t>()[row * shape[2] + row % shape[1]] = 1;
    copy_rows(found->second, tensor);
    feeds.emplace(info.name, std::move(tensor));
  }
  return feeds;
}

Tensors Prompt::merged(const std::vector<Tensors>& runs, std::int64_t images) const {
  return spec_.decode.in_graph ? merged_decoded(runs, images) : merged_raw(runs, images);
}

Tensors Prompt::merged_decoded(const std::vector<Tensors>& runs, std::int64_t images) const {
  Tensors result;
  const std::int64_t k = model_.max_detections;
  Tensor boxes(DType::float32, {images, k, 4}), scores(DType::float32, {images, k}), labels(DType::int64, {images, k});
  Tensor counts(DType::int64, {images});
  for (std::int64_t image = 0; image < images; ++image) {
    struct Row {
      Place place;
      float score;
      std::int64_t id;
    };
    std::vector<Row> rows;
    for (std::size_t p = 0; p < runs.size(); ++p) {
      const float* box = output(runs[p], "boxes", DType::float32, 3, images, k).as<float>() + image * k * 4;
      const float* score = output(runs[p], "scores", DType::float32, 2, images, k).as<float>() + image * k;
      const std::int64_t* id = output(runs[p], "labels", DType::int64, 2, images, k).as<std::int64_t>() + image * k;
      const std::int64_t count =
          output(runs[p], "num_detections", DType::int64, 1, images, 0).as<std::int64_t>()[image];
      for (std::int64_t i = 0; i < std::clamp<std::int64_t>(count, 0, k); ++i)
        if (id[i] >= 0 && id[i] < static_cast<std::int64_t>(parts_[p].phrases.size())) // padded phrases do not count
          rows.push_back({{{box[i * 4], box[i * 4 + 1], box[i * 4 + 2], box[i * 4 + 3]}, p, rows.size()},
                          score[i],
                          parts_[p].phrases[static_cast<std::size_t>(id[i])].class_id});
    }
    std::vector<Row> sorted = rows;
    std::stable_sort(sorted.begin(), sorted.end(), [](const Row& a, const Row& b) { return a.score > b.score; });
    std::vector<Place> places;
    for (const Row& row : sorted)
      places.push_back(row.place);
    if (runs.size() > 1 && model_.select == Select::query)
      places = one_a_place(places, places.size());
    const auto kept = std::min(static_cast<std::int64_t>(places.size()), k);
    for (std::int64_t i = 0; i < kept; ++i) {
      const Row& row = rows[places[static_cast<std::size_t>(i)].index];
      std::copy_n(row.place.box.begin(), 4, boxes.as<float>() + (image * k + i) * 4);
      scores.as<float>()[image * k + i] = row.score;
      labels.as<std::int64_t>()[image * k + i] = row.id;
    }
    counts.as<std::int64_t>()[image] = kept;
  }
  result["boxes"] = std::move(boxes);
  result["scores"] = std::move(scores);
  result["labels"] = std::move(labels);
  result["num_detections"] = std::move(counts);
  return result;
}

// Concatenates the queries of all chunks; classes of other chunks have logit minus infinity.
Tensors Prompt::merged_raw(const std::vector<Tensors>& runs, std::int64_t images) const {
  const std::int64_t classes = spec_.decode.num_classes, queries = model_.num_queries;
  const auto parts = static_cast<std::int64_t>(runs.size());
  Tensors result;
  Tensor logits(DType::float32, {images, queries * parts, classes}),
      boxes(DType::float32, {images, queries * parts, 4});
  std::fill_n(logits.as<float>(), logits.elements(), minus_infinity);
  for (std::size_t p = 0; p < runs.size(); ++p) {
    const PromptPart& part = parts_[p];
    const Tensor& raw = output(runs[p], "logits", DType::float32, 3, images, queries);
    const Tensor& raw_boxes = output(runs[p], "pred_boxes", DType::float32, 3, images, queries);
    const std::int64_t columns = raw.shape()[2];
    if (columns < part.length || raw_boxes.shape()[2] != 4)
      throw Error(ErrorKind::session, "the model returned " + std::to_string(columns) + " columns of 'logits' for " +
                                          std::to_string(part.length) + " tokens or classes; export it again");
    for (std::int64_t row = 0; row < images * queries; ++row) {
      const float* in = raw.as<float>() + row * columns;
      const std::int64_t at = row / queries * queries * parts + static_cast<std::int64_t>(p) * queries + row % queries;
      float* out = logits.as<float>() + at * classes;
      for (std::int64_t i = 0; i < part.length; ++i)
        if (in[i] != in[i]) // a maximum would hide NaN
          throw Error(ErrorKind::session,
                      "the model returned NaN or infinite values in 'logits': numbers overflowed inside the "
                      "model; build it again with --precision fp32");
      for (std::size_t i = 0; i < part.phrases.size(); ++i) {
        float& best = out[part.phrases[i].class_id];
        if (part.tokens_of.empty())
          best = in[i];
        else
          for (std::int64_t token : part.tokens_of[i])
            best = std::max(best, in[token]);
      }
      std::copy_n(raw_boxes.as<float>() + row * 4, 4, boxes.as<float>() + at * 4);
    }
  }
  if (parts > 1 && model_.select == Select::query)
    keep_one_a_place(logits, boxes);
  result["logits"] = std::move(logits);
  result["pred_boxes"] = std::move(boxes);
  return result;
}

// Of two chunks' boxes at the same position the better one remains, whatever its class.
void Prompt::keep_one_a_place(Tensor& logits, const Tensor& boxes) const {
  const std::int64_t images = logits.shape()[0], rows = logits.shape()[1], classes = logits.shape()[2];
  const std::int64_t queries = model_.num_queries;
  for (std::int64_t image = 0; image < images; ++image) {
    std::vector<float> best(static_cast<std::size_t>(rows));
    for (std::size_t q = 0; q < best.size(); ++q) {
      const float* row = logits.as<float>() + (image * rows + static_cast<std::int64_t>(q)) * classes;
      best[q] = *std::max_element(row, row + classes);
    }
    std::vector<std::size_t> order(best.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return best[a] > best[b]; });
    std::vector<Place> places;
    for (std::size_t q : order) {
      const float* b = boxes.as<float>() + (image * rows + static_cast<std::int64_t>(q)) * 4;
      const float w = b[2] / 2, h = b[3] / 2;
      places.push_back({{b[0] - w, b[1] - h, b[0] + w, b[1] + h}, q / static_cast<std::size_t>(queries), q});
    }
    std::vector<bool> stays(best.size(), false);
    for (const Place& place : one_a_place(places, static_cast<std::size_t>(spec_.decode.max_detections)))
      stays[place.index] = true;
    for (std::size_t q = 0; q < stays.size(); ++q)
      if (!stays[q])
        std::fill_n(logits.as<float>() + (image * rows + static_cast<std::int64_t>(q)) * classes, classes,
                    minus_infinity);
  }
}

} // namespace detrt
