#include <array>
#include <numeric>
#include <thread>

#include "detrt/detector.hpp"
#include "detrt/detrt.h"
#include "detrt/draw.hpp"
#include "detrt/preprocess.hpp"
#include "fake_session.hpp"
#include "support.hpp"

namespace {

detrt::ModelSpec spec_of(const char* changes = "{}") {
  Json spec = Json::parse(R"({"schema": 1, "family": "test", "labels": {"0": "cat", "1": "dog"},
    "input": {"resize": "stretch", "height": 8, "width": 8},
    "decode": {"activation": "sigmoid", "select": "topk", "num_queries": 2, "num_classes": 2, "max_detections": 4}})");
  spec.merge_patch(Json::parse(changes));
  return detrt::ModelSpec::from_json(spec.dump());
}

detrt::TensorInfo pixels(std::int64_t batch) {
  return {"pixel_values", detrt::DType::uint8, {batch, 3, 8, 8}, {"batch", "", "", ""}};
}

// Finds one dog in the middle of every image; its score falls with the first pixel.
detrt::Tensors one_dog(const detrt::Tensors& feeds) {
  const detrt::Tensor& given = feeds.at("pixel_values");
  const std::int64_t n = given.shape()[0];
  detrt::Tensor logits(detrt::DType::float32, {n, 2, 2}), boxes(detrt::DType::float32, {n, 2, 4});
  std::fill_n(logits.as<float>(), logits.elements(), -20.0f);
  std::fill_n(boxes.as<float>(), boxes.elements(), 0.5f);
  for (std::int64_t i = 0; i < n; ++i)
    logits.as<float>()[i * 4 + 1] = 4.0f - static_cast<float>(given.as<std::uint8_t>()[i * 3 * 64]) / 100.0f;
  detrt::Tensors outputs;
  outputs["logits"] = logits;
  outputs["pred_boxes"] = boxes;
  return outputs;
}

detrt::Detector detector_of(std::int64_t batch, std::optional<std::int64_t> most, detrt::DetectorOptions options = {}) {
  return detrt::Detector(std::make_unique<FakeSession>(std::vector<detrt::TensorInfo>{pixels(batch)}, one_dog, most),
                         spec_of(), options);
}

std::vector<detrt::Image> images_of(int count) {
  std::vector<detrt::Image> images(static_cast<std::size_t>(count), detrt::Image(16, 32));
  for (std::size_t i = 0; i < images.size(); ++i)
    std::fill(images[i].rgb.begin(), images[i].rgb.end(), static_cast<std::uint8_t>(i * 10));
  return images;
}

} // namespace

TEST_CASE("no image shares a batch with a larger one, whose padding the model would see") {
  const std::vector<detrt::Size> sizes{{50, 70}, {70, 50}, {100, 140}, {50, 71}, {66, 50}};
  using Groups = std::vector<std::vector<std::size_t>>;
  const char* shortest = R"({"input": {"resize": "shortest_edge", "shortest_edge": 48, "longest_edge": 96, "dynamic": true,
    "mask": true, "multiple_of": 1}})";
  const char* rounded = R"({"input": {"resize": "shortest_edge", "shortest_edge": 48, "longest_edge": 96, "dynamic": true,
    "mask": true, "multiple_of": 32, "height": 64, "width": 96}})";
  CHECK(detrt::group_by_size(sizes, spec_of(shortest)) == Groups{{0, 2}, {1}, {3}, {4}});
  CHECK(detrt::group_by_size(sizes, spec_of(rounded)) == Groups{{0, 2, 3}, {1}, {4}});
  CHECK(detrt::group_by_size(sizes, spec_of(shortest), detrt::Size{48, 64}) == Groups{{0, 1, 2, 3, 4}});
  CHECK(detrt::group_by_size(sizes, spec_of()) == Groups{{0, 1, 2, 3, 4}});
  CHECK(detrt::group_by_size({}, spec_of()).empty());
}

