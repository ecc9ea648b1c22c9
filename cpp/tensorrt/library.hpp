// The TensorRT that libdetrt was linked with, and what must be true before an engine is handed to it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <NvInferRuntime.h>

#include "detrt/bundle.hpp"

// Headers of TensorRT-RTX say what they are; with the public headers the build does (DETRT_TENSORRT_RTX).
#if defined(TRT_MAJOR_RTX) || defined(DETRT_TENSORRT_RTX)
#define DETRT_IS_RTX 1
#else
#define DETRT_IS_RTX 0
#endif

// TensorRT 8 has no BF16 and no INT64, and other interfaces for versions, plugins and outputs that grow.
#define DETRT_IS_TENSORRT_8 (!DETRT_IS_RTX && NV_TENSORRT_MAJOR < 10)

static_assert(DETRT_IS_RTX || (NV_TENSORRT_MAJOR == 8 && NV_TENSORRT_MINOR >= 5) || NV_TENSORRT_MAJOR > 10 ||
                  (NV_TENSORRT_MAJOR == 10 && NV_TENSORRT_MINOR >= 3),
              "libdetrt needs TensorRT 8.5, 8.6, or 10.3 or newer");

// TensorRT-RTX 1.7 has the interfaces of TensorRT 11: with those of TensorRT 10 it crashes.
#if defined(DETRT_TENSORRT_RTX) && !defined(TRT_MAJOR_RTX) && NV_TENSORRT_MAJOR < 11
#error "TensorRT-RTX needs its own headers, or the public ones of TensorRT 11 or newer (TENSORRT_INCLUDE_DIR)"
#endif

namespace detrt::tensorrt {

inline constexpr const char* target = DETRT_IS_RTX ? "tensorrt-rtx" : "tensorrt";
inline constexpr const char* library_name = DETRT_IS_RTX ? "TensorRT-RTX" : "TensorRT";

// "10.13.3.9": of the library that was loaded, not of the headers.
std::string library_version();

// Keeps the errors and warnings of TensorRT. Its logger is global: one for the process.
class Logger final : public nvinfer1::ILogger {
public:
  static Logger& instance();
  void log(Severity severity, const char* text) noexcept override;
  std::string taken(); // what came since the last call, one line, without what means nothing to a caller

private:
  std::mutex lock_;
  std::vector<std::string> lines_;
};

// 0 for "auto" and "cuda", N for "cuda:N", nothing for "cpu". Throws Error (usage) for anything else.
std::optional<int> device_of(const std::string& device);

// Why this machine or library cannot run an engine with these facts on this GPU; empty where it can.
std::string refusal(const BundleFile& file, int device);

// Loads plugin libraries once in a process. Throws Error (session): no file, not a plugin library, TensorRT-RTX.
void load_plugins(const std::vector<std::string>& paths);

std::unique_ptr<nvinfer1::IRuntime> make_runtime();
// Throws Error (session) with TensorRT's reason.
std::unique_ptr<nvinfer1::ICudaEngine> open_engine(nvinfer1::IRuntime& runtime, const std::filesystem::path& path,
                                                   bool version_compatible);

} // namespace detrt::tensorrt
