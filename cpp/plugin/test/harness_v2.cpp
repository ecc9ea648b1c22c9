// Drives the plugin library as TensorRT 8 does, without TensorRT: plugin_harness LIBRARY [--seed N] [--large].
// Everything but enqueue runs without a GPU; with one, enqueue too, compared with float64. Exit code 1 where something
// is wrong. The last line says what ran.
#include <cstring>

#include <dlfcn.h>

#include "harness.hpp"

using namespace detrt::plugin::test;

namespace {

struct Destroy {
  void operator()(IPluginV2DynamicExt* plugin) const { plugin->destroy(); }
};
using Plugin = std::unique_ptr<IPluginV2DynamicExt, Destroy>;

Plugin owned(IPluginV2* plugin) {
  return Plugin(static_cast<IPluginV2DynamicExt*>(plugin));
}

Plugin create(IPluginCreator& creator, const Case& c) {
  const std::int32_t heads = static_cast<std::int32_t>(c.heads), dim = static_cast<std::int32_t>(c.dim),
                     discrete = c.discrete;
  const std::vector<PluginField> fields{
      {"heads", &heads, PluginFieldType::kINT32, 1},
      {"head_dim", &dim, PluginFieldType::kINT32, 1},
      {"points_per_level", c.points.data(), PluginFieldType::kINT32, static_cast<std::int32_t>(c.points.size())},
      {"discrete", &discrete, PluginFieldType::kINT32, 1},
      {"of another version", nullptr, PluginFieldType::kCHAR, 0}};
  const PluginFieldCollection collection{static_cast<std::int32_t>(fields.size()), fields.data()};
  return owned(creator.createPlugin(c.name.c_str(), &collection));
}

void creator_refuses(IPluginCreator& creator) {
  for (const Case& bad :
       {Case{"no heads", 1, 0, 32, 4, {4, 4}, {4}}, Case{"negative points", 1, 8, 32, 4, {4, 4}, {-1}},
        Case{"no levels", 1, 8, 32, 4, {}, {}}, Case{"too many points", 1, 8, 32, 4, {4, 4}, {5000}}})
    expect(create(creator, bad) == nullptr, "the creator takes " + bad.name);
  expect(creator.createPlugin("none", nullptr) == nullptr, "the creator takes no fields");
  const float heads = 8.0f;
  const PluginField field{"heads", &heads, PluginFieldType::kFLOAT32, 1};
  const PluginFieldCollection collection{1, &field};
  expect(creator.createPlugin("float heads", &collection) == nullptr, "the creator takes heads as FP32");
  const std::int32_t bytes[4] = {8, 32, 0, 4};
  expect(owned(creator.deserializePlugin("whole", bytes, sizeof bytes)) != nullptr,
         "the bytes of an engine are refused");
  expect(creator.deserializePlugin("short", bytes, sizeof bytes - 1) == nullptr, "an engine with a byte less is taken");
  expect(creator.deserializePlugin("empty", bytes, 12) == nullptr, "an engine without levels is taken");
  expect(creator.deserializePlugin("none", nullptr, 16) == nullptr, "an engine without bytes is taken");
}

// What TensorRT asks when it builds: formats, types, output shapes, with symbolic lengths.
void build_time(IPluginV2DynamicExt& plugin, const Case& c, FloatType type, FloatType weights_type) {
  const std::vector<PluginTensorDesc> all = tensors_of(c, type, weights_type, -1, -1, -1).all();
  expect(plugin.getNbOutputs() == 1, "number of outputs");
  for (std::int32_t i = 0; i < 5; ++i) {
    expect(plugin.supportsFormatCombination(i, all.data(), 4, 1),
           c.name + ": tensor " + std::to_string(i) + " is refused");
    std::vector<PluginTensorDesc> bad = all;
    bad[static_cast<std::size_t>(i)].format = TensorFormat::kCHW32;
    expect(!plugin.supportsFormatCombination(i, bad.data(), 4, 1),
           "packed channels are taken for " + std::to_string(i));
    bad = all;
    bad[static_cast<std::size_t>(i)].type = i == 2 ? DataType::kHALF : i == 1 ? DataType::kFLOAT : DataType::kINT8;
    expect(!plugin.supportsFormatCombination(i, bad.data(), 4, 1), "a wrong type is taken for " + std::to_string(i));
  }
  const DataType types[] = {all[0].type, all[1].type, all[2].type, all[3].type};
  expect(plugin.getOutputDataType(0, types, 4) == type_of(type), "type of the output");
  Builder builder;
  std::vector<std::unique_ptr<Length>> lengths;
  std::vector<DimsExprs> shapes(4);
  for (std::size_t i = 0; i < 4; ++i) {
    shapes[i].nbDims = all[i].dims.nbDims;
    for (std::int32_t axis = 0; axis < shapes[i].nbDims; ++axis) {
      lengths.push_back(std::make_unique<Length>(all[i].dims.d[axis]));
      shapes[i].d[axis] = lengths.back().get();
    }
  }
  const DimsExprs out = plugin.getOutputDimensions(0, shapes.data(), 4, builder);
  expect(out.nbDims == 3 && out.d[0] == shapes[0].d[0] && out.d[1] == shapes[2].d[1] && out.d[2]->isConstant() &&
             out.d[2]->getConstantValue() == c.heads * c.dim,
         c.name + ": shape of the output");
  expect(plugin.getOutputDimensions(0, shapes.data(), 3, builder).nbDims < 0, "three inputs are taken");
  expect(plugin.getWorkspaceSize(all.data(), 4, all.data() + 4, 1) == 0, "workspace");
}

// An engine keeps bytes and makes the layer from them again.
Plugin through_the_engine(const IPluginV2DynamicExt& plugin, IPluginCreator& creator, const std::string& name) {
  std::vector<char> bytes(plugin.getSerializationSize());
  plugin.serialize(bytes.data());
  return owned(creator.deserializePlugin(name.c_str(), bytes.data(), bytes.size()));
}

void run_time(IPluginV2DynamicExt& plugin, const Case& c, FloatType type, FloatType weights_type, unsigned seed,
              bool gpu) {
  const Tensors real = tensors_of(c, type, weights_type, c.batch, c.tokens(), c.queries);
  std::vector<PluginTensorDesc> bad = real.in;
  bad[3].dims.d[3] += 1;
  void* nothing[] = {nullptr, nullptr, nullptr, nullptr};
  expect(plugin.enqueue(bad.data(), real.out.data(), nothing, nothing, nullptr, nullptr) != 0,
         "one weight too many is taken");
  if (!gpu)
    return;
  run_on_gpu(c, type, weights_type, seed, [&](const void* const* inputs, void* const* outputs, cudaStream_t stream) {
    expect(plugin.enqueue(real.in.data(), real.out.data(), inputs, outputs, nullptr, stream) == 0,
           c.name + ": enqueue");
  });
}

} // namespace

