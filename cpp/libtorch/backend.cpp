#include "backend.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <sstream>

#include "detrt/error.hpp"
#include "package.hpp"

namespace detrt {
namespace {

constexpr const char* kind = "inductor";
constexpr const char* build_for_gpu = "; build one with: detrt build MODEL -o BUNDLE --target inductor --device cuda --form aoti";
constexpr const char* build_for_cpu = "; build one with: detrt build MODEL -o BUNDLE --target inductor";

// The facts of a package say what it was compiled for: no compute capability means the CPU. Without facts its name
// does.
bool for_gpu(const BundleFile& file) {
  return file.engine ? !file.engine->compute_capabilities.empty() : file.path.find("-cpu") == std::string::npos;
}

std::string capabilities(const BundleFile& file) {
  std::string text;
  for (int value : file.engine ? file.engine->compute_capabilities : std::vector<int>{})
    text += (text.empty() ? "compute capability " : ", ") + std::to_string(value);
  return text.empty() ? "another GPU" : text;
}

// An instruction set that the package may use and this CPU has not: it would end the process. Empty where there is none, or
// the system names none.
std::string missing_flag(const BundleFile& file) {
  std::ifstream facts("/proc/cpuinfo");
  for (std::string line; std::getline(facts, line);) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) // x86, ARM
      continue;
    std::istringstream words(line.substr(std::min(line.find(':'), line.size() - 1) + 1));
    const std::set<std::string> has{std::istream_iterator<std::string>(words), {}};
    for (const std::string& flag : file.engine ? file.engine->cpu_flags : std::vector<std::string>{})
      if (has.find(flag) == has.end())
        return flag;
    break;
  }
  return "";
}

std::optional<BundleFile> choose(const Bundle& bundle, const SessionOptions& options, std::string& why) {
  if (has_tensorrt_choices(options, why))
    return std::nullopt;
  std::vector<BundleFile> files = bundle.of_kind(kind);
  if (files.empty()) {
    why = std::string("the bundle has no compiled package") + build_for_cpu + "; for a GPU with --device cuda --form aoti";
    return std::nullopt;
  }
  if (bundle.spec().text) {
    why = "compiled packages of models that take a prompt run in Python only; here their TensorRT engine or ONNX file "
          "does";
    return std::nullopt;
  }
  files.erase(std::remove_if(files.begin(), files.end(),
                             [](const BundleFile& file) { return file.engine && file.engine->format == "artifact"; }),
              files.end());
  if (files.empty()) {
    why = "the bundle's compiled package is of the form that only Python opens; build it with --target inductor --form "
          "aoti";
    return std::nullopt;
  }
  std::string missing;
  files.erase(std::remove_if(files.begin(), files.end(),
                             [&](const BundleFile& file) {
                               const std::string flag = missing_flag(file);
                               missing = flag.empty() ? missing : flag;
                               return !flag.empty();
                             }),
              files.end());
  if (files.empty()) {
    why = "the package was compiled for a CPU with " + missing +
          ", which this one has not; compile it here with detrt build --target inductor";
    return std::nullopt;
  }
  const std::optional<int> device = device_number(options.device);
  const int gpus = libtorch::gpu_count();
  if (device && *device >= gpus && *device >= 0) {
    why = "PyTorch sees " + std::to_string(gpus) + " GPUs here; got device " + options.device + "; run it with --device cpu";
    return std::nullopt;
  }
  if (device != -1 && gpus > 0) {
    const int has = libtorch::compute_capability(device.value_or(0));
    for (const BundleFile& file : files) {
      const auto& built = file.engine ? file.engine->compute_capabilities : std::vector<int>{};
      if (for_gpu(file) && (has == 0 || built.empty() || std::find(built.begin(), built.end(), has) != built.end()))
        return file;
      if (for_gpu(file))
        why = "the package is for " + capabilities(file) + ", this GPU has " + std::to_string(has) + build_for_gpu;
    }
    if (device) {
      if (why.empty())
        why = std::string("the bundle has no package for a GPU") + build_for_gpu;
      return std::nullopt;
    }
  }
  for (const BundleFile& file : files)
    if (!for_gpu(file))
      return file;
  why = "the package is for " + capabilities(files.front()) + ", and PyTorch sees no GPU here" + build_for_cpu;
  return std::nullopt;
}

