// The cases that the Python tests read as well: tests/data/*.json.
#include "detrt/decode.hpp"
#include "detrt/preprocess.hpp"
#include "support.hpp"

namespace {

void check_detections(const Json& expected, const detrt::Detections& got) {
  const Json& boxes = expected.at("boxes_xyxy");
  REQUIRE(got.found.size() == boxes.size());
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const detrt::Detection& d = got.found[i];
    CHECK(d.class_id == expected.at("class_ids")[i].get<std::int64_t>());
    CHECK(d.label == expected.at("labels")[i].get<std::string>());
    CHECK(std::fabs(static_cast<double>(d.score) - expected.at("scores")[i].get<double>()) <=
          3e-6); // both files hold rounded numbers
    CHECK(d.mask.has_value() == expected.contains("masks"));
    if (d.mask) // to the pixel
      CHECK(detrt::coco_counts(*d.mask) == expected.at("masks")[i].get<std::string>());
    for (std::size_t c = 0; c < 4; ++c)
      CHECK(std::fabs(static_cast<double>(d.box_xyxy[c]) - boxes[i][c].get<double>()) <= 0.01);
  }
}

std::vector<detrt::Size> sizes_of(const Json& json) {
  std::vector<detrt::Size> sizes;
  for (const Json& size : json)
    sizes.push_back({size[0].get<int>(), size[1].get<int>()});
  return sizes;
}

} // namespace

TEST_CASE("decode gives the detections of Python for the same tensors") {
  const Json cases = read_cases("decode_cases.json");
  CHECK(cases.size() >= 16);
  for (const Json& one : cases) {
    CAPTURE(one.at("name").get<std::string>());
    const auto spec = detrt::ModelSpec::from_json(one.at("spec").dump());
    detrt::DecodeOptions options;
    options.threshold = one.at("threshold").get<double>();
    if (!one.at("class_ids").is_null())
      options.class_ids = one.at("class_ids").get<std::vector<std::int64_t>>();
    if (!one.at("max_detections").is_null())
      options.max_detections = one.at("max_detections").get<std::int64_t>();
    const auto got = detrt::decode(outputs_of(one.at("outputs")), spec, sizes_of(one.at("original_sizes_hw")), options);
    REQUIRE(got.size() == one.at("detections").size());
    for (std::size_t i = 0; i < got.size(); ++i)
      check_detections(one.at("detections")[i], got[i]);
  }
}

TEST_CASE("preprocess gives the tensors of Python for the same pixels") {
  const Json cases = read_cases("preprocess_cases.json");
  CHECK(cases.size() >= 11);
  for (const Json& one : cases) {
    CAPTURE(one.at("name").get<std::string>());
    const auto spec = detrt::ModelSpec::from_json(one.at("spec").dump());
    std::vector<detrt::Image> images;
    std::vector<const detrt::Image*> pointers;
    for (const Json& image : one.at("images"))
      images.push_back(image_of(image));
    for (const detrt::Image& image : images)
      pointers.push_back(&image);
    std::optional<detrt::Size> size;
    if (!one.at("size_hw").is_null())
      size = detrt::Size{one.at("size_hw")[0].get<int>(), one.at("size_hw")[1].get<int>()};
    const detrt::PreparedBatch got = detrt::preprocess(pointers, spec, size);
    CHECK(got.resized_sizes == sizes_of(one.at("resized_sizes_hw")));
    REQUIRE(got.feeds.size() == one.at("feeds").size());
    for (const auto& feed : one.at("feeds").items()) {
      const detrt::Tensor& tensor = got.feeds.at(feed.key());
      const Json& values = feed.value().at("values");
      CHECK(detrt::name_of(tensor.dtype()) == feed.value().at("dtype").get<std::string>());
      REQUIRE(tensor.shape() == feed.value().at("shape").get<std::vector<std::int64_t>>());
      double worst = 0;
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double value = tensor.dtype() == detrt::DType::uint8 ? tensor.as<std::uint8_t>()[i]
                             : tensor.dtype() == detrt::DType::float32
                                 ? static_cast<double>(tensor.as<float>()[i])
                                 : static_cast<double>(tensor.as<std::int64_t>()[i]);
        worst = std::max(worst, std::fabs(value - values[i].get<double>()));
      }
      // Stricter than `atol`, which allows another resize: this one is Pillow's, bit for bit.
      CHECK(worst <= (tensor.dtype() == detrt::DType::float32 ? 1e-6 : 0.0));
    }
  }
}
