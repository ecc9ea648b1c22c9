#include <thread>

#include "detrt/decode.hpp"
#include "detrt/detector.hpp"
#include "detrt/preprocess.hpp"
#include "fake.hpp"
#include "tensorrt/session.hpp"
#include "tests/support.hpp"

namespace {

using fake::world;
using Session = detrt::tensorrt::TrtSession;

// One test: a bundle with an engine of the fake, and a look at what is left behind.
struct Bench {
  Folder folder{"session"};
  detrt::Bundle bundle;
  detrt::BundleFile file;

  Bench() : bundle(detrt::Bundle::parse(R"({"schema": 1, "provenance": {}, "files": [],
      "spec": {"schema": 1, "family": "test", "labels": {"0": "cat", "1": "dog", "2": "cow"},
        "input": {"resize": "stretch", "height": 8, "width": 10},
        "decode": {"activation": "sigmoid", "select": "topk", "num_queries": 6, "num_classes": 3, "max_detections": 18}}})",
                                        folder.path)) {
    world = {};
    file.kind = "engine";
    file.path = "model.engine";
    std::ofstream(folder.path / file.path) << "engine";
    file.size = 6;
    file.sha256 = detrt::sha256_of(folder.path / file.path);
    file.engine.emplace();
    file.engine->target = "tensorrt";
    file.engine->runtime_version = fake::version();
    file.engine->compute_capabilities = {90};
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench() { CHECK(world.alive == 0); }

  std::unique_ptr<Session> open(std::optional<bool> graph = std::nullopt, int contexts = 1) const {
    detrt::SessionOptions options;
    options.cuda_graph = graph;
    options.contexts = contexts;
    return std::make_unique<Session>(bundle, file, options);
  }
};

detrt::Tensors feeds_of(int batch, int seed) {
  detrt::Tensor pixels(detrt::DType::uint8, {batch, 3, fake::height, fake::width});
  for (std::int64_t i = 0; i < pixels.elements(); ++i)
    pixels.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(i * 31 + seed * 17);
  detrt::Tensors feeds;
  feeds.emplace("pixel_values", std::move(pixels));
  return feeds;
}

// Runs once; whether the outputs are those of these feeds.
bool right(detrt::Session& session, int batch, int seed) {
  const detrt::Tensors feeds = feeds_of(batch, seed), outputs = session.run(feeds);
  const detrt::Tensor &pixels = feeds.at("pixel_values"), &logits = outputs.at("logits");
  bool same = logits.shape() == std::vector<std::int64_t>{batch, fake::queries, fake::classes} &&
              outputs.at("pred_boxes").shape() == std::vector<std::int64_t>{batch, fake::queries, 4};
  for (std::int64_t i = 0; same && i < logits.elements(); ++i)
    same = logits.as<float>()[i] ==
           fake::logit_of(pixels.as<std::uint8_t>(), pixels.bytes(), static_cast<std::size_t>(i));
  return same;
}

} // namespace

TEST_CASE("the content of an engine is compared once its version suits") {
  Bench bench;
  std::ofstream(bench.folder.path / bench.file.path) << "other!";
  const auto refused = [&](const std::string& words) {
    try {
      (void)bench.open();
    } catch (const detrt::Error& error) {
      return std::string(error.what()).find(words) != std::string::npos;
    }
    return false;
  };
  CHECK(refused("SHA-256 differs"));
  bench.file.engine->runtime_version = "7.0.0.1";
  CHECK(refused("runs only on it"));
}

TEST_CASE("an engine of one shape runs as a graph from its second run on, unless that is refused") {
  const Bench bench;
  {
    const auto session = bench.open();
    for (int i = 0; i < 6; ++i)
      CHECK(right(*session, 2, i));
    CHECK((world.enqueued == 1 && world.graphs == 1 && world.launches == 5));
  }
  const auto session = bench.open(false);
  for (int i = 0; i < 3; ++i)
    CHECK(right(*session, 2, i));
  CHECK((world.enqueued == 4 && world.graphs == 1));
}

TEST_CASE("an engine of symbolic shapes has a graph where it is asked for, another one for each change of shapes") {
  const Bench bench;
  world.symbolic = true;
  {
    const auto session = bench.open();
    for (int i = 0; i < 6; ++i)
      CHECK(right(*session, 1 + i % 4, i));
    CHECK((world.enqueued == 6 && world.graphs == 0));
  }
  const auto session = bench.open(true);
  int seed = 0;
  for (const int batch : {1, 1, 1, 4, 4, 2, 2, 2, 4, 1, 1, 3, 3})
    CHECK(right(*session, batch, seed++));
  CHECK(world.graphs == 5);
}

TEST_CASE("outputs whose shape depends on the data grow, without a graph") {
  for (const bool symbolic : {false, true}) {
    const Bench bench;
    world.growing = true;
    world.symbolic = symbolic;
    const auto session = bench.open(true);
    for (const int batch : {1, 4, 2, 2, 3})
      CHECK(right(*session, symbolic ? batch : 2, batch));
    CHECK(world.graphs == 0);
  }
}

