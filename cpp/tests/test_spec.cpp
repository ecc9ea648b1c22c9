#include <filesystem>

#include <unistd.h>

#include "detrt/bundle.hpp"
#include "detrt/spec.hpp"
#include "engine_fit.hpp"
#include "kernel_file.hpp"
#include "support.hpp"

namespace {

Json good_spec() {
  return Json::parse(R"({"schema": 1, "family": "test", "name": "t", "labels": {"0": "cat", "2": "bird"},
    "input": {"resize": "stretch", "height": 32, "width": 64, "mean": [0.5, 0.5, 0.5]},
    "decode": {"activation": "sigmoid", "select": "topk", "num_queries": 6, "num_classes": 3, "max_detections": 5}})");
}

Json good_bundle() {
  return {{"schema", 1},
          {"spec", good_spec()},
          {"provenance", Json::object()},
          {"files", {{{"kind", "onnx"}, {"path", "model.onnx"}, {"sha256", "00"}, {"size", 3}, {"engine", nullptr}}}}};
}

Json nested(int depth) {
  Json value = Json::array();
  for (int i = 0; i < depth; ++i)
    value = Json::array({std::move(value)});
  return value;
}

} // namespace

TEST_CASE("a spec is read with its defaults") {
  const auto spec = detrt::ModelSpec::from_json(good_spec().dump());
  CHECK(spec.input.size == detrt::Size{32, 64});
  CHECK(spec.input.mean[1] == 0.5);
  CHECK(spec.input.std[2] == 1.0);
  CHECK(spec.input.rescale == 1.0 / 255.0);
  CHECK(spec.decode.max_detections == 5);
  CHECK_FALSE(spec.text.has_value());
  CHECK(spec.label(2) == "bird");
  CHECK(spec.label(1) == "1");
  CHECK(spec.class_ids({"BIRD", "1", "cat"}) == std::vector<std::int64_t>{2, 1, 0});
  CHECK_ERROR(spec.class_ids({"brid"}), "did you mean bird?");
  CHECK_ERROR(spec.class_ids({"3"}), "0 to 2");
}

TEST_CASE("classes are found by the rule of Python") {
  std::size_t checked = 0;
  for (const Json& row : read_cases("class_names.json")) {
    for (const Json& one : row.value("texts", Json::array())) {
      CAPTURE(one.dump());
      const auto text = one.at("text").get<std::string>();
      if (one.contains("error"))
        CHECK_ERROR(detrt::split_classes(text), one.at("error").get<std::string>());
      else
        CHECK(detrt::split_classes(text) == one.at("names").get<std::vector<std::string>>());
      ++checked;
    }
    if (!row.contains("labels"))
      continue;
    Json json = good_spec();
    json["labels"] = row.at("labels");
    json["decode"]["num_classes"] = row.at("num_classes");
    const auto spec = detrt::ModelSpec::from_json(json.dump());
    for (const Json& one : row.at("cases")) {
      CAPTURE(one.dump());
      std::vector<std::string> wanted;
      bool shadowed = one.at("wanted").empty(); // an empty list is all classes here
      for (const Json& key : one.at("wanted")) {
        wanted.push_back(key.is_string() ? key.get<std::string>() : "id:" + std::to_string(key.get<std::int64_t>()));
        for (const auto& entry : spec.labels) // a name, which comes first
          shadowed = shadowed || (!key.is_string() && entry.second == wanted.back());
      }
      if (shadowed)
        continue;
      if (!one.contains("error"))
        CHECK(spec.class_ids(wanted) == one.at("ids").get<std::vector<std::int64_t>>());
      else if (one.at("wanted")[0].is_string())
        CHECK_ERROR(spec.class_ids(wanted), one.at("error").get<std::string>());
      else
        CHECK_ERROR(spec.class_ids(wanted), "has no class");
      ++checked;
    }
  }
  CHECK(checked >= 50);
}

