#include "backend.hpp"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include <openvino/c/openvino.h>

#include "detrt/error.hpp"

namespace detrt {
namespace {

void check(ov_status_e status, const std::string& what) {
  if (status == ov_status_e::OK)
    return;
  const char* const last = ov_get_last_err_msg();
  std::string text = last != nullptr && *last != '\0' ? last : ov_get_error_info(status);
  // The lines before the last one name sources of OpenVINO.
  text.erase(text.find_last_not_of(" \n") + 1);
  throw Error(ErrorKind::session, "OpenVINO failed " + what + ": " + text.substr(text.rfind('\n') + 1));
}

template <class T> using Owner = std::unique_ptr<T, void (*)(T*)>;

struct Type {
  DType ours;
  ov_element_type_e theirs;
};
constexpr Type types[] = {{DType::uint8, ov_element_type_e::U8},     {DType::int32, ov_element_type_e::I32},
                          {DType::int64, ov_element_type_e::I64},    {DType::float16, ov_element_type_e::F16},
                          {DType::bfloat16, ov_element_type_e::BF16}, {DType::float32, ov_element_type_e::F32},
                          {DType::boolean, ov_element_type_e::BOOLEAN}};

// "cpu", "xpu:1" or "npu" as OpenVINO calls it: "CPU", "GPU.1", "NPU"; empty for a device of another backend.
std::string device_name(const std::string& device) {
  const std::size_t colon = device.find(':');
  const std::string kind = device.substr(0, colon);
  const std::string number = colon == std::string::npos ? "" : device.substr(colon + 1);
  if (kind == "xpu" && (colon == std::string::npos || !number.empty()) &&
      number.find_first_not_of("0123456789") == std::string::npos)
    return number.empty() ? "GPU" : "GPU." + number;
  return device == "auto" || device == "cpu" ? "CPU" : device == "npu" ? "NPU" : "";
}

// The name of a device that is here. Throws Error if it is not.
std::string found_device(const ov_core_t* core, const std::string& device) {
  ov_available_devices_t devices{};
  check(ov_core_get_available_devices(core, &devices), "to name its devices");
  const std::vector<std::string> here(devices.devices, devices.devices + devices.size);
  ov_available_devices_free(&devices);
  const std::string name = device_name(device), kind = name.substr(0, 3);
  const bool first = name == kind || name == "GPU.0"; // one GPU is called GPU, several are GPU.0 and GPU.1
  std::string list;
  for (const std::string& one : here) {
    if (one == name)
      return name;
    if (first && one.substr(0, 3) == kind)
      return kind;
    list += (list.empty() ? "" : ", ") + one;
  }
  throw Error(ErrorKind::session, "OpenVINO finds no device '" + device + "' here; it finds " + list +
                                      ". Install the driver of the device, or use --device cpu");
}

class OpenVinoSession final : public Session {
public:
  OpenVinoSession(const Bundle& bundle, const BundleFile& file, const SessionOptions& options) {
    if (!file.engine || file.engine->inputs.empty() || file.engine->outputs.empty())
      throw Error(ErrorKind::session, "the manifest does not say which tensors '" + file.path +
                                          "' takes; build it again with detrt build --target openvino");
    inputs_ = file.engine->inputs;
    outputs_ = file.engine->outputs;
    ov_core_t* core = nullptr;
    check(ov_core_create(&core), "to start");
    core_.reset(core);
    device_ = found_device(core, options.device);
    set("PERFORMANCE_HINT", file.engine->performance == "throughput" ? "THROUGHPUT" : "LATENCY");
    if (file.engine->streams > 0)
      set("NUM_STREAMS", std::to_string(file.engine->streams));
    set("INFERENCE_PRECISION_HINT", inference_type(file.engine->precision));
    if (device_ == "CPU") {
      const unsigned cores = std::thread::hardware_concurrency();
      set("INFERENCE_NUM_THREADS", std::to_string(options.threads > 0 ? static_cast<unsigned>(options.threads) : cores));
      // Pinned threads of several processes would share the first cores.
      set("ENABLE_CPU_PINNING", "NO");
    }
    if (const char* const folder = std::getenv("DETRT_OPENVINO_CACHE"); folder != nullptr && *folder != '\0')
      set("CACHE_DIR", folder);
    const std::filesystem::path path = bundle.checked_path(file);
    ov_compiled_model_t* model = nullptr;
    check(ov_core_compile_model_from_file(core, path.c_str(), device_.c_str(), 0, &model),
          "to open '" + path.string() + "' on " + device_);
    model_.reset(model);
  }

  const std::vector<TensorInfo>& inputs() const override { return inputs_; }
  const std::vector<TensorInfo>& outputs() const override { return outputs_; }
  std::string backend() const override {
    return std::string(device_ == "CPU" ? "openvino-cpu" : device_ == "NPU" ? "openvino-npu" : "openvino-xpu") + note_;
  }
  std::optional<std::int64_t> max_batch() const override { return std::nullopt; }