int main(int argc, char** argv) {
  unsigned seed = 100;
  bool large = false;
  for (int i = 2; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--large"))
      large = true;
    else if (!std::strcmp(argv[i], "--seed") && i + 1 < argc)
      seed = static_cast<unsigned>(std::stoul(argv[++i]));
  }
  if (argc < 2) {
    std::printf("usage: plugin_harness LIBRARY [--seed N] [--large]\n");
    return 2;
  }
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    std::printf("WRONG the library cannot be loaded: %s\n", dlerror());
    return 1;
  }
  const auto get_creators =
      reinterpret_cast<IPluginCreator* const* (*)(std::int32_t&)>(dlsym(library, "getPluginCreators"));
  if (!get_creators) {
    std::printf("WRONG the library has no getPluginCreators\n");
    return 1;
  }
  std::int32_t count = 0;
  IPluginCreator& creator = *get_creators(count)[0];
  expect(count == 1, "number of creators");
  expect(std::string(creator.getPluginName()) == "MSDeformAttn" && std::string(creator.getPluginVersion()) == "1" &&
             std::string(creator.getPluginNamespace()) == "detrt",
         "name, version and namespace");
  expect(creator.getFieldNames()->nbFields == 4, "names of the fields");
  creator_refuses(creator);

  const bool gpu = has_gpu();
  std::vector<Case> cases = small_cases();
  if (large)
    cases.push_back({"encoder of 22 223 tokens", 1, 8, 32, 22223, coco_levels(), {4, 4, 4, 4}, Places::local});
  for (const Case& c : cases)
    for (const FloatType type : {FloatType::fp32, FloatType::fp16})
      for (const FloatType weights : {FloatType::fp32, type}) {
        Plugin first = create(creator, c);
        if (!first) {
          expect(false, c.name + " is refused");
          continue;
        }
        Plugin plugin(first->clone());
        first.reset(); // a copy must not need its original
        expect(std::string(plugin->getPluginType()) == creator.getPluginName() &&
                   std::string(plugin->getPluginNamespace()) == "detrt",
               "name of the layer");
        build_time(*plugin, c, type, weights);
        const Plugin opened = through_the_engine(*plugin, creator, c.name);
        plugin.reset();
        expect(opened != nullptr, c.name + ": not made again from its bytes");
        if (opened)
          run_time(*opened, c, type, weights, seed++, gpu);
        if (type == FloatType::fp32)
          break;
      }
  std::printf("headers of TensorRT %d.%d; %d checks, %d wrong; enqueue %s\n", NV_TENSORRT_MAJOR, NV_TENSORRT_MINOR,
              checks, wrong, gpu ? "ran on the GPU" : "did not run: no CUDA device");
  return wrong != 0;
}