TEST_CASE("a wrong spec is refused with the name of its field") {
  struct Row {
    const char* pointer;
    Json value;
    const char* message;
  };
  const Row rows[] = {
      {"/schema", 2, "spec has schema 2; this version of detrt reads 1"},
      {"/family", "", "family must not be empty"},
      {"/origin", "else", "must be one of transformers, authors, own"},
      {"/text/kind", nested(1000), "nested too deeply"},
      {"/labels/3", "x", "class id 3 does not fit a head with 3 classes"},
      {"/labels/x", "x", "class ids must be integers"},
      {"/labels/1", 5, "the name of class 1 must be text"},
      {"/what", 1, "unknown field \"what\""},
      {"/input/height", 0, "spec.input.height must be an integer from 1 to 16384; got 0"},
      {"/input/height", 1.5, "got 1.5"},
      {"/input/height", 18446744073709551615ull, "must be an integer"},
      {"/input/height", "32", "got \"32\""},
      {"/input/resize", "crop", "must be one of stretch, shortest_edge, fit, max_size; got \"crop\""},
      {"/input/resize", "shortest_edge", "spec.input.shortest_edge"},
      {"/input/multiple_of", 7, "must be a multiple of 7"},
      {"/input/std", {1, 0, 1}, "std must be positive"},
      {"/input/mean", {1, 0}, "must be 3 finite numbers"},
      {"/input/mask", 1, "must be true or false"},
      {"/input/normalize_in_graph", false, "dtype must be float32"},
      {"/decode/max_detections", 19, "must be an integer from 1 to 18"},
      {"/decode/nms_in_graph", true, "nms_in_graph needs"},
      {"/decode/nms_iou", 2, "must be a number from 0 to 1"},
      {"/decode/score_threshold", 0.5, "needs in_graph"},
      {"/decode/quads", true, "spec.decode.quads (PP-DocLayout) is not done by the C++ runtime"},
      {"/decode/reading_order", "votes", "spec.decode.reading_order (PP-DocLayout) is not done by the C++ runtime"},
      {"/input/antialias", false, "spec.input.antialias false"},
      {"/text", {{"kind", "tokens"}, {"max_tokens", 4}, {"features", 8}, {"tower", "../x"}}, "a file beside the model"},
  };
  for (const Row& row : rows) {
    Json spec = good_spec();
    spec[Json::json_pointer(row.pointer)] = row.value;
    CAPTURE(row.pointer);
    CHECK_ERROR(detrt::ModelSpec::from_json(spec.dump()), row.message);
  }
  CHECK_ERROR(detrt::ModelSpec::from_json("{"), "cannot be read as JSON");
  CHECK_ERROR(detrt::ModelSpec::from_json("[]"), "must be a JSON object; got array");
  CHECK_ERROR(detrt::ModelSpec::from_json(std::string(200000, '[')), "cannot be read as JSON");
}

