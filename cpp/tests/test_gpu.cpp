// What a GPU does around a model, as far as a CPU can: the pixels of its kernel, and the decoding of what it chose.
#include <cstring>
#include <random>

#include "chosen.hpp"
#include "detrt/detector.hpp"
#include "detrt/preprocess.hpp"
#include "fake_session.hpp"
#include "gpu/image_block.hpp"
#include "support.hpp"

namespace {

detrt::ModelSpec gpu_spec(const Json& input, const Json& decode = Json::object()) {
  Json spec = Json::parse(R"({"schema": 1, "family": "test", "labels": {"0": "cat", "1": "dog", "2": "cow"},
    "input": {"resize": "stretch", "height": 48, "width": 64},
    "decode": {"activation": "sigmoid", "select": "topk", "num_queries": 40, "num_classes": 3, "max_detections": 25}})");
  spec["input"].merge_patch(input);
  spec["decode"].merge_patch(decode);
  return detrt::ModelSpec::from_json(spec.dump());
}

std::vector<detrt::Image> noise_images(const std::vector<detrt::Size>& sizes) {
  std::mt19937 numbers(7);
  std::vector<detrt::Image> images;
  for (const detrt::Size size : sizes) {
    images.emplace_back(size.height, size.width);
    for (std::uint8_t& value : images.back().rgb)
      value = static_cast<std::uint8_t>(numbers() & 255);
  }
  return images;
}

// The inputs of a model as the kernel in gpu/images.cu writes them, one pixel after the other.
detrt::Tensors kernel_feeds(const detrt::BatchPlan& plan, const detrt::InputSpec& input) {
  detrt::gpu::ImageBlock images(input);
  std::vector<std::uint64_t> memory(images.plan(plan) / 8 + 1);
  auto* block = reinterpret_cast<std::uint8_t*>(memory.data());
  images.write(block);
  const auto count = static_cast<std::int64_t>(plan.images.size());
  const int height = plan.canvas.height, width = plan.canvas.width;
  detrt::Tensor pixels(input.float_pixels ? detrt::DType::float32 : detrt::DType::uint8, {count, 3, height, width});
  detrt::Tensor mask(detrt::DType::int64, {count, height, width});
  const auto* levels = reinterpret_cast<const float*>(block + images.levels());
  const std::size_t plane = static_cast<std::size_t>(height) * static_cast<std::size_t>(width);
  for (std::size_t i = 0; i < plan.images.size(); ++i) {
    const auto& row = reinterpret_cast<const detrt::gpu::ImageRow*>(block)[i];
    for (int y = 0; y < row.height; ++y)
      for (int x = 0; x < row.width; ++x) {
        int rgb[3];
        detrt::gpu::resized_pixel(block, row, y, x, rgb);
        const std::size_t at = static_cast<std::size_t>(y) * static_cast<std::size_t>(width) + static_cast<std::size_t>(x);
        mask.as<std::int64_t>()[i * plane + at] = 1;
        for (std::size_t c = 0; c < 3; ++c)
          if (input.float_pixels)
            pixels.as<float>()[(3 * i + c) * plane + at] = levels[c * 256 + static_cast<std::size_t>(rgb[c])];
          else
            pixels.as<std::uint8_t>()[(3 * i + c) * plane + at] = static_cast<std::uint8_t>(rgb[c]);
      }
  }
  detrt::Tensors feeds;
  feeds.emplace("pixel_values", std::move(pixels));
  if (input.mask)
    feeds.emplace("pixel_mask", std::move(mask));
  return feeds;
}

bool same_tensor(const detrt::Tensor& a, const detrt::Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

} // namespace

TEST_CASE("the kernel's pixels and masks are those of the CPU") {
  const std::vector<Json> inputs{
      Json::parse(R"({})"), Json::parse(
                          R"({"dtype": "float32", "normalize_in_graph": false, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.1]})"),
      Json::parse(R"({"resize": "shortest_edge", "shortest_edge": 40, "longest_edge": 66, "mask": true, "dynamic": true})"),
      Json::parse(R"({"resize": "fit", "dtype": "float32", "mask": true})")};
  const std::vector<detrt::Image> images = noise_images({{30, 90}, {48, 64}, {200, 21}, {48, 64}, {7, 5}});
  std::vector<const detrt::Image*> batch;
  for (const detrt::Image& image : images)
    batch.push_back(&image);
  batch.push_back(&images.front()); // twice in the batch, once in the block
  for (Json input : inputs)
    for (const char* resample : {"nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"}) {
      input["resample"] = resample;
      const detrt::ModelSpec spec = gpu_spec(input);
      const detrt::Tensors want = detrt::preprocess(batch, spec).feeds;
      const detrt::Tensors got = kernel_feeds(detrt::plan_batch(batch, spec), spec.input);
      REQUIRE(got.size() == want.size());
      for (const auto& [name, tensor] : want)
        CHECK_MESSAGE(same_tensor(tensor, got.at(name)), name << " of " << input.dump());
    }
}

