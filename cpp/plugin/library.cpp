// The two functions that IPluginRegistry::loadLibrary searches for. Nothing else is exported, and libnvinfer is not
// needed to load the library.
#include <atomic>
#include <cstdio>

#include "ms_deform_attn_plugin.hpp"

#define DETRT_EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

std::atomic<nvinfer1::ILoggerFinder*> finder{nullptr};

} // namespace

void detrt::plugin::report(const std::string& message) noexcept {
  try {
    const std::string text = "detrt MSDeformAttn: " + message;
    nvinfer1::ILoggerFinder* const found = finder.load();
    if (nvinfer1::ILogger* const logger = found ? found->findLogger() : nullptr)
      logger->log(nvinfer1::ILogger::Severity::kERROR, text.c_str());
    else
      std::fprintf(stderr, "%s\n", text.c_str());
  } catch (...) {
    std::fputs("detrt MSDeformAttn: an error could not be told\n", stderr);
  }
}

DETRT_EXPORTED void setLoggerFinder(nvinfer1::ILoggerFinder* given) {
  finder = given;
}

DETRT_EXPORTED nvinfer1::IPluginCreatorInterface* const* getCreators(std::int32_t& count) {
  static detrt::plugin::MsDeformAttnCreator creator;
  static nvinfer1::IPluginCreatorInterface* const all[] = {&creator};
  count = 1;
  return all;
}