TEST_CASE("a detector keeps the order of the images, whatever the batch") {
  for (const auto& [fixed, asked] : {std::pair{-1, 1}, std::pair{-1, 3}, std::pair{4, 4}}) {
    detrt::DetectorOptions options;
    options.batch = asked;
    const auto found = detector_of(fixed, {}, options)(images_of(7));
    REQUIRE(found.size() == 7);
    for (std::size_t i = 0; i < 7; ++i) {
      REQUIRE(found[i].found.size() == 1);
      CHECK(found[i].found[0].label == "dog");
      CHECK(found[i].found[0].box_xyxy == std::array<float, 4>{8, 4, 24, 12});
      CHECK((i == 0 || found[i].found[0].score < found[i - 1].found[0].score));
    }
  }
  CHECK(detector_of(-1, {})(std::vector<detrt::Image>{}).empty());
}

TEST_CASE("a batch that the model cannot take is refused") {
  detrt::DetectorOptions options;
  options.batch = 9;
  CHECK_ERROR(detector_of(-1, 8, options), "batch must be from 1 to 8 with this model");
  CHECK_ERROR(detector_of(4, 8, options), "batch must be from 1 to 4");
  options.batch = 5000;
  CHECK_ERROR(detector_of(-1, {}, options), "batch must be from 1 to 1024");
  CHECK(detector_of(-1, 8).batch() == 8);
  CHECK(detector_of(-1, {}).batch() == 1);
}

TEST_CASE("tiles") {
  CHECK(detrt::windows_of({{8, 8}, 0}, {8, 20}) ==
        std::vector<detrt::Window>{{0, 0, 8, 8}, {0, 6, 8, 14}, {0, 12, 8, 20}, {0, 0, 8, 20}});
  CHECK(detrt::windows_of({{8, 8}, 0.2}, {8, 8}) == std::vector<detrt::Window>{{0, 0, 8, 8}});
  detrt::DetectorOptions options;
  options.tiling = detrt::Tiling{{16, 16}, 0};
  options.batch = 2;
  options.max_detections = 1;
  const auto found = detector_of(-1, {}, options)(images_of(3));
  REQUIRE(found.size() == 3);
  for (const detrt::Detections& one : found) {
    REQUIRE(one.found.size() == 1);
    CHECK(one.image_size == detrt::Size{16, 32});
    CHECK(one.found[0].box_xyxy == std::array<float, 4>{4, 4, 12, 12});
  }
  options.max_detections.reset();
  CHECK(detector_of(-1, {}, options)(images_of(1))[0].found.size() == 3); // and the one in the whole image
  options.tiling->overlap = 0.95;
  CHECK_ERROR(detector_of(-1, {}, options), "from 0 to 0.9; got 0.95");
  options.tiling = detrt::Tiling{{16, 0}, 0};
  CHECK_ERROR(detector_of(-1, {}, options), "at least 1x1 pixels; got 16x0");
  CHECK_ERROR(detrt::windows_of({{1, 1}, 0.9}, {30000, 40000}), "1200000001 tiles of 1x1, and at most 10000 are taken");
  CHECK(detrt::windows_of({{1, 1}, 0}, {99, 101}).size() == 10000);
}

TEST_CASE("choices are checked") {
  detrt::DetectorOptions options;
  options.classes = {"cow"};
  CHECK_ERROR(detector_of(-1, {}, options), "this model has no class 'cow'");
  options.classes = {"cat"};
  CHECK(detector_of(-1, {}, options)(images_of(1))[0].found.empty());
  options = {};
  options.threshold = 1.5;
  CHECK_ERROR(detector_of(-1, {}, options), "threshold must be from 0 to 1");
  options = {};
  options.size = detrt::Size{16, 16};
  CHECK_ERROR(detector_of(-1, {}, options), "this model takes 8x8 only");
  CHECK_ERROR(detector_of(-1, {})(std::vector<detrt::Image>{detrt::Image()}), "and pixels");
}

