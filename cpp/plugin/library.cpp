// What IPluginRegistry::loadLibrary searches for. Nothing else is exported, and libnvinfer is not needed to load the
// library.
#include <atomic>
#include <cstdio>

#include <NvInferVersion.h>

#if NV_TENSORRT_MAJOR >= 10
#include "plugin_v3.hpp"
#else
#include "plugin_v2.hpp"
#endif

#define DETRT_EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

#if NV_TENSORRT_MAJOR >= 10
std::atomic<nvinfer1::ILoggerFinder*> finder{nullptr};

nvinfer1::ILogger* logger_of_tensorrt() {
  nvinfer1::ILoggerFinder* const found = finder.load();
  return found ? found->findLogger() : nullptr;
}
#else
nvinfer1::ILogger* logger_of_tensorrt() {
  return nullptr; // TensorRT 8.5 gives plugins none
}
#endif

} // namespace

void detrt::plugin::report(const std::string& message) noexcept {
  try {
    const std::string text = "detrt MSDeformAttn: " + message;
    if (nvinfer1::ILogger* const logger = logger_of_tensorrt())
      logger->log(nvinfer1::ILogger::Severity::kERROR, text.c_str());
    else
      std::fprintf(stderr, "%s\n", text.c_str());
  } catch (...) {
    std::fputs("detrt MSDeformAttn: an error could not be told\n", stderr);
  }
}

#if NV_TENSORRT_MAJOR >= 10
#define DETRT_CREATORS getCreators
DETRT_EXPORTED void setLoggerFinder(nvinfer1::ILoggerFinder* given) {
  finder = given;
}
#else
#define DETRT_CREATORS getPluginCreators
#endif

DETRT_EXPORTED detrt::plugin::Creator* const* DETRT_CREATORS(std::int32_t& count) {
  static detrt::plugin::MsDeformAttnCreator creator;
  static detrt::plugin::Creator* const all[] = {&creator};
  count = 1;
  return all;
}
