// Helpers of several test files.
#pragma once

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include <unistd.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "detrt/error.hpp"
#include "detrt/image.hpp"
#include "detrt/tensor.hpp"

using Json = nlohmann::json;

// A temporary folder with the lifetime of this object.
struct Folder {
  std::filesystem::path path;
  explicit Folder(const std::string& name)
      : path(std::filesystem::temp_directory_path() / ("detrt-" + name + "-" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

inline Json read_cases(const std::string& name) {
  std::ifstream file(std::string(DETRT_TEST_DATA) + "/" + name);
  REQUIRE_MESSAGE(file.good(), "the test data lack " << name);
  return Json::parse(file).at("cases");
}

// A tensor of a case: null is minus infinity.
inline detrt::Tensor tensor_of(const Json& json, detrt::DType dtype) {
  detrt::Tensor tensor(dtype, json.at("shape").get<std::vector<std::int64_t>>());
  const Json& values = json.at("values");
  REQUIRE(values.size() == static_cast<std::size_t>(tensor.elements()));
  for (std::size_t i = 0; i < values.size(); ++i)
    if (dtype == detrt::DType::float32)
      tensor.as<float>()[i] = values[i].is_null() ? -std::numeric_limits<float>::infinity() : values[i].get<float>();
    else
      tensor.as<std::int64_t>()[i] = values[i].get<std::int64_t>();
  return tensor;
}

inline detrt::Tensors outputs_of(const Json& json) {
  detrt::Tensors outputs;
  for (const auto& entry : json.items()) {
    const bool whole = entry.key() == "labels" || entry.key() == "num_detections";
    outputs.emplace(entry.key(), tensor_of(entry.value(), whole ? detrt::DType::int64 : detrt::DType::float32));
  }
  return outputs;
}

// An image of a case: stored pixels, or those of the formula in tests/data/make_cases.py.
inline detrt::Image image_of(const Json& json) {
  const auto shape = json.at("shape").get<std::vector<int>>();
  detrt::Image image(shape[0], shape[1]);
  if (json.contains("pixels")) {
    image.rgb = json.at("pixels").get<std::vector<std::uint8_t>>();
    return image;
  }
  const auto g = json.at("gradient").get<std::vector<int>>();
  std::uint8_t* out = image.rgb.data();
  for (int y = 0; y < shape[0]; ++y)
    for (int x = 0; x < shape[1]; ++x)
      for (int c = 0; c < 3; ++c)
        *out++ = static_cast<std::uint8_t>((g[0] * y + g[1] * x + g[2] * c + x * y / 7) % 256);
  return image;
}

// The message of the detrt::Error that a call throws; "" if it throws none.
template <class Function> std::string error_of(Function&& function) {
  try {
    function();
  } catch (const detrt::Error& error) {
    return error.what();
  }
  return "";
}

#define CHECK_ERROR(expression, part)                                                                                  \
  do {                                                                                                                 \
    const std::string message = error_of([&] { expression; });                                                         \
    CHECK_MESSAGE(message.find(part) != std::string::npos, "the message was: ", message);                              \
  } while (false)