TEST_CASE("feeds and outputs that do not belong to the model are refused") {
  const std::vector<detrt::TensorInfo> inputs{pixels(-1)};
  detrt::Tensors feeds;
  CHECK_ERROR(detrt::check_feeds(inputs, feeds), "which is missing");
  feeds["pixel_values"] = detrt::Tensor(detrt::DType::uint8, {1, 3, 8, 9});
  CHECK_ERROR(detrt::check_feeds(inputs, feeds),
              "must be uint8 (any, 3, 8, 8); got uint8 (1, 3, 8, 9) (axis 3 must be 8)");
  feeds["pixel_values"] = detrt::Tensor(detrt::DType::float32, {1, 3, 8, 8});
  CHECK_ERROR(detrt::check_feeds(inputs, feeds), "got float32");
  feeds["pixel_values"] = detrt::Tensor(detrt::DType::uint8, {1, 3, 8, 8});
  feeds["more"] = detrt::Tensor(detrt::DType::uint8, {1});
  CHECK_ERROR(detrt::check_feeds(inputs, feeds), "has no input 'more'");

  detrt::Tensors outputs = one_dog({{"pixel_values", detrt::Tensor(detrt::DType::uint8, {1, 3, 8, 8})}});
  CHECK_ERROR(detrt::decode(outputs, spec_of(), {{8, 8}, {8, 8}}),
              "as float32 (1, 2, 2); its spec promises float32 (2, 2, 2)");
  outputs.at("logits").as<float>()[0] = std::nanf("");
  CHECK_ERROR(detrt::decode(outputs, spec_of(), {{8, 8}}), "NaN or infinite values in 'logits': numbers overflowed");
  outputs.erase("logits");
  CHECK_ERROR(detrt::decode(outputs, spec_of(), {{8, 8}}), "did not return 'logits'");
  CHECK_ERROR(detrt::Tensor(detrt::DType::float32, {1 << 30, 1 << 30, 1 << 30}), "cannot be made");
  CHECK_ERROR(detrt::Tensor(detrt::DType::float32, {-1}), "cannot be made");
  CHECK_ERROR(detrt::Tensor(detrt::DType::uint8, {1}).as<float>(), "was read as another type");
}

TEST_CASE("JSON is that of Python") {
  detrt::Detections d;
  d.image_size = {480, 640};
  CHECK(detrt::to_json(d, "a\"b\\\n\x01\xc3\xa9\xff.jpg") ==
        R"({"image": "a\"b\\\n\u0001)"
        "\xc3\xa9"
        R"(\udcff.jpg", "width": 640, "height": 480, "detections": []})");
  d.found = {{{0.0f, 1.00049f, 123.4567f, 639.9999f}, 0.00001234f, 3, "cat", {}},
             {{1e-5f, 100.0f, 2.5f, 3.0f}, 1.0f, 0, "", std::pair{0, 5}}};
  d.prompt = "a cat.";
  CHECK(
      detrt::to_json(d, "x") ==
      R"({"image": "x", "prompt": "a cat.", "width": 640, "height": 480, "detections": [{"label": "cat", "class_id": 3, )"
      R"("score": 1.2e-05, "box_xyxy": [0.0, 1.0, 123.457, 640.0]}, {"label": "", "class_id": 0, "score": 1.0, )"
      R"("box_xyxy": [0.0, 100.0, 2.5, 3.0], "phrase_span": [0, 5]}]})");
}

TEST_CASE("masks go from logits to text, pixels and drawing") {
  // The upper half of a map of 2 x 2, over an image of 4 x 2: rows 0 and 1 of both columns.
  const float logits[] = {1, 1, -1, -1};
  const detrt::Runs runs = detrt::encode_mask(logits, {2, 2}, {4, 2}, {2, 2});
  CHECK(runs == detrt::Runs{0, 2, 2, 2, 2});
  CHECK(detrt::mask_pixels(runs, {4, 2}) == std::vector<std::uint8_t>{1, 1, 1, 1, 0, 0, 0, 0});
  detrt::Detections d;
  d.image_size = {4, 2};
  d.found = {{{0, 3, 1, 4}, 0.5f, 0, "", {}, runs}};
  CHECK(detrt::to_json(d, "x").find(R"(4.0], "segmentation": {"size": [4, 2], "counts": "02200"}}]})") !=
        std::string::npos);
  const detrt::Image drawn = detrt::draw_detections(detrt::Image(4, 2), d);
  CHECK(drawn.rgb[3] == std::nearbyint(detrt::class_colour(0)[0] * 0.45));
  CHECK(drawn.rgb[4 * 3] == 0);
}

