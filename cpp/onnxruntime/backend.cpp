#include "backend.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <onnxruntime_c_api.h>

#include "detrt/error.hpp"

namespace detrt {
namespace {

const OrtApi& api() {
  // The library reports its use to its maker unless this is set before its first environment is made. A value that is there stands.
  static const OrtApi* const found =
      (setenv("ORT_DISABLE_TELEMETRY", "1", 0), OrtGetApiBase()->GetApi(ORT_API_VERSION));
  if (found == nullptr)
    throw Error(ErrorKind::session, std::string("libonnxruntime is version ") + OrtGetApiBase()->GetVersionString() +
                                        ", older than the headers that libdetrt was built with; use a newer library");
  return *found;
}

void check(OrtStatus* status, const char* what) {
  if (status == nullptr)
    return;
  const std::unique_ptr<OrtStatus, void (*)(OrtStatus*)> owner(status, [](OrtStatus* s) { api().ReleaseStatus(s); });
  throw Error(ErrorKind::session, std::string("ONNX Runtime failed ") + what + ": " + api().GetErrorMessage(status));
}

template <class T> using Owner = std::unique_ptr<T, void (*)(T*)>;
Owner<OrtValue> own(OrtValue* value) {
  return {value, [](OrtValue* v) { api().ReleaseValue(v); }};
}

struct Type {
  DType ours;
  ONNXTensorElementDataType theirs;
};
constexpr Type types[] = {
    {DType::uint8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},       {DType::int32, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
    {DType::int64, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},       {DType::float16, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},
    {DType::bfloat16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}, {DType::float32, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {DType::boolean, ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL}};

ONNXTensorElementDataType type_of(DType dtype) {
  return types[static_cast<std::size_t>(dtype)].theirs;
}
DType type_of(ONNXTensorElementDataType type) {
  for (const Type& row : types)
    if (row.theirs == type)
      return row.ours;
  throw Error(ErrorKind::session, "the ONNX file has a tensor of a type that detrt does not use; export it with detrt");
}

TensorInfo info_of(const OrtTensorTypeAndShapeInfo* shape, std::string name) {
  TensorInfo info;
  info.name = std::move(name);
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::size_t rank = 0;
  check(api().GetTensorElementType(shape, &type), "to read a tensor");
  check(api().GetDimensionsCount(shape, &rank), "to read a tensor");
  info.dtype = type_of(type);
  info.shape.resize(rank);
  check(api().GetDimensions(shape, info.shape.data(), rank), "to read a tensor");
  std::vector<const char*> names(rank, nullptr);
  check(api().GetSymbolicDimensions(shape, names.data(), rank), "to read a tensor");
  for (std::size_t i = 0; i < rank; ++i)
    info.axes.emplace_back(info.shape[i] < 0 && names[i] != nullptr ? names[i] : "");
  return info;
}

// Needs the libraries of a release for GPUs beside libonnxruntime, and those of CUDA and cuDNN.
void use_gpu(OrtSessionOptions* choices, int device) {
  OrtCUDAProviderOptionsV2* made = nullptr;
  check(api().CreateCUDAProviderOptions(&made), "to use CUDA");
  const Owner<OrtCUDAProviderOptionsV2> owner(made,
                                              [](OrtCUDAProviderOptionsV2* o) { api().ReleaseCUDAProviderOptions(o); });
  const std::string number = std::to_string(device);
  const char* const keys[] = {"device_id", "use_tf32"};
  const char* const values[] = {number.c_str(), "0"};
  check(api().UpdateCUDAProviderOptions(made, keys, values, 2), "to use CUDA");
  check(api().SessionOptionsAppendExecutionProvider_CUDA_V2(choices, made), "to use CUDA");
}

class OnnxSession final : public Session {
public:
  OnnxSession(const std::filesystem::path& path, const SessionOptions& options) : device_(device_number(options.device).value_or(-1)) {
    OrtEnv* env = nullptr;
    check(api().CreateEnv(ORT_LOGGING_LEVEL_ERROR, "detrt", &env), "to start");
    env_.reset(env);
    OrtSessionOptions* choices = nullptr;
    check(api().CreateSessionOptions(&choices), "to start");
    const Owner<OrtSessionOptions> owner(choices, [](OrtSessionOptions* o) { api().ReleaseSessionOptions(o); });
    if (options.threads > 0)
      check(api().SetIntraOpNumThreads(choices, options.threads), "to set its threads");
    if (device_ >= 0)
      use_gpu(choices, device_);
    OrtSession* session = nullptr;
    check(api().CreateSession(env, path.c_str(), choices, &session), "to open the ONNX file");
    session_.reset(session);
    read_tensors(api().SessionGetInputCount, api().SessionGetInputName, api().SessionGetInputTypeInfo, inputs_);
    read_tensors(api().SessionGetOutputCount, api().SessionGetOutputName, api().SessionGetOutputTypeInfo, outputs_);
    OrtMemoryInfo* memory = nullptr;
    check(api().CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory), "to start");
    memory_.reset(memory);
  }

  const std::vector<TensorInfo>& inputs() const override { return inputs_; }
  const std::vector<TensorInfo>& outputs() const override { return outputs_; }
  std::string backend() const override {
    return device_ < 0 ? "onnxruntime-cpu" : "onnxruntime-cuda:" + std::to_string(device_);
  }
  std::optional<std::int64_t> max_batch() const override { return std::nullopt; }

  Tensors run(const Tensors& feeds) override {
    check_feeds(inputs_, feeds);
    std::vector<Owner<OrtValue>> given;
    std::vector<const OrtValue*> values;
    std::vector<const char*> names, wanted;
    for (const TensorInfo& info : inputs_) {
      const Tensor& tensor = feeds.at(info.name);
      OrtValue* value = nullptr;
      // Inputs are only read, so they are not copied.
      check(api().CreateTensorWithDataAsOrtValue(memory_.get(), const_cast<void*>(tensor.data()), tensor.bytes(),
                                                 tensor.shape().data(), tensor.shape().size(), type_of(tensor.dtype()),
                                                 &value),
            "to take an input");
      given.push_back(own(value));
      values.push_back(value);
      names.push_back(info.name.c_str());
    }
    for (const TensorInfo& info : outputs_)
      wanted.push_back(info.name.c_str());
    std::vector<OrtValue*> made(outputs_.size(), nullptr);
    OrtStatus* status = api().Run(session_.get(), nullptr, names.data(), values.data(), values.size(), wanted.data(),
                                  wanted.size(), made.data());
    std::vector<Owner<OrtValue>> owned;
    for (OrtValue* value : made)
      owned.push_back(own(value));
    check(status, "while it ran the model");
    Tensors outputs;
    for (std::size_t i = 0; i < made.size(); ++i)
      outputs.emplace(outputs_[i].name, copied(made[i]));
    return outputs;
  }

private:
  template <class Count, class Name, class Info>
  void read_tensors(Count count_of, Name name_of_tensor, Info type_of_tensor, std::vector<TensorInfo>& infos) {
    std::size_t count = 0;
    OrtAllocator* allocator = nullptr;
    check(api().GetAllocatorWithDefaultOptions(&allocator), "to start");
    check(count_of(session_.get(), &count), "to read the ONNX file");
    for (std::size_t i = 0; i < count; ++i) {
      char* name = nullptr;
      check(name_of_tensor(session_.get(), i, allocator, &name), "to read the ONNX file");
      const std::string text(name);
      check(api().AllocatorFree(allocator, name), "to read the ONNX file");
      OrtTypeInfo* type = nullptr;
      check(type_of_tensor(session_.get(), i, &type), "to read the ONNX file");
      const Owner<OrtTypeInfo> owner(type, [](OrtTypeInfo* t) { api().ReleaseTypeInfo(t); });
      const OrtTensorTypeAndShapeInfo* shape = nullptr;
      check(api().CastTypeInfoToTensorInfo(type, &shape), "to read the ONNX file");
      if (shape == nullptr)
        throw Error(ErrorKind::session, "'" + text + "' of the ONNX file is no tensor; export it with detrt");
      infos.push_back(info_of(shape, text));
    }
  }

  static Tensor copied(OrtValue* value) {
    OrtTensorTypeAndShapeInfo* shape = nullptr;
    check(api().GetTensorTypeAndShape(value, &shape), "to read an output");
    const Owner<OrtTensorTypeAndShapeInfo> owner(
        shape, [](OrtTensorTypeAndShapeInfo* s) { api().ReleaseTensorTypeAndShapeInfo(s); });
    const TensorInfo info = info_of(shape, "");
    void* data = nullptr;
    check(api().GetTensorMutableData(value, &data), "to read an output");
    Tensor tensor(info.dtype, info.shape);
    if (tensor.bytes() > 0)
      std::memcpy(tensor.data(), data, tensor.bytes());
    return tensor;
  }

  int device_;
  Owner<OrtEnv> env_{nullptr, [](OrtEnv* e) { api().ReleaseEnv(e); }};
  Owner<OrtSession> session_{nullptr, [](OrtSession* s) { api().ReleaseSession(s); }};
  Owner<OrtMemoryInfo> memory_{nullptr, [](OrtMemoryInfo* m) { api().ReleaseMemoryInfo(m); }};
  std::vector<TensorInfo> inputs_, outputs_;
};

std::optional<BundleFile> choose(const Bundle& bundle, const SessionOptions& options, std::string& why) {
  if (has_tensorrt_choices(options, why))
    return std::nullopt;
  device_number(options.device); // refuses what is none
  const std::vector<BundleFile> files = bundle.of_kind("onnx");
  if (files.empty()) {
    why = "the bundle has no ONNX file, which every bundle of detrt build has; build it again";
    return std::nullopt;
  }
  return files.front();
}

std::unique_ptr<Session> open(const Bundle& bundle, const BundleFile& file, const SessionOptions& options) {
  return std::make_unique<OnnxSession>(bundle.checked_path(file), options);
}

} // namespace

const Backend& onnxruntime_backend() {
  static const Backend row{"onnxruntime", choose, open};
  return row;
}

} // namespace detrt
