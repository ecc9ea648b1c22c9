#include "detrt/spec.hpp"

#include <algorithm>
#include <cctype>
#include <sstream>

#include "json_fields.hpp"
#include "reading.hpp"

namespace detrt {
namespace {

void check(bool condition, const std::string& message) {
  if (!condition)
    throw Error(ErrorKind::spec, message);
}

std::array<double, 3> three(const Fields& fields, const char* key, std::array<double, 3> otherwise) {
  if (!fields.has(key))
    return otherwise;
  const Json& value = fields.at(key);
  const bool ok = value.is_array() && value.size() == 3 && std::all_of(value.begin(), value.end(), [](const Json& v) {
                    return v.is_number() && std::isfinite(v.get<double>());
                  });
  if (!ok)
    fields.fail(key, "must be 3 finite numbers; got " + Fields::shown(value));
  return {value[0].get<double>(), value[1].get<double>(), value[2].get<double>()};
}

std::optional<int> edge(const Fields& fields, const char* key) {
  if (!fields.has(key))
    return std::nullopt;
  return static_cast<int>(fields.integer(key, 1, largest_side));
}

InputSpec read_input(const Json& json) {
  const Fields fields(json, "spec.input");
  fields.only({"resize", "height", "width", "shortest_edge", "longest_edge", "resample", "rescale", "mean", "std",
               "dtype", "mask", "dynamic", "multiple_of", "normalize_in_graph", "max_height", "max_width", "pad",
               "antialias", "rounded"});
  InputSpec spec;
  spec.resize = static_cast<Resize>(fields.one_of("resize", {"stretch", "shortest_edge", "fit", "max_size"}));
  if (fields.has("resample"))
    spec.resample = static_cast<Resample>(
        fields.one_of("resample", {"nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"}));
  if (fields.has("dtype"))
    spec.float_pixels = fields.one_of("dtype", {"uint8", "float32"}) == 1;
  spec.size.height = static_cast<int>(fields.integer("height", 1, largest_side));
  spec.size.width = static_cast<int>(fields.integer("width", 1, largest_side));
  spec.multiple_of = static_cast<int>(fields.integer("multiple_of", 1, largest_side, 1));
  for (const auto& [name, side] : {std::pair{"height", spec.size.height}, std::pair{"width", spec.size.width}})
    if (side % spec.multiple_of != 0)
      fields.fail(name, "must be a multiple of " + std::to_string(spec.multiple_of) + "; got " + std::to_string(side));
  spec.shortest_edge = edge(fields, "shortest_edge");
  spec.longest_edge = edge(fields, "longest_edge");
  spec.max_height = edge(fields, "max_height");
  spec.max_width = edge(fields, "max_width");
  spec.pad = fields.flag("pad", false);
  check(fields.flag("antialias", true),
        "spec.input.antialias false (PP-DocLayout, and RF-DETR from a folder of transformers) is not done by the C++ runtime; run "
        "the model from Python, or build an RF-DETR again with --preprocess family-default, which antialiases as its authors do");
  spec.rescale = fields.number("rescale", spec.rescale);
  spec.mean = three(fields, "mean", spec.mean);
  spec.std = three(fields, "std", spec.std);
  spec.mask = fields.flag("mask", false);
  spec.dynamic = fields.flag("dynamic", false);
  spec.normalize_in_graph = fields.flag("normalize_in_graph", true);
  if (spec.resize == Resize::shortest_edge) {
    check(spec.shortest_edge.has_value(), "spec.input.shortest_edge must be an integer from 1 to " + std::to_string(largest_side) + "; got nothing");
    check(!spec.longest_edge || *spec.longest_edge >= *spec.shortest_edge,
          "spec.input.longest_edge must be at least shortest_edge; got " +
              std::to_string(spec.longest_edge.value_or(0)));
  }
  if (spec.resize == Resize::max_size)
    check(spec.max_height && spec.max_width,
          "spec.input.resize 'max_size' needs max_height and max_width, from 1 to " + std::to_string(largest_side) + "; got nothing");
  check(spec.dynamic || spec.one_size(),
        "spec.input.resize 'shortest_edge' and 'max_size' need a graph with symbolic height and width, or 'pad'");
  check(!spec.pad || spec.resize != Resize::stretch,
        "spec.input.pad is for resize modes that keep the aspect ratio; got \"stretch\"");
  for (double s : spec.std)
    check(s > 0, "spec.input.std must be positive; got " + std::to_string(s));
  check(spec.rescale > 0, "spec.input.rescale must be a positive number; got " + std::to_string(spec.rescale));
  check(spec.normalize_in_graph || spec.float_pixels,
        "spec.input.dtype must be float32 when normalisation is not in the graph");
  return spec;
}

DecodeSpec read_decode(const Json& json) {
  const Fields fields(json, "spec.decode");
  fields.only({"activation", "select", "num_queries", "num_classes", "max_detections", "in_graph", "nms", "nms_iou",
               "nms_min_score", "nms_in_graph", "score_threshold", "mask_stride", "reading_order", "quads"});
  check(!fields.has("reading_order"),
        "spec.decode.reading_order (PP-DocLayout) is not done by the C++ runtime; run the model from Python");
  check(!fields.flag("quads", false),
        "spec.decode.quads (PP-DocLayout) is not done by the C++ runtime; run the model from Python");
  DecodeSpec spec;
  spec.activation = static_cast<Activation>(fields.one_of("activation", {"sigmoid", "softmax"}));
  spec.select = static_cast<Select>(fields.one_of("select", {"topk", "query"}));
  spec.in_graph = fields.flag("in_graph", false);
  spec.num_queries = fields.integer("num_queries", 1, 100000);
  spec.num_classes = fields.integer("num_classes", 1, 100000);
  const std::int64_t limit = spec.num_queries * (spec.select == Select::topk ? spec.num_classes : 1);
  spec.max_detections = fields.integer("max_detections", 1, limit);
  if (fields.has("nms"))
    spec.nms = static_cast<Nms>(fields.one_of("nms", {"none", "nms", "soft_nms"}));
  spec.nms_in_graph = fields.flag("nms_in_graph", false);
  check(!spec.nms_in_graph || (spec.in_graph && spec.nms == Nms::nms),
        "spec.decode.nms_in_graph needs in_graph and nms 'nms'; no graph has soft-NMS");
  spec.nms_iou = fields.number("nms_iou", spec.nms_iou);
  spec.nms_min_score = fields.number("nms_min_score", spec.nms_min_score);
  spec.score_threshold = fields.number("score_threshold", 0);
  for (const auto& [name, value] : {std::pair{"nms_iou", spec.nms_iou}, std::pair{"nms_min_score", spec.nms_min_score},
                                    std::pair{"score_threshold", spec.score_threshold}})
    if (!(value >= 0 && value <= 1))
      fields.fail(name, "must be a number from 0 to 1; got " + std::to_string(value));
  check(spec.in_graph || spec.score_threshold == 0, "spec.decode.score_threshold needs in_graph");
  spec.mask_stride = static_cast<int>(fields.integer("mask_stride", 0, 64, 0));
  return spec;
}

TextSpec read_text(const Json& json) {
  const Fields fields(json, "spec.text");
  fields.only({"kind", "max_tokens", "features", "pad_id", "separators", "tokenizer", "tower"});
  TextSpec spec;
  spec.kind = static_cast<TextKind>(fields.one_of("kind", {"tokens", "classes"}));
  spec.max_tokens = fields.integer("max_tokens", 1, 100000);
  spec.features = fields.integer("features", 1, 100000);
  spec.pad_id = fields.integer("pad_id", 0, 10000000, 0);
  if (fields.has("separators")) {
    const Json& value = fields.at("separators");
    const bool ok = value.is_array() && std::all_of(value.begin(), value.end(), [](const Json& v) {
                      return v.is_number_unsigned() && v.get<std::uint64_t>() <= INT32_MAX;
                    });
    if (!ok)
      fields.fail("separators", "must be token ids; got " + Fields::shown(value));
    spec.separators = value.get<std::vector<std::int64_t>>();
  }
  spec.tokenizer = fields.text("tokenizer", spec.tokenizer);
  spec.encoder = fields.text("tower", spec.encoder);
  for (const auto& [name, value] : {std::pair{"tokenizer", spec.tokenizer}, std::pair{"tower", spec.encoder}})
    if (value.find_first_of("/\\") != std::string::npos || value == "." || value == "..")
      fields.fail(name, "must be the name of a file beside the model; got '" + value + "'");
  check(!spec.tokenizer.empty(), "spec.text.tokenizer must not be empty");
  return spec;
}

std::int64_t class_id_of(const std::string& key) {
  const bool digits = !key.empty() && key.size() <= 9 &&
                      std::all_of(key.begin(), key.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
  check(digits, "labels: class ids must be integers; got " + Fields::shown(key));
  return std::stoll(key);
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return c < 128 ? std::tolower(c) : c; });
  return text;
}

// Edit distance of two names, for messages.
std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j)
    row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t corner = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, corner + (a[i - 1] != b[j - 1])});
      corner = above;
    }
  }
  return row[b.size()];
}