TEST_CASE("a JPEG file that stays encoded is planned, and decoded where pixels are needed") {
  const Folder folder("encoded");
  const detrt::Image image = noise_images({{37, 53}}).front();
  const std::filesystem::path path = folder.path / "a.jpg", cut = folder.path / "cut.jpg";
  detrt::save_image(image, path);
  const detrt::Image plain = detrt::load_image(path), encoded = detrt::load_encoded(path);
  CHECK((encoded.jpeg && encoded.rgb.empty() && encoded.size() == image.size()));
  CHECK(detrt::decoded(encoded).rgb == plain.rgb);
  const detrt::ModelSpec spec = gpu_spec(Json::object());
  CHECK(same_tensor(detrt::preprocess({&encoded, &plain}, spec).feeds.at("pixel_values"),
                    detrt::preprocess({&plain, &plain}, spec).feeds.at("pixel_values")));

  // The block: what is uploaded first, then room for the pixels of the file, which a GPU writes.
  detrt::gpu::ImageBlock images(spec.input);
  const detrt::BatchPlan plan = detrt::plan_batch({&encoded, &plain, &encoded}, spec);
  const std::size_t bytes = images.plan(plan);
  REQUIRE(images.encoded().size() == 1);
  const std::size_t place = images.encoded().at(&encoded);
  CHECK((place >= images.written() && place + plain.rgb.size() <= bytes));
  std::vector<std::uint64_t> memory(bytes / 8 + 1);
  auto* block = reinterpret_cast<std::uint8_t*>(memory.data());
  images.write(block);
  std::copy(plain.rgb.begin(), plain.rgb.end(), block + place);
  const auto* rows = reinterpret_cast<const detrt::gpu::ImageRow*>(block);
  CHECK((rows[0].source == place && rows[2].source == place && rows[1].source < images.written()));
  for (int x = 0; x < 64; ++x) {
    int a[3], b[3];
    detrt::gpu::resized_pixel(block, rows[0], 20, x, a);
    detrt::gpu::resized_pixel(block, rows[1], 20, x, b);
    CHECK(std::equal(a, a + 3, b));
  }

  // Other files are decoded at once: a PNG file, and a file that is cut off, which fails.
  detrt::save_image(image, folder.path / "a.png");
  CHECK((!detrt::load_encoded(folder.path / "a.png").jpeg && !detrt::load_encoded(folder.path / "a.png").rgb.empty()));
  std::filesystem::copy_file(path, cut);
  std::filesystem::resize_file(cut, std::filesystem::file_size(path) / 2);
  CHECK_ERROR(detrt::load_encoded(cut), "damaged or truncated");
}

