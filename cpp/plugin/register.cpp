// For programs that only open plugin libraries, as Triton Inference Server does, and for TensorRT 8.5, which has no
// IPluginRegistry::loadLibrary: registers the creators when the library is opened, with the TensorRT that the program
// has loaded. loadLibrary refuses creators that exist already, so libdetrt_plugin.so for 10 and newer does without
// this.
#include <cstdint>
#include <cstring>
#include <string>

#include <dlfcn.h>
#include <link.h>

#include "node.hpp"

using detrt::plugin::Creator;

#if NV_TENSORRT_MAJOR >= 10
extern "C" Creator* const* getCreators(std::int32_t& count);
#else
extern "C" Creator* const* getPluginCreators(std::int32_t& count);
constexpr auto getCreators = getPluginCreators;
#endif

namespace {

// Triton opens its backends with RTLD_LOCAL, so that the symbols of libnvinfer are not found by name.
int find_tensorrt(dl_phdr_info* loaded, std::size_t, void* found) {
  const char* const slash = std::strrchr(loaded->dlpi_name, '/');
  const std::string name = slash ? slash + 1 : loaded->dlpi_name;
  if (name.rfind("libnvinfer.so", 0) != 0 && name.rfind("libtensorrt_rtx.so", 0) != 0)
    return 0;
  *static_cast<std::string*>(found) = loaded->dlpi_name;
  return 1;
}

__attribute__((constructor)) void register_creators() {
  std::string path;
  if (dl_iterate_phdr(find_tensorrt, &path) == 0)
    return detrt::plugin::report("no libnvinfer is loaded: open this library after TensorRT");
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  using Registry = nvinfer1::IPluginRegistry* (*)();
  const auto registry = library ? reinterpret_cast<Registry>(dlsym(library, "getPluginRegistry")) : nullptr;
  if (registry == nullptr)
    return detrt::plugin::report("'" + path + "' has no plugin registry");
  std::int32_t count = 0;
  Creator* const* const creators = getCreators(count);
  for (std::int32_t i = 0; i < count; ++i)
    if (!registry()->registerCreator(*creators[i], detrt::plugin::plugin_namespace))
      detrt::plugin::report("the plugin was not registered: another library has registered one of its name");
}

} // namespace
