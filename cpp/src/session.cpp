#include "detrt/session.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <initializer_list>
#include <string_view>

#include "detrt/error.hpp"
#include "user_files.hpp"

namespace detrt {

Tensors Session::run_images(const BatchPlan&, const Tensors&, double, double&) {
  throw Error(ErrorKind::session, "the backend " + backend() + " takes tensors, not images; call run()");
}

Layouts layouts_of(const Tensors& feeds) {
  Layouts layouts;
  for (const auto& [name, tensor] : feeds)
    layouts.emplace(name, std::pair(tensor.dtype(), tensor.shape()));
  return layouts;
}

void check_feeds(const std::vector<TensorInfo>& inputs, const Tensors& feeds) {
  check_feeds(inputs, layouts_of(feeds));
}

void check_feeds(const std::vector<TensorInfo>& inputs, const Layouts& feeds) {
  std::map<std::string, std::int64_t> lengths;
  for (const TensorInfo& info : inputs) {
    const auto found = feeds.find(info.name);
    if (found == feeds.end())
      throw Error(ErrorKind::session, "the model takes the input '" + info.name + "', which is missing");
    const auto& [dtype, shape] = found->second;
    const auto wrong = [&, &given = found->second](const std::string& what) {
      return Error(ErrorKind::session, "input '" + info.name + "' must be " + name_of(info.dtype) + " " +
                                           shape_text(info.shape) + "; got " + name_of(given.first) + " " +
                                           shape_text(given.second) + what);
    };
    if (dtype != info.dtype || shape.size() != info.shape.size())
      throw wrong("");
    for (std::size_t axis = 0; axis < info.shape.size(); ++axis) {
      std::int64_t expected = info.shape[axis];
      const std::int64_t actual = shape[axis];
      if (expected < 0 && axis < info.axes.size() && !info.axes[axis].empty())
        expected = lengths.emplace(info.axes[axis], actual).first->second;
      if (expected >= 0 && expected != actual)
        throw wrong(" (axis " + std::to_string(axis) + " must be " + std::to_string(expected) + ")");
    }
  }
  for (const auto& entry : feeds) {
    bool known = false;
    for (const TensorInfo& info : inputs)
      known = known || info.name == entry.first;
    if (!known)
      throw Error(ErrorKind::session, "the model has no input '" + entry.first + "'");
  }
}

std::optional<int> device_number(const std::string& device) {
  if (device == "auto")
    return std::nullopt;
  if (device == "cpu")
    return -1;
  const std::string digits = device == "cuda" ? "0" : device.rfind("cuda:", 0) == 0 ? device.substr(5) : "";
  if (digits.empty() || digits.size() > 3 || digits.find_first_not_of("0123456789") != std::string::npos)
    throw Error(ErrorKind::usage, "device must be cpu, cuda or cuda:N; got '" + device + "'");
  return std::stoi(digits);
}

bool has_tensorrt_choices(const SessionOptions& options, std::string& why) {
  const bool has = !options.plugins.empty() || options.cuda_graph || options.contexts != 1;
  if (has)
    why = "plugins, CUDA graphs and contexts are choices for the tensorrt backend; leave them out";
  return has;
}

void require_trust(const Bundle& bundle, const BundleFile& file, const std::string& what, const SessionOptions& options) {
  std::string given = variable("DETRT_TRUST_REMOTE_CODE");
  std::transform(given.begin(), given.end(), given.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto is_one_of = [&](std::initializer_list<const char*> words) {
    return std::find(words.begin(), words.end(), given) != words.end();
  };
  const bool yes = is_one_of({"1", "true", "yes", "on"});
  if (!yes && !is_one_of({"", "0", "false", "no", "off"}))
    throw Error(ErrorKind::usage, "DETRT_TRUST_REMOTE_CODE must be 1 (code of models may run) or 0; got '" + given + "'");
  if (yes || options.trust_code)
    return;
  std::filesystem::path store = variable("DETRT_TRUSTED");
  if (store.empty())
    if (const std::filesystem::path folder = folder_of_user("XDG_DATA_HOME", ".local/share"); !folder.empty())
      store = folder / "trusted";
  std::error_code error;
  const bool digest = !file.sha256.empty() && file.sha256.find_first_not_of("0123456789abcdef") == std::string::npos;
  if (digest && !store.empty() && store != "off" && std::filesystem::is_regular_file(store / file.sha256, error))
    return;
  throw Error(ErrorKind::session, "'" + (bundle.folder() / file.path).string() + "' holds native code (" + what +
                                      "), and was not built by this user on this machine; where you trust whoever built it, add "
                                      "--trust-remote-code (SessionOptions::trust_code) or set DETRT_TRUST_REMOTE_CODE=1");
}

std::unique_ptr<Session> open_session(const Bundle& bundle, const SessionOptions& options) {
  // Each backend, the kind of its files, and what builds it in.
  struct Owner {
    std::string_view name;
    const char* kind;
    const char* choice;
  };
  static constexpr std::array<Owner, 4> owners{{{"tensorrt", "engine", "-DDETRT_TENSORRT=ON"},
                                                {"libtorch", "inductor", "-DDETRT_LIBTORCH=ON"},
                                                {"openvino", "openvino", "-DDETRT_OPENVINO=ON"},
                                                {"onnxruntime", "onnx", "-DDETRT_ONNXRUNTIME=ON"}}};
  std::string names;
  std::vector<std::string> reasons;
  for (const Backend& backend : backends()) {
    names += (names.empty() ? "" : ", ") + std::string(backend.name);
    if (options.backend != "auto" && options.backend != backend.name)
      continue;
    std::string why;
    if (const std::optional<BundleFile> file = backend.choose(bundle, options, why))
      return backend.open(bundle, *file, options);
    reasons.push_back(std::string(backend.name) + ": " + why);
  }
  if (options.backend != "auto" && reasons.empty())
    throw Error(ErrorKind::usage, "this libdetrt has no backend '" + options.backend +
                                      "'; it was built with: " + (names.empty() ? "none" : names));
  if (reasons.empty())
    throw Error(ErrorKind::session,
                "this libdetrt was built without a backend; configure it with one of -DDETRT_TENSORRT=ON, "
                "-DDETRT_LIBTORCH=ON, -DDETRT_OPENVINO=ON and -DDETRT_ONNXRUNTIME=ON");
  if (options.backend == "auto")
    for (const auto& [name, kind, choice] : owners)
      if (std::none_of(backends().begin(), backends().end(), [&](const Backend& one) { return one.name == name; }))
        for (const BundleFile& file : bundle.of_kind(kind))
          reasons.push_back(std::string(name) + ": '" + file.path + "' needs a libdetrt configured with " + choice);
  std::string list;
  for (const std::string& reason : reasons)
    list += (reasons.size() > 1 ? "\n  " : " ") + reason;
  throw Error(ErrorKind::session, "no backend can run the bundle '" + bundle.folder().string() + "' here:" + list);
}

} // namespace detrt