std::string stripped(const std::string& text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

// Without case, and with single spaces.
std::string folded(const std::string& name) {
  std::istringstream words(name);
  std::string result;
  for (std::string word; words >> word;)
    result += (result.empty() ? "" : " ") + lower(word);
  return result;
}

// Ids of all classes of one name in the form that `fold` gives; several names in that form are refused.
template <class Fold>
std::vector<std::int64_t> ids_by(const std::map<std::int64_t, std::string>& labels, const std::string& wanted, Fold fold) {
  std::vector<std::int64_t> ids;
  std::vector<std::string> names;
  for (const auto& [id, label] : labels) {
    if (fold(label) != fold(wanted))
      continue;
    ids.push_back(id);
    if (std::find(names.begin(), names.end(), label) == names.end())
      names.push_back(label);
  }
  if (names.size() > 1) {
    std::string several;
    for (const std::string& name : names)
      several += (several.empty() ? "'" : ", '") + name + "'";
    throw Error(ErrorKind::spec, "'" + wanted + "' may be " + several + "; write the name exactly as it is there");
  }
  return ids;
}

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

// As detrt.class_names in Python, with its table of cases: an exact name, then a folded one, then id:3, then 3 where no
// name is a number.
std::vector<std::int64_t> ids_named(const ModelSpec& spec, const std::string& wanted) {
  auto found = ids_by(spec.labels, wanted, [](const std::string& name) { return name; });
  if (found.empty())
    found = ids_by(spec.labels, wanted, folded);
  if (!found.empty())
    return found;
  const auto any = [&](auto test) {
    return std::find_if(spec.labels.begin(), spec.labels.end(), [&](const auto& entry) { return test(entry.second); });
  };
  std::string digits = stripped(wanted);
  const bool numbers = any([](const std::string& label) { return is_number(stripped(label)); }) != spec.labels.end();
  const std::string last = std::to_string(spec.decode.num_classes - 1);
  if (lower(digits.substr(0, 3)) == "id:")
    digits = digits.substr(3);
  else if (numbers && is_number(digits))
    throw Error(ErrorKind::spec, "this model has no class '" + wanted + "'; ids are written id:" + digits +
                                     ", where names are numbers, and go from 0 to " + last);
  if (is_number(digits) && digits.size() < 10 && std::stoll(digits) < spec.decode.num_classes)
    return {std::stoll(digits)};
  const auto longer = any([&](const std::string& label) {
    std::istringstream parts(label);
    bool same = false;
    for (std::string part; std::getline(parts, part, ',');)
      same = same || folded(part) == folded(wanted);
    return same && label.find(',') != std::string::npos;
  });
  std::string hint, some;
  std::size_t shown = 0;
  if (longer != spec.labels.end()) {
    hint = "names that have commas stand in double quotes: \"" + longer->second + "\"";
  } else if (is_number(stripped(wanted))) {
    hint = "its ids are 0 to " + last;
  } else {
    for (const auto& [id, label] : spec.labels) {
      if (distance(folded(wanted), folded(label)) <= std::max<std::size_t>(2, wanted.size() / 3))
        hint += (hint.empty() ? "did you mean " : ", ") + label;
      if (++shown <= 20)
        some += (some.empty() ? "" : ", ") + label;
    }
    hint = hint.empty() ? "it has: " + some + (shown > 20 ? " ..." : "") : hint + "?";
  }
  throw Error(ErrorKind::spec, "this model has no class '" + wanted + "'; " + hint);
}

} // namespace

