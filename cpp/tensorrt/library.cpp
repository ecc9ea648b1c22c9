#include "library.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <set>

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "detrt/error.hpp"
#include "detrt/session.hpp"
#include "engine_fit.hpp"

namespace detrt::tensorrt {
namespace {

constexpr std::size_t kept_lines = 200;

} // namespace

#if DETRT_IS_TENSORRT_8

namespace {

int library_major() {
  return getInferLibVersion() / 1000;
}

// Plugin libraries register their layers when they are loaded; NVIDIA's own does so when it is asked to.
bool load_plugin_library(const std::filesystem::path& place) {
  void* library = dlopen(place.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    Logger::instance().log(nvinfer1::ILogger::Severity::kERROR, reason ? reason : "dlopen failed");
    return false;
  }
  using Initialise = bool (*)(void*, const char*);
  const auto initialise = reinterpret_cast<Initialise>(dlsym(library, "initLibNvInferPlugins"));
  return initialise == nullptr || initialise(&Logger::instance(), "");
}

} // namespace

std::string library_version() {
  const int version = getInferLibVersion(); // 8503
  return std::to_string(version / 1000) + "." + std::to_string(version / 100 % 10) + "." +
         std::to_string(version % 100);
}

#else

namespace {

int library_major() {
  return getInferLibMajorVersion();
}

bool load_plugin_library(const std::filesystem::path& place) {
  return getPluginRegistry()->loadLibrary(place.c_str()) != nullptr;
}

} // namespace

std::string library_version() {
  return std::to_string(getInferLibMajorVersion()) + "." + std::to_string(getInferLibMinorVersion()) + "." +
         std::to_string(getInferLibPatchVersion()) + "." + std::to_string(getInferLibBuildVersion());
}

#endif

Logger& Logger::instance() {
  static Logger logger;
  return logger;
}

void Logger::log(Severity severity, const char* text) noexcept {
  if (severity > Severity::kWARNING || text == nullptr)
    return;
  // These accompany every error on a machine without a driver.
  if (std::strstr(text, "checkMacros.cpp::catchCudaError") || std::strstr(text, "Thread context has not been set!"))
    return;
  try {
    const std::lock_guard<std::mutex> held(lock_);
    if (lines_.size() < kept_lines && std::find(lines_.begin(), lines_.end(), text) == lines_.end())
      lines_.emplace_back(text);
  } catch (...) { // an error message that does not fit into memory is not worth a crash
  }
}

std::string Logger::taken() {
  const std::lock_guard<std::mutex> held(lock_);
  std::string text;
  for (const std::string& line : lines_)
    text += (text.empty() ? "" : "; ") + line;
  lines_.clear();
  return text.empty() ? "TensorRT gave no reason" : text;
}

std::optional<int> device_of(const std::string& device) {
  const int number = device_number(device).value_or(0);
  return number < 0 ? std::nullopt : std::optional(number);
}

std::string refusal(const BundleFile& file, int device) {
  if (!file.engine)
    return "'" + file.path + "' has no facts in detrt.json; build the bundle again with detrt build";
  const EngineFacts& facts = *file.engine;
  if (facts.target != target)
    return "'" + file.path + "' was built for the target " + facts.target + ", this libdetrt is linked with " + library_name +
           "; build one with: detrt build MODEL -o BUNDLE --target " + target;
  if (const std::string why = version_refusal(file, library_version()); !why.empty())
    return why;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    return std::string("no CUDA device was found (") +
           (status == cudaSuccess ? "none is there" : cudaGetErrorString(status)) +
           "); run it on a machine with an NVIDIA GPU and its driver, or run the bundle on the CPU with another "
           "backend";
  }
  if (device >= count)
    return "there is no device cuda:" + std::to_string(device) + ", only " + std::to_string(count) +
           " GPUs; count from 0";
  cudaDeviceProp gpu{};
  if (const cudaError_t asked = cudaGetDeviceProperties(&gpu, device); asked != cudaSuccess)
    return std::string("device cuda:") + std::to_string(device) + " does not answer: " + cudaGetErrorString(asked);
  return gpu_refusal(file, 10 * gpu.major + gpu.minor, gpu.name);
}

void load_plugins(const std::vector<std::string>& paths) {
  if (paths.empty())
    return;
  if (DETRT_IS_RTX)
    throw Error(
        ErrorKind::usage,
        "TensorRT-RTX has no plugin layers; leave the plugin libraries out, and build the engine from a graph of "
        "standard operators (--msda gather)");
  static std::mutex lock;
  static std::set<std::filesystem::path> loaded;
  const std::lock_guard<std::mutex> held(lock);
  for (const std::string& path : paths) {
    std::error_code failed;
    const std::filesystem::path place = std::filesystem::canonical(path, failed);
    if (failed || !std::filesystem::is_regular_file(place))
      throw Error(ErrorKind::usage,
                  "there is no plugin library '" + path + "'; build one with cmake -S cpp/plugin, or check the path");
    if (loaded.count(place))
      continue;
    if (!load_plugin_library(place)) {
      const std::string reason = Logger::instance().taken();
      // Another copy of the library, or the program around, may have registered its creators before.
      if (reason.find("exists already") == std::string::npos)
        throw Error(ErrorKind::session, "the plugin library '" + path + "' was not loaded: " + reason +
                                            ". It must be built against the headers of " + library_name + " " +
                                            library_version());
    }
    loaded.insert(place);
  }
}

std::unique_ptr<nvinfer1::IRuntime> make_runtime() {
  if (!DETRT_IS_RTX && library_major() != NV_TENSORRT_MAJOR)
    throw Error(ErrorKind::session, "libdetrt was built with the headers of TensorRT " +
                                        std::to_string(NV_TENSORRT_MAJOR) + " and found the library of " +
                                        library_version() + "; build it again with -DTENSORRT_INCLUDE_DIR= of that");
  // The version of the library, not of the headers: they may differ in the minor version, and do for TensorRT-RTX.
  std::unique_ptr<nvinfer1::IRuntime> runtime(
      static_cast<nvinfer1::IRuntime*>(createInferRuntime_INTERNAL(&Logger::instance(), getInferLibVersion())));
  if (!runtime)
    throw Error(ErrorKind::session, std::string(library_name) + " cannot start: " + Logger::instance().taken());
  return runtime;
}

std::unique_ptr<nvinfer1::ICudaEngine> open_engine(nvinfer1::IRuntime& runtime, const std::filesystem::path& path,
                                                   [[maybe_unused]] bool version_compatible) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::vector<char> bytes;
  if (file) {
    bytes.resize(static_cast<std::size_t>(file.tellg()));
    file.seekg(0);
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  if (!file)
    throw Error(ErrorKind::session, "'" + path.string() + "' cannot be read");
#if NV_TENSORRT_MAJOR > 8 || (NV_TENSORRT_MAJOR == 8 && NV_TENSORRT_MINOR >= 6)
  // Version compatible engines bring host code of their own.
  if (version_compatible)
    runtime.setEngineHostCodeAllowed(true);
#endif
  std::unique_ptr<nvinfer1::ICudaEngine> engine(runtime.deserializeCudaEngine(bytes.data(), bytes.size()));
  if (!engine) {
    const std::string reason = Logger::instance().taken();
    const bool plugin = reason.find("lugin") != std::string::npos;
    throw Error(ErrorKind::session,
                "'" + path.string() + "' was not opened by " + library_name + " " + library_version() + ": " + reason +
                    (plugin ? "; give its plugin library with --plugin" : "; build the engine again on this machine"));
  }
  return engine;
}

} // namespace detrt::tensorrt