class TorchSession final : public Session {
public:
  TorchSession(const Bundle& bundle, const BundleFile& file, const SessionOptions& options)
      : device_(for_gpu(file) ? device_number(options.device).value_or(0) : -1) {
    if (!file.engine || file.engine->inputs.empty() || file.engine->outputs.empty())
      // Without them a size that the package was not compiled for would not be detected.
      throw Error(ErrorKind::session, "the manifest does not say which tensors '" + file.path +
                                          "' takes; build the bundle again with detrt build --target inductor");
    inputs_ = file.engine->inputs;
    outputs_ = file.engine->outputs;
    profile_ = file.engine->profile;
    const std::string has = libtorch::torch_version(), built = file.engine->runtime_version;
    // A package is machine code for one libtorch version: another one may load it and return wrong results.
    if (has.substr(0, has.find('+')) != built.substr(0, built.find('+')))
      throw Error(ErrorKind::session, "'" + file.path + "' was compiled by PyTorch " + built +
                                          ", libdetrt was built with " + has +
                                          "; compile it again with detrt build --target inductor, or build libdetrt " +
                                          "with that PyTorch");
    const std::filesystem::path path = bundle.checked_path(file);
    if (options.threads > 0)
      libtorch::set_threads(options.threads);
    require_trust(bundle, file, "machine code of PyTorch's compiler", options);
    package_ = libtorch::open_package(path, device_, file.engine->precision == "tf32");
  }

  const std::vector<TensorInfo>& inputs() const override { return inputs_; }
  const std::vector<TensorInfo>& outputs() const override { return outputs_; }
  std::string backend() const override {
    return device_ < 0 ? "libtorch-cpu" : "libtorch-cuda:" + std::to_string(device_);
  }

  std::optional<std::int64_t> max_batch() const override {
    const auto row = profile_.find("pixel_values");
    if (row == profile_.end() || row->second.max.empty())
      return std::nullopt;
    return row->second.max.front();
  }

  std::optional<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>>
  limits(const std::string& input) const override {
    const auto row = profile_.find(input);
    if (row == profile_.end())
      return std::nullopt;
    return std::pair(row->second.min, row->second.max);
  }

  Tensors run(const Tensors& feeds) override {
    check_feeds(inputs_, feeds);
    std::vector<const Tensor*> given;
    for (const TensorInfo& info : inputs_) {
      const Tensor& tensor = feeds.at(info.name);
      check_profile(info.name, tensor.shape());
      given.push_back(&tensor);
    }
    std::vector<Tensor> made;
    {
      const std::lock_guard<std::mutex> one_at_a_time(running_);
      made = package_->run(given);
    }
    if (made.size() != outputs_.size())
      throw Error(ErrorKind::session, "the model returned " + std::to_string(made.size()) +
                                          " tensors, its spec promises " + std::to_string(outputs_.size()) +
                                          "; build the bundle again with detrt build");
    Tensors outputs;
    for (std::size_t i = 0; i < made.size(); ++i)
      outputs.emplace(outputs_[i].name, std::move(made[i]));
    return outputs;
  }

private:
  void check_profile(const std::string& name, const std::vector<std::int64_t>& shape) const {
    const auto row = profile_.find(name);
    if (row == profile_.end())
      return;
    const Profile& range = row->second;
    for (std::size_t i = 0; i < shape.size() && i < range.min.size() && i < range.max.size(); ++i)
      if (shape[i] < range.min[i] || shape[i] > range.max[i])
        throw Error(ErrorKind::session, "input '" + name + "' has shape " + shape_text(shape) +
                                            "; this package takes from " + shape_text(range.min) + " to " +
                                            shape_text(range.max));
  }

  int device_;
  std::vector<TensorInfo> inputs_, outputs_;
  std::map<std::string, Profile> profile_;
  std::unique_ptr<libtorch::Package> package_;
  std::mutex running_;
};

std::unique_ptr<Session> open(const Bundle& bundle, const BundleFile& file, const SessionOptions& options) {
  return std::make_unique<TorchSession>(bundle, file, options);
}

} // namespace

const Backend& libtorch_backend() {
  static const Backend row{"libtorch", choose, open};
  return row;
}

} // namespace detrt
