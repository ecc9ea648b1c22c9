#include "detrt/prompt.hpp"

#include <algorithm>
#include <cstring>

#include "json_fields.hpp"
#include "reading.hpp"

namespace detrt {
namespace {

constexpr const char* encode_again = "make it again with detrt encode-prompt";
constexpr std::uintmax_t longest = 256u << 20; // bytes; 4 096 class names of 2 kB each have 11 MB

std::vector<std::uint8_t> from_base64(const std::string& text, const Fields& fields) {
  std::vector<std::uint8_t> bytes;
  bytes.reserve(text.size() / 4 * 3);
  std::uint32_t bits = 0;
  int count = 0;
  for (char c : text) {
    const int value = c >= 'A' && c <= 'Z'   ? c - 'A'
                      : c >= 'a' && c <= 'z' ? c - 'a' + 26
                      : c >= '0' && c <= '9' ? c - '0' + 52
                      : c == '+'             ? 62
                      : c == '/'             ? 63
                      : c == '='             ? -1
                                             : -2;
    if (value == -2)
      fields.fail("data", "is not base64");
    if (value == -1)
      break;
    bits = bits << 6 | static_cast<std::uint32_t>(value);
    if ((count += 6) >= 8) {
      count -= 8;
      bytes.push_back(static_cast<std::uint8_t>(bits >> count & 0xFF));
    }
  }
  return bytes;
}

Tensor read_tensor(const Json& json, const std::string& where) {
  const Fields fields(json, where, ErrorKind::prompt);
  fields.only({"dtype", "shape", "data"});
  const Json& sides = fields.at("shape");
  std::vector<std::int64_t> shape;
  if (!sides.is_array() || sides.empty() || sides.size() > 4)
    fields.fail("shape", "must have 1 to 4 axes");
  for (const Json& side : sides) {
    if (!side.is_number_integer() || side.get<std::int64_t>() < 1 || side.get<std::int64_t>() > 1'000'000)
      fields.fail("shape", "must hold lengths from 1 to 1000000; got " + Fields::shown(side));
    shape.push_back(side.get<std::int64_t>());
  }
  const DType dtype = dtype_of(fields.text("dtype"));
  const std::vector<std::uint8_t> bytes = from_base64(fields.text("data"), fields);
  std::uint64_t expected = size_of(dtype); // before any memory is taken
  for (std::int64_t side : shape)
    expected = std::min<std::uint64_t>(expected * static_cast<std::uint64_t>(side), UINT32_MAX);
  if (bytes.size() != expected)
    fields.fail("data",
                "has " + std::to_string(bytes.size()) + " bytes, its shape promises " + std::to_string(expected));
  Tensor tensor(dtype, shape);
  std::memcpy(tensor.data(), bytes.data(), bytes.size());
  return tensor;
}

PromptPart read_part(const Json& json, const ModelSpec& spec) {
  const Fields fields(json, "the prompt's part", ErrorKind::prompt);
  fields.only({"phrases", "length", "phrase_mask", "feeds"});
  PromptPart part;
  part.length = fields.integer("length", 1, 1'000'000);
  const Json& phrases = fields.at("phrases");
  if (!phrases.is_array() || phrases.empty())
    fields.fail("phrases", "must be a list of phrases");
  for (const Json& row : phrases) {
    const Fields phrase(row, "the prompt's phrase", ErrorKind::prompt);
    phrase.only({"text", "class_id", "start", "end"});
    part.phrases.push_back({phrase.text("text"), phrase.integer("class_id", 0, 1'000'000),
                            phrase.integer("start", 0, INT32_MAX), phrase.integer("end", 0, INT32_MAX)});
  }
  if (spec.text->kind == TextKind::tokens) {
    const Json& mask = fields.at("phrase_mask");
    if (!mask.is_array() || mask.size() != part.phrases.size())
      fields.fail("phrase_mask", "must have a list of token numbers for each phrase");
    for (const Json& row : mask) {
      const bool ok =
          row.is_array() && std::all_of(row.begin(), row.end(), [&](const Json& v) {
            return v.is_number_unsigned() && v.get<std::uint64_t>() < static_cast<std::uint64_t>(part.length);
          });
      if (!ok)
        fields.fail("phrase_mask", "must hold token numbers below the length");
      part.tokens_of.push_back(row.get<std::vector<std::int64_t>>());
    }
  } else if (part.length != static_cast<std::int64_t>(part.phrases.size())) {
    fields.fail("length", "must be the number of class names");
  }
  const Json& feeds = fields.at("feeds");
  if (!feeds.is_object())
    fields.fail("feeds", "must be an object of tensors");
  for (const auto& entry : feeds.items()) {
    Tensor tensor = read_tensor(entry.value(), "the prompt's input '" + entry.key() + "'");
    if (tensor.shape().front() != 1)
      fields.fail("feeds", "must be of one image; '" + entry.key() + "' has shape " + shape_text(tensor.shape()));
    part.feeds.emplace(entry.key(), std::move(tensor));
  }
  return part;
}

void check_digest(const Fields& fields, const char* key, const Bundle& bundle, const std::string& kind,
                  const std::string& name) {
  const std::string digest = fields.text(key);
  for (const BundleFile& file : bundle.of_kind(kind))
    if (file.sha256 == digest)
      return;
  if (digest.empty() && bundle.of_kind(kind).empty())
    return;
  throw Error(ErrorKind::prompt, name + " was made for another bundle (the " +
                                     (kind == "text" ? "text encoder" : kind) +
                                     " differs); make it again with: detrt encode-prompt " + bundle.folder().string() +
                                     " --prompt '...' -o FILE");
}

} // namespace

Prompt Prompt::open(const std::filesystem::path& path, const Bundle& bundle) {
  const std::string name = "'" + path.string() + "'";
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    throw Error(ErrorKind::prompt, "there is no prompt file " + name + "; make one with: detrt encode-prompt " +
                                       bundle.folder().string() + " --prompt 'a cat. a dog.' -o prompt.json");
  return parse(read_text(path, longest, ErrorKind::prompt, std::string("a prompt; ") + encode_again), name, bundle);
}

Prompt Prompt::parse(const std::string& json, const std::string& name, const Bundle& bundle) {
  if (!bundle.spec().text)
    throw Error(ErrorKind::prompt,
                "this model has fixed classes and takes no prompt; choose among them with --classes");
  const Json data = parse_json(json, name, ErrorKind::prompt, encode_again);
  const Fields fields(data, name, ErrorKind::prompt);
  fields.only({"schema", "kind", "tokenizer_sha256", "tower_sha256", "prompt", "listed", "num_classes", "parts"});
  fields.integer("schema", schema, schema);
  check_digest(fields, "tokenizer_sha256", bundle, "tokenizer", name);
  check_digest(fields, "tower_sha256", bundle, "text", name);
  Prompt prompt;
  prompt.spec_ = bundle.spec();
  const TextSpec& text = *bundle.spec().text;
  if (fields.one_of("kind", {"tokens", "classes"}) != static_cast<std::size_t>(text.kind))
    fields.fail("kind", std::string("does not belong to this bundle; ") + encode_again);
  prompt.text_ = fields.text("prompt");
  prompt.listed_ = fields.flag("listed", false);
  prompt.pad_id_ = text.pad_id;
  const std::int64_t classes = fields.integer("num_classes", 1, 1'000'000);
  const Json& parts = fields.at("parts");
  if (!parts.is_array() || parts.empty())
    fields.fail("parts", "must be a list of parts");
  for (const Json& row : parts) {
    prompt.parts_.push_back(read_part(row, bundle.spec()));
    for (const Phrase& phrase : prompt.parts_.back().phrases) {
      if (phrase.class_id >= classes)
        fields.fail("num_classes", "must be above every class id; got " + std::to_string(classes));
      prompt.by_class_[phrase.class_id] = phrase;
    }
  }
  prompt.model_ = bundle.spec().decode;
  DecodeSpec& rule = prompt.spec_.decode;
  rule.num_classes = classes;
  if (!rule.in_graph)
    rule.num_queries *= static_cast<std::int64_t>(prompt.parts_.size());
  prompt.spec_.labels.clear();
  for (const auto& [id, phrase] : prompt.by_class_)
    prompt.spec_.labels[id] = phrase.text;
  prompt.spec_.text.reset();
  return prompt;
}

void Prompt::name(Detections& detections) const {
  if (listed_)
    return; // labels are present
  detections.prompt = text_;
  for (Detection& d : detections.found) {
    const auto phrase = by_class_.find(d.class_id);
    if (phrase != by_class_.end())
      d.phrase_span = {phrase->second.start, phrase->second.end};
  }
}

} // namespace detrt
