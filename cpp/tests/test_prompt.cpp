// Prompts of `detrt encode-prompt`; the cases were written by the Python side.
#include "detrt/prompt.hpp"
#include "fake_session.hpp"
#include "support.hpp"

namespace {

detrt::Bundle bundle_of(const Json& one) {
  const Json data = {
      {"schema", 1}, {"spec", one.at("spec")}, {"provenance", Json::object()}, {"files", one.at("files")}};
  return detrt::Bundle::parse(data.dump(), "bundle");
}

std::vector<detrt::TensorInfo> inputs_of(const Json& one) {
  std::vector<detrt::TensorInfo> infos;
  for (const auto& feed : one.at("prompt").at("parts")[0].at("feeds").items()) {
    detrt::TensorInfo info;
    info.name = feed.key();
    info.dtype = detrt::dtype_of(feed.value().at("dtype").get<std::string>());
    info.shape.assign(feed.value().at("shape").size(), -1);
    infos.push_back(info);
  }
  return infos;
}

} // namespace

TEST_CASE("a prompt's outputs become the detections of Python") {
  const Json cases = read_cases("prompt_cases.json");
  CHECK(cases.size() >= 5);
  for (const Json& one : cases) {
    CAPTURE(one.at("name").get<std::string>());
    const auto prompt = detrt::Prompt::parse(one.at("prompt").dump(), "the prompt", bundle_of(one));
    std::vector<detrt::Tensors> runs;
    for (const Json& run : one.at("outputs"))
      runs.push_back(outputs_of(run));
    REQUIRE(runs.size() == prompt.parts().size());
    std::vector<detrt::Size> sizes;
    for (const Json& size : one.at("original_sizes_hw"))
      sizes.push_back({size[0].get<int>(), size[1].get<int>()});
    detrt::DecodeOptions options;
    options.threshold = one.at("threshold").get<double>();
    const auto merged = prompt.merged(runs, static_cast<std::int64_t>(sizes.size()));
    std::vector<detrt::Detections> got = detrt::decode(merged, prompt.spec(), sizes, options);
    REQUIRE(got.size() == one.at("detections").size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      prompt.name(got[i]);
      const Json expected = one.at("detections")[i], found = Json::parse(detrt::to_json(got[i], "x"));
      CHECK(found.value("prompt", "") == one.at("named").get<std::string>());
      REQUIRE(found.at("detections").size() == expected.size());
      for (std::size_t k = 0; k < expected.size(); ++k) {
        const Json &a = expected[k], &b = found.at("detections")[k];
        CHECK(a.at("label") == b.at("label"));
        CHECK(a.at("class_id") == b.at("class_id"));
        CHECK(a.value("phrase_span", Json()) == b.value("phrase_span", Json()));
        CHECK(std::fabs(a.at("score").get<double>() - b.at("score").get<double>()) <= 3e-6);
        for (std::size_t c = 0; c < 4; ++c)
          CHECK(std::fabs(a.at("box_xyxy")[c].get<double>() - b.at("box_xyxy")[c].get<double>()) <= 0.01);
      }
    }
  }
}

TEST_CASE("text inputs are tiled and padded as a session wants them") {
  for (const Json& one : read_cases("prompt_cases.json")) {
    CAPTURE(one.at("name").get<std::string>());
    const auto prompt = detrt::Prompt::parse(one.at("prompt").dump(), "the prompt", bundle_of(one));
    const FakeSession plain(inputs_of(one), nullptr), engine(inputs_of(one), nullptr, {}, 16);
    const detrt::Tensors exact = prompt.feeds(0, 2, plain), padded = prompt.feeds(0, 2, engine);
    for (const auto& [name, tensor] : padded) {
      const detrt::Tensor& small = exact.at(name);
      CHECK(tensor.shape()[0] == 2);
      const bool of_tokens = name != "class_features" && name != "class_mask";
      CHECK(tensor.shape().back() % (of_tokens && name != "text_features" && name != "task_features" ? 16 : 1) == 0);
      if (tensor.dtype() != detrt::DType::int64 || tensor.shape().size() != 2)
        continue;
      for (std::int64_t i = 0; i < 2; ++i)
        for (std::int64_t k = 0; k < small.shape()[1]; ++k)
          CHECK(tensor.as<std::int64_t>()[i * tensor.shape()[1] + k] ==
                small.as<std::int64_t>()[i * small.shape()[1] + k]);
    }
    if (padded.count("text_self_mask")) { // padding attends to itself only
      const detrt::Tensor& mask = padded.at("text_self_mask");
      const std::int64_t n = mask.shape()[1], length = prompt.parts()[0].length;
      REQUIRE(n % 16 == 0);
      for (std::int64_t i = 0; i < n; ++i)
        for (std::int64_t k = 0; k < n; ++k)
          if (i >= length || k >= length)
            CHECK(mask.as<std::int64_t>()[(n + i) * n + k] == (i == k));
    }
  }
}

TEST_CASE("a wrong prompt is refused") {
  const Json one = read_cases("prompt_cases.json")[0];
  const detrt::Bundle bundle = bundle_of(one);
  struct Row {
    const char* pointer;
    Json value;
    const char* message;
  };
  const Row rows[] = {
      {"/schema", 2, "schema must be an integer from 1 to 1"},
      {"/kind", "classes", "does not belong to this bundle"},
      {"/tokenizer_sha256", "ab", "was made for another bundle (the tokenizer differs)"},
      {"/tower_sha256", "ab", "the text encoder differs"},
      {"/num_classes", 1, "above every class id"},
      {"/parts", Json::array(), ""},
      {"/parts/0/phrases", Json::array(), "must be a list of phrases"},
      {"/parts/0/phrase_mask/0/0", 9999, "token numbers below the length"},
      {"/parts/0/feeds/attention_mask/data", "!!", "is not base64"},
      {"/parts/0/feeds/attention_mask/data", "AAAA", "its shape promises"},
      {"/parts/0/feeds/attention_mask/shape/0", 1000000, "its shape promises"},
      {"/parts/0/feeds/attention_mask/dtype", "float8", "are not known"},
  };
  for (const Row& row : rows) {
    Json data = one.at("prompt");
    data[Json::json_pointer(row.pointer)] = row.value;
    CAPTURE(row.pointer);
    const std::string message = error_of([&] { detrt::Prompt::parse(data.dump(), "p", bundle); });
    CHECK_MESSAGE((!message.empty() && message.find(row.message) != std::string::npos), message);
  }
  CHECK_ERROR(detrt::Prompt::open("/none/prompt.json", bundle), "make one with: detrt encode-prompt");
  CHECK_ERROR(detrt::Prompt::parse("{", "p", bundle), "cannot be read as JSON");
}