TEST_CASE("what cannot be recorded runs without a graph, or is an error where one is asked for") {
  for (const bool memory : {false, true}) {
    const Bench bench;
    (memory ? world.refuse_graph : world.refuse_capture) = true;
    {
      const auto session = bench.open();
      for (int i = 0; i < 4; ++i)
        CHECK(right(*session, 2, i));
      CHECK((world.enqueued == 4 && world.launches == 0));
      world.copies_until_failure = 0;
      CHECK(error_of([&] { session->run(feeds_of(2, 0)); }) == "the copy to the GPU failed: a fault");
      CHECK(detrt::tensorrt::Logger::instance().taken() == "TensorRT gave no reason"); // that of the graph is no longer there
    }
    const auto session = bench.open(true);
    CHECK(right(*session, 2, 0));
    CHECK_ERROR(session->run(feeds_of(2, 1)), std::string("cannot be recorded as a CUDA graph (") +
                                                  (memory ? "out of memory" : "not while it is captured"));
    world.refuse_graph = world.refuse_capture = false;
    for (int i = 0; i < 3; ++i)
      CHECK(right(*session, 2, i));
    CHECK(world.graphs == 1);
  }
}

TEST_CASE("a run that fails leaves nothing behind, and the next one is right") {
  const Bench bench;
  for (int runs = 0; runs < 3; ++runs)
    for (int copy = 0; copy < 3; ++copy) {
      const auto session = bench.open();
      for (int i = 0; i < runs; ++i)
        CHECK(right(*session, 2, i));
      world.copies_until_failure = copy;
      CHECK_ERROR(session->run(feeds_of(2, 7)), "failed: a fault");
      for (int i = 0; i < 3; ++i)
        CHECK(right(*session, 2, i));
    }
  for (int allocation = 0; allocation < 6; ++allocation) {
    const auto session = bench.open();
    world.allocations_until_failure = allocation;
    CHECK_ERROR(session->run(feeds_of(2, 7)), "the GPU is out of memory");
    CHECK(right(*session, 2, 1));
  }
  for (int context = 0; context < 3; ++context) {
    world.contexts_until_failure = context;
    CHECK_ERROR(bench.open(std::nullopt, 3), "could not prepare 'model.engine'");
    CHECK(world.alive == 0);
  }
}

TEST_CASE("several threads share contexts, of which one is made again") {
  const Bench bench;
  const auto session = bench.open(std::nullopt, 2);
  world.copies_until_failure = 0;
  CHECK_ERROR(session->run(feeds_of(2, 0)), "failed: a fault");
  world.contexts_until_failure = 0;
  std::atomic<int> wrong{0}, failed{0};
  std::vector<std::thread> threads;
  for (int k = 0; k < 4; ++k)
    threads.emplace_back([&, k] {
      for (int i = 0; i < 50; ++i)
        failed += !error_of([&] { wrong += !right(*session, 2, k * 50 + i); }).empty();
    });
  for (std::thread& thread : threads)
    thread.join();
  CHECK((wrong == 0 && failed <= 1)); // the context that could not be made
}

TEST_CASE("images become the detections of their pixels") {
  const Bench bench;
  std::vector<detrt::Image> images;
  for (const detrt::Size size : {detrt::Size{30, 20}, {8, 10}, {5, 40}, {64, 48}}) {
    images.emplace_back(size.height, size.width);
    for (std::size_t i = 0; i < images.back().rgb.size(); ++i)
      images.back().rgb[i] = static_cast<std::uint8_t>(255 - (i * 13 + images.size() * 50) % 90);
  }
  const std::filesystem::path path = bench.folder.path / "a.jpg";
  detrt::save_image(images.back(), path);
  images.back() = detrt::load_encoded(path);
  auto opened = bench.open();
  Session& session = *opened;
  const detrt::ModelSpec spec = bench.bundle.spec();
  detrt::DetectorOptions options;
  options.threshold = 0.3;
  const detrt::Detector detector(std::move(opened), spec, options);
  for (int round = 0; round < 3; ++round) {
    const std::vector<detrt::Detections> found = detector(images);
    for (std::size_t i = 0; i < images.size(); i += 2) {
      const detrt::PreparedBatch two = detrt::preprocess({&images[i], &images[i + 1]}, spec);
      const auto want = detrt::decode(session.run(two.feeds), spec, two.original_sizes, {0.3, {}, {}});
      for (std::size_t k = 0; k < 2; ++k) {
        CHECK(!want[k].found.empty());
        CHECK(detrt::to_json(found[i + k], "x") == detrt::to_json(want[k], "x"));
      }
    }
  }
  for (int copy = 0; copy < 4; ++copy) {
    std::vector<detrt::Image> files{detrt::load_encoded(path), detrt::load_encoded(path)};
    world.copies_until_failure = copy;
    CHECK(!error_of([&] { detector(files); }).empty());
    files.clear(); // nothing reads them any longer
    world.copies_until_failure = -1;
    CHECK(detector(images).size() == images.size());
  }
}