TEST_CASE("a spec and outputs with masks that do not fit are refused") {
  const char* masks = R"({"task": "instance-segmentation", "decode": {"mask_stride": 4}})";
  CHECK(spec_of(masks).has_masks);
  CHECK_ERROR(spec_of(R"({"task": "panoptic"})"), "must be one of");
  CHECK_ERROR(spec_of(R"({"task": "instance-segmentation"})"), "task does not fit decode.mask_stride 0");
  CHECK_ERROR(spec_of(R"({"decode": {"mask_stride": 4}})"), "task does not fit decode.mask_stride 4");
  CHECK_ERROR(spec_of(R"({"task": "instance-segmentation", "decode": {"mask_stride": 4}, "input": {"mask": true, "dynamic": true}})"),
              "without padding mask");
  CHECK_ERROR(spec_of(R"({"text": {"kind": "phrases"}, "decode": {"mask_stride": 3.5}})"), "run the model in Python");
  CHECK_ERROR(spec_of(R"({"text": {"kind": "names"}})"), "OWL-ViT");
  detrt::Tensor images(detrt::DType::uint8, {1, 3, 8, 8});
  std::fill_n(images.as<std::uint8_t>(), images.elements(), std::uint8_t{0});
  detrt::Tensors outputs = one_dog({{"pixel_values", images}});
  CHECK_ERROR(detrt::decode(outputs, spec_of(masks), {{8, 8}}), "did not return 'mask_logits'");
  detrt::Tensor maps(detrt::DType::float32, {1, 2, 2, 2});
  std::fill_n(maps.as<float>(), maps.elements(), std::numeric_limits<float>::quiet_NaN());
  outputs["mask_logits"] = maps;
  CHECK_ERROR(detrt::decode(outputs, spec_of(masks), {{8, 8}}), "NaN or infinite values in 'mask_logits'");
  outputs["mask_logits"] = detrt::Tensor(detrt::DType::float32, {1, 3, 2, 2});
  CHECK_ERROR(detrt::decode(outputs, spec_of(masks), {{8, 8}}), "its spec promises");
}

TEST_CASE("no exception leaves the C interface") {
  detrt_options options;
  detrt_options_init(&options);
  CHECK(options.threshold == 0.5);
  detrt_detector* detector = nullptr;
  CHECK(detrt_open("/none", &options, &detector) == DETRT_BAD_INPUT);
  CHECK(detector == nullptr);
  CHECK(std::string(detrt_last_error()).find("is not a detrt bundle") != std::string::npos);
  CHECK(detrt_open(nullptr, nullptr, &detector) == DETRT_BAD_INPUT);
  CHECK(detrt_open("/none", nullptr, nullptr) == DETRT_BAD_INPUT);
  options.threads = -4;
  CHECK(detrt_open("/none", &options, &detector) == DETRT_BAD_INPUT);
  CHECK(std::string(detrt_last_error()).find("threads must be from 1 to 4096") == 0);
  options.size = 1;
  CHECK(detrt_open("/none", &options, &detector) == DETRT_BAD_INPUT);
  detrt_result* result = nullptr;
  CHECK(detrt_detect_file(nullptr, "a.jpg", &result) == DETRT_BAD_INPUT);
  CHECK(detrt_detect_rgb(nullptr, nullptr, 1, 1, 0, &result) == DETRT_BAD_INPUT);
  CHECK(detrt_count(nullptr) == 0);
  CHECK(std::string(detrt_get(nullptr, 3).label).empty());
  CHECK(std::string(detrt_json(nullptr)).empty());
  detrt_free(nullptr);
  detrt_close(nullptr);
  detrt_options_init(nullptr);
  CHECK(std::string(detrt_version()) == "0.1.0");
}

TEST_CASE("eight threads on one detector, and on one each, find what one thread finds") {
  const auto images = images_of(4);
  const auto expected = detector_of(-1, {})(images);
  for (const bool shared : {false, true}) {
    const detrt::Detector common = detector_of(-1, {});
    std::array<int, 8> wrong{};
    std::vector<std::thread> threads;
    for (int& count : wrong)
      threads.emplace_back([&images, &expected, &common, &count, shared] {
        const detrt::Detector own = detector_of(-1, {});
        for (int run = 0; run < 20; ++run) {
          const auto found = (shared ? common : own)(images);
          for (std::size_t i = 0; i < found.size(); ++i)
            count += found[i].found.size() != expected[i].found.size() || found[i].found[0].score != expected[i].found[0].score;
          detrt_detector* none = nullptr; // an error is of its thread
          count += detrt_open("/none", nullptr, &none) != DETRT_BAD_INPUT || std::string(detrt_last_error()).empty();
        }
      });
    for (std::thread& thread : threads)
      thread.join();
    CHECK(std::accumulate(wrong.begin(), wrong.end(), 0) == 0);
  }
}