ModelSpec read_spec(const Json& json) {
  const Fields fields(json, "spec");
  fields.only({"schema", "family", "name", "input", "decode", "labels", "text", "task", "origin"});
  const Json& version = fields.at("schema");
  check(version.is_number_integer() && version == schema,
        "spec has schema " + Fields::shown(version) + "; this version of detrt reads " + std::to_string(schema) +
            ". Update detrt or export again");
  ModelSpec spec;
  spec.family = fields.text("family");
  check(!spec.family.empty(), "family must not be empty");
  spec.name = fields.text("name", "");
  if (fields.has("text") && fields.at("text").is_object()) {
    const Json kind = fields.at("text").value("kind", Json());
    check(kind != "phrases",
          "phrases with queries of their own (text.kind 'phrases', SAM 3) are not for this runtime; run the model in Python");
    check(kind != "names", "names without a task (text.kind 'names', OWL-ViT) are not for this runtime; run the model in Python");
  }
  spec.input = read_input(fields.at("input"));
  spec.decode = read_decode(fields.at("decode"));
  spec.has_masks = fields.has("task") && fields.one_of("task", {"detection", "instance-segmentation"}) == 1;
  if (fields.has("origin")) // whose numbers the model gives: told, and used by no runtime
    fields.one_of("origin", {"transformers", "authors", "own"});
  check(spec.has_masks == (spec.decode.mask_stride > 0),
        "task does not fit decode.mask_stride " + std::to_string(spec.decode.mask_stride) +
            ": masks have a stride, and boxes alone none");
  check(!spec.has_masks || !fields.has("text"), "masks are for models without prompt");
  check(!spec.has_masks || !spec.input.mask || !spec.input.dynamic,
        "masks are for models without padding mask, or with images padded to one size");
  const Json& labels = fields.at("labels");
  check(labels.is_object(), "spec.labels must be an object of class id to name");
  for (const auto& entry : labels.items()) {
    const std::int64_t id = class_id_of(entry.key());
    check(id < spec.decode.num_classes, "labels: class id " + entry.key() + " does not fit a head with " +
                                            std::to_string(spec.decode.num_classes) + " classes");
    check(entry.value().is_string(), "labels: the name of class " + entry.key() + " must be text");
    check(spec.labels.count(id) == 0, "labels: class " + std::to_string(id) + " is there twice, the second time as " +
                                          Fields::shown(entry.key()) + "; give it once");
    const auto& name = entry.value().get_ref<const std::string&>();
    check(std::none_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }),
          "labels: the name of class " + entry.key() + " must be one line of text; got " + Fields::shown(entry.value()));
    spec.labels[id] = name;
  }
  if (fields.has("text"))
    spec.text = read_text(fields.at("text"));
  return spec;
}