TEST_CASE("a bundle is checked before it is used") {
  const Folder folder("spec");
  CHECK_ERROR(detrt::Bundle::open(folder.path / "none"), "is not a detrt bundle. Make one with: detrt build");
  std::ofstream(folder.path / "detrt.json") << "not json";
  CHECK_ERROR(detrt::Bundle::open(folder.path), "cannot be read as JSON");
  std::ofstream(folder.path / "detrt.json") << good_bundle().dump();
  const detrt::Bundle bundle = detrt::Bundle::open(folder.path);
  REQUIRE(bundle.files().size() == 1);
  const detrt::BundleFile file = bundle.files().front();
  CHECK_ERROR(bundle.checked_path(file), "is missing; build the bundle again");
  std::ofstream(folder.path / "model.onnx") << "ab";
  CHECK_ERROR(bundle.checked_path(file), "has 2 bytes, its manifest says 3: truncated or replaced");
  std::ofstream(folder.path / "model.onnx") << "abc";
  CHECK_ERROR(bundle.checked_path(file), "its SHA-256 differs");
  CHECK(detrt::sha256_of(folder.path / "model.onnx") ==
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  detrt::BundleFile right = file;
  right.sha256 = detrt::sha256_of(folder.path / "model.onnx");
  CHECK(bundle.checked_path(right) == folder.path / "model.onnx");
}

TEST_CASE("every file that is opened was compared") {
  const Folder folder("external");
  // A model whose graph (7) has a tensor (5) with the entry "location" of external_data (13).
  const auto field = [](int number, const std::string& content) {
    return std::string{static_cast<char>(number << 3 | 2), static_cast<char>(content.size())} + content;
  };
  const auto entry = [&](const std::string& key, const std::string& value) {
    return field(13, field(1, key) + field(2, value));
  };
  const auto model = [&](const std::string& name) {
    return field(7, field(5, entry("location", name) + entry("offset", "0")));
  };
  const auto open = [&](const std::string& content, const Json& more) {
    std::ofstream(folder.path / "model.onnx") << content;
    Json data = good_bundle();
    data["files"] = more;
    data["files"].push_back({{"kind", "onnx"},
                             {"path", "model.onnx"},
                             {"sha256", detrt::sha256_of(folder.path / "model.onnx")},
                             {"size", content.size()}});
    const detrt::Bundle bundle = detrt::Bundle::parse(data.dump(), folder.path);
    return bundle.checked_path(bundle.of_kind("onnx").front());
  };
  const auto weights = [&](const char* path, const char* digest) {
    return Json::array({{{"kind", "weights"}, {"path", path}, {"sha256", digest}, {"size", 3}}});
  };
  const char* const abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
  std::ofstream(folder.path / "w.bin") << "abc";
  CHECK(open(model("w.bin"), weights("w.bin", abc)) == folder.path / "model.onnx");
  CHECK(open(model("./w.bin"), weights("w.bin", abc)) == folder.path / "model.onnx");
  CHECK_ERROR(open(model("w.bin"), Json::array()), "keeps values in 'w.bin', which");
  CHECK_ERROR(open(model("../w.bin"), weights("w.bin", abc)), "keeps values in '../w.bin', which");
  CHECK_ERROR(open(model("/etc/passwd"), weights("w.bin", abc)), "keeps values in '/etc/passwd', which");
  CHECK_ERROR(open(model("w.bin"), weights("w.bin", "00")), "SHA-256 differs");
  std::ofstream(folder.path / "w.bin") << "ab";
  CHECK_ERROR(open(model("w.bin"), weights("w.bin", abc)), "truncated or replaced");
  // In a subgraph of a node, and in a function.
  const std::string tensor = entry("location", "x.bin");
  CHECK_ERROR(open(field(7, field(1, field(5, field(6, field(5, tensor))))), Json::array()), "keeps values in 'x.bin'");
  const std::string function = std::string{'\xca', '\x01', static_cast<char>(tensor.size() + 6)}; // field 25
  CHECK_ERROR(open(function + field(7, field(5, field(5, tensor))), Json::array()), "keeps values in 'x.bin'");
  CHECK_ERROR(open("location\x0b", Json::array()), "is no ONNX file that can be read");
  CHECK(detrt::sha256_of(open("no names here", Json::array())).size() == 64);
}

TEST_CASE("a damaged manifest is refused") {
  struct Row {
    const char* pointer;
    Json value;
    const char* message;
  };
  const Json engine = {{"target", "tensorrt"},
                       {"runtime_version", "10.1"},
                       {"compute_capabilities", {90}},
                       {"precision", "fp32"},
                       {"profile", {{"pixel_values", {{"min", {1, 3}}, {"opt", {2, 3}}, {"max", {4, 3}}}}}},
                       {"onnx_sha256", ""},
                       {"inputs", {{{"name", "x"}, {"dtype", "uint8"}, {"shape", {"batch", 3}}}}}};
  const Row rows[] = {
      {"/schema", 9, "has schema 9"},
      {"/files", 1, "files is not a list"},
      {"/files/0/path", "../x", "outside its own folder; refused"},
      {"/files/0/path", "/etc/passwd", "outside its own folder; refused"},
      {"/files/0/path", "", "outside its own folder; refused"},
      {"/spec/labels/0", "a\nb", "must be one line of text"},
      {"/spec/labels/00", "a", "labels: class 0 is there twice, the second time as \"00\"; give it once"},
      {"/files/0/size", -1, "must be an integer"},
      {"/files/0/engine", {{"target", 1}}, "target must be text"},
  };
  for (const Row& row : rows) {
    Json data = good_bundle();
    data[Json::json_pointer(row.pointer)] = row.value;
    CAPTURE(row.pointer);
    CHECK_ERROR(detrt::Bundle::parse(data.dump(), "b"), row.message);
  }
  for (const char* key : {"schema", "spec", "provenance", "files"}) {
    Json data = good_bundle();
    data.erase(key);
    CHECK_ERROR(detrt::Bundle::parse(data.dump(), "b"), std::string("has no field '") + key + "'");
  }
  Json data = good_bundle();
  data["files"][0]["engine"] = engine;
  const detrt::Bundle bundle = detrt::Bundle::parse(data.dump(), "b");
  const detrt::EngineFacts facts = *bundle.files().front().engine;
  CHECK(facts.profile.at("pixel_values").max == std::vector<std::int64_t>{4, 3});
  CHECK(facts.inputs.front().shape == std::vector<std::int64_t>{-1, 3});
  CHECK(facts.inputs.front().axes.front() == "batch");
  data["files"][0]["engine"]["compute_capabilities"] = {"90"};
  CHECK_ERROR(detrt::Bundle::parse(data.dump(), "b"), "must be numbers such as 89");
}

TEST_CASE("compiled kernels lie where Python keeps them") {
  const Folder folder("kernels");
  const std::filesystem::path kept = folder.path / "new" / "kept";
  ::setenv("DETRT_RUNTIME_CACHE", kept.c_str(), 1);
  for (const Json& row : read_cases("kernel_files.json")) {
    Json data = good_bundle(), facts = row.at("facts");
    facts.update({{"target", "tensorrt-rtx"}, {"compute_capabilities", {89}}, {"precision", "fp32"}, {"profile", Json::object()}});
    data["files"][0]["engine"] = facts;
    data["files"][0]["size"] = row.at("size");
    const detrt::BundleFile engine = detrt::Bundle::parse(data.dump(), "b").files().front();
    CHECK(engine.engine->compiled_by == row.at("compiled_by").get<std::string>());
    const std::filesystem::path path = detrt::kernel_file(engine, row.at("gpu").get<std::string>());
    CHECK(path == kept / row.at("name").get<std::string>());
    CHECK(detrt::read_kernels(path).empty());
    const std::string kernels("\0kernels\xff", 9);
    for (int time = 0; time < 2; ++time)
      detrt::write_kernels(path, kernels.data(), kernels.size());
    const std::vector<char> read = detrt::read_kernels(path);
    CHECK(std::string(read.begin(), read.end()) == kernels);
    detrt::write_kernels(path / "in a file", kernels.data(), kernels.size()); // cannot be written
    CHECK(detrt::read_kernels(kept).empty());
    ::setenv("DETRT_RUNTIME_CACHE", "off", 1);
    CHECK(detrt::kernel_file(engine, "GPU").empty());
    ::unsetenv("DETRT_RUNTIME_CACHE");
    const std::string home = std::getenv("HOME") == nullptr ? "" : std::getenv("HOME");
    ::setenv("HOME", "/of/user", 1);
    ::setenv("XDG_CACHE_HOME", "/caches", 1);
    CHECK(detrt::kernel_file(engine, "GPU").parent_path() == "/caches/detrt");
    ::unsetenv("XDG_CACHE_HOME");
    CHECK(detrt::kernel_file(engine, "GPU").parent_path() == "/of/user/.cache/detrt");
    ::unsetenv("HOME");
    CHECK(detrt::kernel_file(engine, "GPU").empty());
    if (!home.empty())
      ::setenv("HOME", home.c_str(), 1);
    ::setenv("DETRT_RUNTIME_CACHE", kept.c_str(), 1);
  }
  ::unsetenv("DETRT_RUNTIME_CACHE");
  CHECK(std::distance(std::filesystem::directory_iterator(kept), {}) == 2); // nothing unfinished
}

TEST_CASE("an engine is refused by the rule of Python, in its words") {
  for (const Json& row : read_cases("engine_refusals.json")) {
    CAPTURE(row.dump());
    Json data = good_bundle(), facts = row.at("facts");
    facts.update({{"precision", "fp32"}, {"profile", Json::object()}});
    data["files"][0].update({{"path", "model.engine"}, {"engine", facts}});
    const detrt::BundleFile engine = detrt::Bundle::parse(data.dump(), "b").files().front();
    const std::string old = detrt::version_refusal(engine, row.at("installed").get<std::string>());
    const std::string other = detrt::gpu_refusal(engine, row.at("capability").get<int>(), row.at("gpu").get<std::string>());
    CHECK((old.empty() ? other : old) == row.at("message").get<std::string>());
  }
}
