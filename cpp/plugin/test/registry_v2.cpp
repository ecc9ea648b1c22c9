// Whether a real TensorRT 8 knows the layer once the library is opened: plugin_registry LIBNVINFER LIBRARY. Needs no
// GPU.
#include <cstdio>

#include <NvInferRuntime.h>
#include <dlfcn.h>

using namespace nvinfer1;

int main(int argc, char** argv) {
  if (argc != 3) {
    std::printf("usage: plugin_registry LIBNVINFER LIBRARY\n");
    return 2;
  }
  void* const tensorrt = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  const auto registry =
      tensorrt ? reinterpret_cast<IPluginRegistry* (*)()>(dlsym(tensorrt, "getPluginRegistry")) : nullptr;
  if (registry == nullptr) {
    std::printf("WRONG '%s' cannot be loaded: %s\n", argv[1], dlerror());
    return 1;
  }
  const auto creator = [&] { return registry()->getPluginCreator("MSDeformAttn", "1", "detrt"); };
  const bool before = creator() != nullptr;
  if (dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL) == nullptr || before || creator() == nullptr) {
    std::printf("WRONG the creator is %s\n", before ? "there before the library" : "not registered");
    return 1;
  }
  const std::int32_t heads = 8, dim = 32, discrete = 0, points[] = {4, 4};
  const PluginField fields[] = {{"heads", &heads, PluginFieldType::kINT32, 1},
                                {"head_dim", &dim, PluginFieldType::kINT32, 1},
                                {"points_per_level", points, PluginFieldType::kINT32, 2},
                                {"discrete", &discrete, PluginFieldType::kINT32, 1}};
  const PluginFieldCollection collection{4, fields};
  IPluginV2* const plugin = creator()->createPlugin("layer", &collection);
  if (plugin == nullptr) {
    std::printf("WRONG no layer was made\n");
    return 1;
  }
  plugin->destroy();
  std::printf("registered\n");
  return 0;
}