TEST_CASE("chosen queries are decoded as all are") {
  std::mt19937 numbers(3);
  std::normal_distribution<float> normal(-1.0f, 2.0f);
  std::uniform_real_distribution<float> uniform(0.1f, 0.9f);
  for (const char* rule : {R"({})", R"({"activation": "softmax", "select": "query"})", R"({"nms": "nms"})", R"({"nms": "soft_nms"})"}) {
    const detrt::ModelSpec spec = gpu_spec(Json::object(), Json::parse(rule));
    const std::int64_t queries = spec.decode.num_queries, columns = 3 + (spec.decode.activation == detrt::Activation::softmax);
    detrt::Tensor logits(detrt::DType::float32, {2, queries, columns}), boxes(detrt::DType::float32, {2, queries, 4});
    // Few values, so that scores are equal.
    std::generate_n(logits.as<float>(), logits.elements(), [&] { return std::nearbyint(normal(numbers) * 4) / 4; });
    std::generate_n(boxes.as<float>(), boxes.elements(), [&] { return uniform(numbers); });
    detrt::Tensors all, some;
    all["logits"] = logits;
    all["pred_boxes"] = boxes;
    for (const double threshold : {0.0, 0.3, 0.7}) {
      detrt::DecodeOptions options;
      options.threshold = threshold;
      const auto want = detrt::decode(all, spec, {{100, 200}, {48, 64}}, options);
      REQUIRE(!want[1].found.empty());
      // Every query but those that have no class above one half, last image first.
      std::vector<std::int64_t> rows;
      for (std::int64_t row = 2 * queries - 1; row >= 0; --row) {
        const float* values = logits.as<float>() + row * columns;
        const float least = columns > 3 ? values[3] : 0; // the background
        if (threshold < 0.5 || *std::max_element(values, values + 3) > least)
          rows.push_back(row);
      }
      CHECK((threshold < 0.5 || rows.size() < static_cast<std::size_t>(2 * queries)));
      const auto m = static_cast<std::int64_t>(rows.size());
      detrt::Tensor places(detrt::DType::int64, {m, 2}), values(detrt::DType::float32, {m, columns}), corners(detrt::DType::float32, {m, 4});
      for (std::size_t i = 0; i < rows.size(); ++i) {
        places.as<std::int64_t>()[2 * i] = rows[i] / queries;
        places.as<std::int64_t>()[2 * i + 1] = rows[i] % queries;
        std::copy_n(logits.as<float>() + rows[i] * columns, columns, values.as<float>() + static_cast<std::int64_t>(i) * columns);
        std::copy_n(boxes.as<float>() + rows[i] * 4, 4, corners.as<float>() + static_cast<std::int64_t>(i) * 4);
      }
      some[detrt::chosen_queries] = places;
      some["logits"] = values;
      some["pred_boxes"] = corners;
      const auto got = detrt::decode(some, spec, {{100, 200}, {48, 64}}, options);
      for (std::size_t i = 0; i < 2; ++i)
        CHECK(detrt::to_json(got[i], "x") == detrt::to_json(want[i], "x"));
    }
  }
}

TEST_CASE("a session that takes images gets them, and the feeds beside them") {
  struct ImageSession final : FakeSession {
    using FakeSession::FakeSession;
    bool takes_images() const override { return true; }
    detrt::Tensors run_images(const detrt::BatchPlan& plan, const detrt::Tensors& feeds, double threshold,
                              double& forward_ms) override {
      CHECK(feeds.empty());
      CHECK(threshold == 0.25);
      CHECK(plan.canvas == detrt::Size{48, 64});
      forward_ms += 2;
      return run(kernel_feeds(plan, gpu_spec(Json::object()).input));
    }
  };
  const std::vector<detrt::TensorInfo> inputs{{"pixel_values", detrt::DType::uint8, {2, 3, 48, 64}, {}}};
  const auto model = [](const detrt::Tensors& feeds) {
    const auto* pixels = feeds.at("pixel_values").as<std::uint8_t>();
    detrt::Tensor logits(detrt::DType::float32, {2, 40, 3}), boxes(detrt::DType::float32, {2, 40, 4});
    for (std::int64_t i = 0; i < logits.elements(); ++i)
      logits.as<float>()[i] = (static_cast<float>(pixels[i * 37]) - 200) / 20;
    std::fill_n(boxes.as<float>(), boxes.elements(), 0.5f);
    detrt::Tensors outputs;
    outputs["logits"] = logits;
    outputs["pred_boxes"] = boxes;
    return outputs;
  };
  detrt::DetectorOptions options;
  options.threshold = 0.25;
  const detrt::Detector plain(std::make_unique<FakeSession>(inputs, model), gpu_spec(Json::object()), options);
  const detrt::Detector there(std::make_unique<ImageSession>(inputs, model), gpu_spec(Json::object()), options);
  const std::vector<detrt::Image> images = noise_images({{30, 90}, {100, 120}, {48, 64}});
  detrt::Timing timing;
  const auto want = plain(images), got = there(images, &timing);
  CHECK(timing.forward_ms == 4);
  for (std::size_t i = 0; i < images.size(); ++i) {
    CHECK(!want[i].found.empty());
    CHECK(detrt::to_json(got[i], "x") == detrt::to_json(want[i], "x"));
  }
}