  Tensors run(const Tensors& feeds) override {
    check_feeds(inputs_, feeds);
    Request request = idle_request();
    std::vector<Owner<ov_tensor_t>> given;
    for (const TensorInfo& info : inputs_) {
      const Tensor& tensor = feeds.at(info.name);
      std::vector<std::int64_t> sides = tensor.shape();
      // Inputs are only read, so they are not copied.
      given.push_back(received("to take an input", [&](ov_tensor_t** made) {
        return ov_tensor_create_from_host_ptr(types[static_cast<std::size_t>(tensor.dtype())].theirs,
                                              {static_cast<std::int64_t>(sides.size()), sides.data()},
                                              const_cast<void*>(tensor.data()), made);
      }));
      check(ov_infer_request_set_tensor(request.get(), info.name.c_str(), given.back().get()),
            "to take the input '" + info.name + "'");
    }
    check(ov_infer_request_infer(request.get()), "while it ran the model");
    Tensors outputs;
    for (std::size_t i = 0; i < outputs_.size(); ++i)
      outputs.emplace(outputs_[i].name, copied(received("to read an output", [&](ov_tensor_t** made) {
                        return ov_infer_request_get_output_tensor_by_index(request.get(), i, made);
                      })));
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(request));
    return outputs;
  }

private:
  using Request = Owner<ov_infer_request_t>;

  // A type is always set: by itself OpenVINO computes FP32 in BF16 where a processor has it, which is another model, and it
  // emulates a type that the processor lacks, ten times slower.
  std::string inference_type(const std::string& precision) {
    const bool bf16 = precision.find("bf16") != std::string::npos;
    if (!bf16 && precision.find("fp16") == std::string::npos)
      return "f32";
    char* text = nullptr;
    check(ov_core_get_property(core_.get(), device_.c_str(), "OPTIMIZATION_CAPABILITIES", &text), "to name its types");
    const std::string capabilities = " " + std::string(text) + " ", wanted = bf16 ? "BF16" : "FP16";
    ov_free(text);
    if (capabilities.find(" " + wanted + " ") != std::string::npos)
      return bf16 ? "bf16" : "f16";
    note_ = " (in FP32: this processor has no " + wanted + ")";
    return "f32";
  }

  void set(const char* key, const std::string& value) {
    check(ov_core_set_property(core_.get(), device_.c_str(), key, value.c_str()), std::string("to set ") + key);
  }

  Request idle_request() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      Request request = std::move(idle_.back());
      idle_.pop_back();
      return request;
    }
    ov_infer_request_t* made = nullptr;
    check(ov_compiled_model_create_infer_request(model_.get(), &made), "to start");
    return {made, ov_infer_request_free};
  }

  template <class Make> static Owner<ov_tensor_t> received(const char* what, Make make) {
    ov_tensor_t* tensor = nullptr;
    check(make(&tensor), what);
    return {tensor, ov_tensor_free};
  }

  static Tensor copied(const Owner<ov_tensor_t>& value) {
    ov_element_type_e type = ov_element_type_e::DYNAMIC;
    ov_shape_t shape{};
    void* data = nullptr;
    check(ov_tensor_get_element_type(value.get(), &type), "to read an output");
    check(ov_tensor_data(value.get(), &data), "to read an output");
    check(ov_tensor_get_shape(value.get(), &shape), "to read an output");
    const std::vector<std::int64_t> sides(shape.dims, shape.dims + shape.rank);
    ov_shape_free(&shape);
    for (const Type& row : types)
      if (row.theirs == type) {
        Tensor tensor(row.ours, sides);
        if (tensor.bytes() > 0)
          std::memcpy(tensor.data(), data, tensor.bytes());
        return tensor;
      }
    throw Error(ErrorKind::session, "the OpenVINO model has an output of a type that detrt does not use; build it with detrt");
  }

  std::string device_, note_;
  std::vector<TensorInfo> inputs_, outputs_;
  Owner<ov_core_t> core_{nullptr, ov_core_free};
  Owner<ov_compiled_model_t> model_{nullptr, ov_compiled_model_free};
  std::mutex mutex_;
  std::vector<Request> idle_; // of runs that are over
};

std::optional<BundleFile> choose(const Bundle& bundle, const SessionOptions& options, std::string& why) {
  if (has_tensorrt_choices(options, why))
    return std::nullopt;
  const std::vector<BundleFile> files = bundle.of_kind("openvino");
  if (files.empty()) {
    why = "the bundle has no OpenVINO model; build one with: detrt build MODEL -o BUNDLE --target openvino";
    return std::nullopt;
  }
  if (device_name(options.device).empty()) {
    why = "OpenVINO runs on cpu, xpu, xpu:N and npu; got device " + options.device;
    return std::nullopt;
  }
  return files.front();
}

std::unique_ptr<Session> open(const Bundle& bundle, const BundleFile& file, const SessionOptions& options) {
  return std::make_unique<OpenVinoSession>(bundle, file, options);
}

} // namespace

const Backend& openvino_backend() {
  static const Backend row{"openvino", choose, open};
  return row;
}

} // namespace detrt
