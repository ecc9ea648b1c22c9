// Drives the plugin library as TensorRT does, without TensorRT: plugin_harness LIBRARY [--seed N] [--large].
// Everything but enqueue runs without a GPU; with one, enqueue too, compared with float64. Exit code 1 where something
// is wrong. The last line says what ran.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <NvInferRuntime.h>
#include <dlfcn.h>

#include "harness.hpp"

using namespace detrt::plugin::test;

namespace {

class Logger final : public ILogger {
public:
  void log(Severity, const char* text) noexcept override { last = text; }
  std::string last;
} logger;

class Finder final : public ILoggerFinder {
public:
  ILogger* findLogger() override { return &logger; }
} finder;

IPluginV3* create(IPluginCreatorV3One& creator, const Case& c, TensorRTPhase phase) {
  const std::int32_t heads = static_cast<std::int32_t>(c.heads), dim = static_cast<std::int32_t>(c.dim),
                     discrete = c.discrete;
  const std::vector<PluginField> fields{
      {"heads", &heads, PluginFieldType::kINT32, 1},
      {"head_dim", &dim, PluginFieldType::kINT32, 1},
      {"points_per_level", c.points.data(), PluginFieldType::kINT32, static_cast<std::int32_t>(c.points.size())},
      {"discrete", &discrete, PluginFieldType::kINT32, 1},
      {"of another version", nullptr, PluginFieldType::kCHAR, 0}};
  const PluginFieldCollection collection{static_cast<std::int32_t>(fields.size()), fields.data()};
  return creator.createPlugin(c.name.c_str(), &collection, phase);
}

template <class T> T* capability(IPluginV3* plugin, PluginCapabilityType type) {
  return static_cast<T*>(plugin->getCapabilityInterface(type));
}

void creator_refuses(IPluginCreatorV3One& creator) {
  const Case good{"layer 7", 1, 8, 32, 4, {4, 4}, {4}};
  for (const Case& bad :
       {Case{"no heads", 1, 0, 32, 4, {4, 4}, {4}}, Case{"negative points", 1, 8, 32, 4, {4, 4}, {-1}},
        Case{"no levels", 1, 8, 32, 4, {}, {}}, Case{"too many points", 1, 8, 32, 4, {4, 4}, {5000}}}) {
    logger.last.clear();
    expect(create(creator, bad, TensorRTPhase::kBUILD) == nullptr, "the creator takes " + bad.name);
    expect(logger.last.find(bad.name) != std::string::npos,
           "the refusal of '" + bad.name + "' is not logged: " + logger.last);
  }
  expect(creator.createPlugin("none", nullptr, TensorRTPhase::kBUILD) == nullptr, "the creator takes no fields");
  const float heads = 8.0f;
  const PluginField field{"heads", &heads, PluginFieldType::kFLOAT32, 1};
  const PluginFieldCollection collection{1, &field};
  expect(creator.createPlugin("float heads", &collection, TensorRTPhase::kBUILD) == nullptr,
         "the creator takes heads as FP32");
  std::unique_ptr<IPluginV3> made(create(creator, good, TensorRTPhase::kBUILD));
  expect(made != nullptr, "the creator refuses a usual layer: " + logger.last);
}

// What TensorRT asks when it builds: formats, types, output shapes, with symbolic lengths.
void build_time(IPluginV3* plugin, const Case& c, FloatType type, FloatType weights_type) {
  auto* build = capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
  const Tensors symbolic = tensors_of(c, type, weights_type, -1, -1, -1);
  std::vector<DynamicPluginTensorDesc> all = symbolic.dynamic();
  expect(build->getNbOutputs() == 1, "number of outputs");
  for (std::int32_t i = 0; i < 5; ++i)
    expect(build->supportsFormatCombination(i, all.data(), 4, 1),
           c.name + ": tensor " + std::to_string(i) + " is refused");
  for (std::int32_t i = 0; i < 5; ++i) {
    std::vector<DynamicPluginTensorDesc> bad = all;
    bad[static_cast<std::size_t>(i)].desc.format = TensorFormat::kCHW32;
    expect(!build->supportsFormatCombination(i, bad.data(), 4, 1),
           "packed channels are taken for tensor " + std::to_string(i));
    bad = all;
    bad[static_cast<std::size_t>(i)].desc.type = i == 2 ? DataType::kHALF : i == 1 ? DataType::kFLOAT : DataType::kINT8;
    expect(!build->supportsFormatCombination(i, bad.data(), 4, 1),
           "a wrong type is taken for tensor " + std::to_string(i));
  }
  const DataType types[] = {all[0].desc.type, all[1].desc.type, all[2].desc.type, all[3].desc.type};
  DataType out_type = DataType::kINT8;
  expect(build->getOutputDataTypes(&out_type, 1, types, 4) == 0 && out_type == type_of(type), "type of the output");
  expect(build->configurePlugin(all.data(), 4, all.data() + 4, 1) == 0, c.name + ": configurePlugin: " + logger.last);
  Builder builder;
  std::vector<std::unique_ptr<Length>> lengths;
  std::vector<DimsExprs> shapes(4);
  for (std::size_t i = 0; i < 4; ++i) {
    shapes[i].nbDims = all[i].desc.dims.nbDims;
    for (std::int32_t axis = 0; axis < shapes[i].nbDims; ++axis) {
      lengths.push_back(std::make_unique<Length>(all[i].desc.dims.d[axis]));
      shapes[i].d[axis] = lengths.back().get();
    }
  }
  DimsExprs out{};
  expect(build->getOutputShapes(shapes.data(), 4, nullptr, 0, &out, 1, builder) == 0 && out.nbDims == 3 &&
             out.d[0] == shapes[0].d[0] && out.d[1] == shapes[2].d[1] && out.d[2]->isConstant() &&
             out.d[2]->getConstantValue() == c.heads * c.dim,
         c.name + ": shape of the output");
  expect(build->getWorkspaceSize(all.data(), 4, all.data() + 4, 1) == 0, "workspace");
  std::vector<DynamicPluginTensorDesc> bad = all;
  bad[0].desc.dims.d[2] = c.heads + 1;
  expect(build->configurePlugin(bad.data(), 4, bad.data() + 4, 1) != 0 &&
             logger.last.find("value has shape") != std::string::npos,
         "another number of heads is taken: " + logger.last);
}

// An engine keeps the fields and makes the layer from them again.
IPluginV3* through_the_engine(IPluginV3* plugin, IPluginCreatorV3One& creator, const std::string& name) {
  auto* runtime = capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
  const PluginFieldCollection* kept = runtime->getFieldsToSerialize();
  expect(kept != nullptr && kept->nbFields == 4, "serialised fields");
  std::vector<std::vector<std::int32_t>> bytes; // as read from a file: other addresses
  std::vector<PluginField> fields;
  for (std::int32_t i = 0; i < kept->nbFields; ++i) {
    const PluginField& field = kept->fields[i];
    expect(field.type == PluginFieldType::kINT32, std::string("type of the field ") + field.name);
    const auto* data = static_cast<const std::int32_t*>(field.data);
    bytes.emplace_back(data, data + field.length);
  }
  for (std::int32_t i = 0; i < kept->nbFields; ++i)
    fields.emplace_back(kept->fields[i].name, bytes[static_cast<std::size_t>(i)].data(), kept->fields[i].type,
                        kept->fields[i].length);
  const PluginFieldCollection collection{static_cast<std::int32_t>(fields.size()), fields.data()};
  return creator.createPlugin(name.c_str(), &collection, TensorRTPhase::kRUNTIME);
}

void run_time(IPluginV3* plugin, const Case& c, FloatType type, FloatType weights_type, unsigned seed, bool gpu) {
  std::unique_ptr<IPluginV3> attached(
      capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME)->attachToContext(nullptr));
  expect(attached != nullptr && attached.get() != plugin, "attachToContext");
  auto* runtime = capability<IPluginV3OneRuntime>(attached.get(), PluginCapabilityType::kRUNTIME);
  const Tensors real = tensors_of(c, type, weights_type, c.batch, c.tokens(), c.queries);
  expect(runtime->onShapeChange(real.in.data(), 4, real.out.data(), 1) == 0,
         c.name + ": onShapeChange: " + logger.last);
  std::vector<PluginTensorDesc> bad = real.in;
  bad[3].dims.d[3] += 1;
  expect(runtime->onShapeChange(bad.data(), 4, real.out.data(), 1) != 0, "one weight too many is taken");
  if (!gpu)
    return;
  run_on_gpu(c, type, weights_type, seed, [&](const void* const* inputs, void* const* outputs, cudaStream_t stream) {
    expect(runtime->enqueue(real.in.data(), real.out.data(), inputs, outputs, nullptr, stream) == 0,
           c.name + ": enqueue: " + logger.last);
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
  const auto set_finder = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"));
  const auto get_creators =
      reinterpret_cast<IPluginCreatorInterface* const* (*)(std::int32_t&)>(dlsym(library, "getCreators"));
  if (!set_finder || !get_creators) {
    std::printf("WRONG the library has no setLoggerFinder or getCreators\n");
    return 1;
  }
  set_finder(&finder);
  std::int32_t count = 0;
  IPluginCreatorInterface* const* creators = get_creators(count);
  expect(count == 1, "number of creators");
  expect(std::string(creators[0]->getInterfaceInfo().kind) == "PLUGIN CREATOR_V3ONE", "kind of the creator");
  auto& creator = *static_cast<IPluginCreatorV3One*>(creators[0]);
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
    for (const FloatType type : {FloatType::fp32, FloatType::fp16, FloatType::bf16})
      for (const FloatType weights : {FloatType::fp32, type}) {
        std::unique_ptr<IPluginV3> first(create(creator, c, TensorRTPhase::kBUILD));
        if (!first) {
          expect(false, c.name + " is refused: " + logger.last);
          continue;
        }
        std::unique_ptr<IPluginV3> plugin(first->clone());
        first.reset(); // a copy must not need its original
        auto* core = capability<IPluginV3OneCore>(plugin.get(), PluginCapabilityType::kCORE);
        expect(std::string(core->getPluginName()) == creator.getPluginName() &&
                   std::string(core->getPluginNamespace()) == "detrt",
               "core");
        build_time(plugin.get(), c, type, weights);
        std::unique_ptr<IPluginV3> opened(through_the_engine(plugin.get(), creator, c.name));
        plugin.reset();
        expect(opened != nullptr, c.name + ": not made again from its fields");
        if (opened)
          run_time(opened.get(), c, type, weights, seed++, gpu);
        if (type == FloatType::fp32)
          break;
      }
  std::printf("headers of TensorRT %d.%d; %d checks, %d wrong; enqueue %s\n", NV_TENSORRT_MAJOR, NV_TENSORRT_MINOR,
              checks, wrong, gpu ? "ran on the GPU" : "did not run: no CUDA device");
  return wrong != 0;
}
