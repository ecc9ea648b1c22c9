#include "backend.hpp"

#include "detrt/error.hpp"
#include "library.hpp"
#include "session.hpp"

namespace detrt {
namespace {

std::optional<BundleFile> choose(const Bundle& bundle, const SessionOptions& options, std::string& why) {
  const std::optional<int> device = tensorrt::device_of(options.device);
  if (!device) {
    why = "TensorRT runs on an NVIDIA GPU; got device " + options.device;
    return std::nullopt;
  }
  const std::vector<BundleFile> files = bundle.of_kind("engine");
  if (files.empty())
    why = DETRT_IS_RTX ? "the bundle has no engine; build one with: detrt build MODEL -o BUNDLE --target tensorrt-rtx --sm NN"
                       : "the bundle has no engine; build one on the GPU with: detrt build MODEL -o BUNDLE --target tensorrt";
  std::string reasons;
  for (const BundleFile& file : files) {
    const std::string reason = tensorrt::refusal(file, *device);
    if (reason.empty())
      return file;
    // One reason that has nothing to do with the file is enough.
    if (reasons.find(reason) == std::string::npos)
      reasons += (reasons.empty() ? "" : "; ") + reason;
  }
  if (!reasons.empty())
    why = reasons;
  return std::nullopt;
}

std::unique_ptr<Session> open(const Bundle& bundle, const BundleFile& file, const SessionOptions& options) {
  return std::make_unique<tensorrt::TrtSession>(bundle, file, options);
}

} // namespace

const Backend& tensorrt_backend() {
  static const Backend row{"tensorrt", choose, open};
  return row;
}

} // namespace detrt