ModelSpec ModelSpec::from_json(const std::string& text) {
  return read_spec(parse_json(text, "the spec", ErrorKind::spec, "export the model again"));
}

std::string ModelSpec::label(std::int64_t class_id) const {
  const auto found = labels.find(class_id);
  return found == labels.end() ? std::to_string(class_id) : found->second;
}

std::vector<std::int64_t> ModelSpec::class_ids(const std::vector<std::string>& names) const {
  std::vector<std::int64_t> ids;
  for (const std::string& wanted : names)
    for (const std::int64_t id : ids_named(*this, wanted))
      if (std::find(ids.begin(), ids.end(), id) == ids.end())
        ids.push_back(id);
  return ids;
}

std::vector<std::string> split_classes(const std::string& text) {
  std::vector<std::string> names;
  std::size_t at = 0;
  while (at <= text.size()) {
    at = std::min(text.find_first_not_of(" \t\r\n", at), text.size());
    std::string name;
    const bool quoted = at < text.size() && text[at] == '"';
    if (quoted) {
      for (++at;; ++at) {
        const std::size_t end = text.find('"', at);
        if (end == std::string::npos)
          throw Error(ErrorKind::spec, "a quote does not end in '" + text +
                                           "'; write names that have commas as \"a, b\", and a quote inside as two");
        name += text.substr(at, end - at);
        at = end + 1;
        if (at >= text.size() || text[at] != '"')
          break;
        name += '"';
      }
    }
    const std::size_t end = std::min(text.find(',', at), text.size());
    const std::string rest = stripped(text.substr(at, end - at));
    if (quoted && !rest.empty())
      throw Error(ErrorKind::spec, "'" + rest + "' stands behind the quoted name '" + name + "' in '" + text +
                                       "'; put a comma between names");
    if (quoted || !rest.empty())
      names.push_back(quoted ? name : rest);
    at = end + 1;
  }
  if (names.empty())
    throw Error(ErrorKind::spec, "a list of classes names at least one, such as person,car; got '" + text + "'");
  return names;
}

} // namespace detrt
