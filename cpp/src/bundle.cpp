#include "detrt/bundle.hpp"

#include <algorithm>
#include <fstream>
#include <memory>
#include <sstream>

#include <openssl/evp.h>

#include "data_locations.hpp"
#include "json_fields.hpp"
#include "reading.hpp"

namespace detrt {
namespace fs = std::filesystem;
namespace {

constexpr const char* manifest = "detrt.json";
constexpr std::uintmax_t longest_manifest = 64u << 20; // bytes; the largest real one, with 1 203 labels, has 0.1 MB
constexpr const char* again = "build the bundle again with detrt build";

std::vector<std::int64_t> shape_of(const Json& json, const std::string& where, std::vector<std::string>* axes) {
  if (!json.is_array() || json.size() > 16)
    throw Error(ErrorKind::spec, where + " must be a list of axis lengths");
  std::vector<std::int64_t> shape;
  for (const Json& side : json) {
    const bool symbolic = axes != nullptr && side.is_string();
    if (!symbolic && !side.is_number_integer())
      throw Error(ErrorKind::spec, where + " must hold integers; got " + Fields::shown(side));
    shape.push_back(symbolic ? -1 : side.get<std::int64_t>());
    if (axes != nullptr)
      axes->push_back(symbolic ? side.get<std::string>() : "");
  }
  return shape;
}

std::vector<TensorInfo> tensors_of(const Fields& fields, const char* key) {
  std::vector<TensorInfo> found;
  if (!fields.has(key))
    return found;
  if (!fields.at(key).is_array())
    fields.fail(key, "must be a list of tensors");
  for (const Json& row : fields.at(key)) {
    const Fields tensor(row, fields.where() + "." + key);
    TensorInfo info;
    info.name = tensor.text("name");
    info.dtype = dtype_of(tensor.text("dtype"));
    info.shape = shape_of(tensor.at("shape"), tensor.where() + ".shape", &info.axes);
    found.push_back(std::move(info));
  }
  return found;
}

EngineFacts engine_of(const Json& json) {
  const Fields fields(json, "engine facts:");
  EngineFacts facts;
  facts.target = fields.text("target");
  facts.runtime_version = fields.text("runtime_version");
  facts.precision = fields.text("precision");
  if (fields.has("environment") && fields.at("environment").is_object())
    for (const auto& [name, value] : fields.at("environment").items())
      if (value.is_string())
        facts.environment[name] = value.get<std::string>();
  if (fields.has("options") && fields.at("options").is_object()) {
    const Json& options = fields.at("options");
    const auto text = [&](const char* name, const std::string& otherwise) {
      const Json value = options.value(name, Json(otherwise));
      return value.is_string() ? value.get<std::string>() : otherwise;
    };
    facts.format = text("format", "");
    if (const auto flags = options.find("cpu_flags"); flags != options.end() && flags->is_array())
      for (const Json& flag : *flags)
        if (flag.is_string())
          facts.cpu_flags.push_back(flag.get<std::string>());
    facts.hardware_compatibility = text("hardware_compatibility", "none");
    facts.performance = text("performance", "");
    const Json streams = options.value("streams", Json());
    facts.streams = streams.is_number_integer() && streams > 0 && streams <= 256 ? streams.get<int>() : 0;
    facts.version_compatible = options.value("version_compatible", Json(false)) == Json(true);
  }
  const auto part = [&](const char* name, Json otherwise) { return fields.has(name) ? fields.at(name) : otherwise; };
  facts.compiled_by = Json::array({part("onnx_sha256", ""), facts.runtime_version, part("environment", Json::object()),
                                   part("options", Json::object())})
                          .dump();
  const Json& capabilities = fields.at("compute_capabilities");
  if (!capabilities.is_array())
    fields.fail("compute_capabilities", "must be a list of numbers such as 89");
  for (const Json& value : capabilities) {
    if (!value.is_number_integer() || value.get<std::int64_t>() < 1 || value.get<std::int64_t>() > 10000)
      fields.fail("compute_capabilities", "must be numbers such as 89; got " + Fields::shown(value));
    facts.compute_capabilities.push_back(value.get<int>());
  }
  const Json& profile = fields.at("profile");
  if (!profile.is_object())
    fields.fail("profile", "must be an object of input names");
  for (const auto& entry : profile.items()) {
    const Fields row(entry.value(), "engine facts: profile");
    facts.profile[entry.key()] = {shape_of(row.at("min"), "profile.min", nullptr),
                                  shape_of(row.at("opt"), "profile.opt", nullptr),
                                  shape_of(row.at("max"), "profile.max", nullptr)};
  }
  facts.inputs = tensors_of(fields, "inputs");
  facts.outputs = tensors_of(fields, "outputs");
  return facts;
}

// Paths come from a file that may have been edited: they must not leave the bundle.
void check_inside(const std::string& path, const fs::path& file) {
  const fs::path relative(path);
  bool ok = !path.empty() && !relative.is_absolute() && path.find('\0') == std::string::npos;
  for (const fs::path& part : relative)
    ok = ok && part != "..";
  if (!ok)
    throw Error(ErrorKind::spec,
                "'" + file.string() + "' names the file '" + path + "' outside its own folder; refused");
}

// Names, relative to the folder of `path`, of the files that are opened with a file without being asked for.
std::vector<std::string> opened_with(const BundleFile& file, const fs::path& path) {
  if (file.kind == "openvino" || file.kind == "text-openvino")
    return {fs::path(file.path).filename().replace_extension(".bin").string()};
  for (const char* graph : {"onnx", "onnx-fused", "text", "query"})
    if (file.kind == graph)
      return data_locations(path);
  return {};
}

} // namespace

std::string read_text(const fs::path& path, std::uintmax_t most, ErrorKind kind, const std::string& what) {
  std::error_code error;
  if (fs::file_size(path, error) > most || error)
    throw Error(kind, "'" + path.string() + "' is too large for " + what);
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file)
    throw Error(kind, "'" + path.string() + "' cannot be read; check its permissions");
  return text.str();
}

Bundle Bundle::open(const fs::path& folder) {
  const fs::path path = folder / manifest;
  std::error_code error;
  if (!fs::is_regular_file(path, error))
    throw Error(ErrorKind::spec, "'" + path.string() + "' does not exist; '" + folder.string() +
                                     "' is not a detrt bundle. Make one with: detrt build");
  return parse(read_text(path, longest_manifest, ErrorKind::spec, std::string("a manifest; ") + again), folder);
}

Bundle Bundle::parse(const std::string& json, const fs::path& folder) {
  const fs::path path = folder / manifest;
  const std::string name = "'" + path.string() + "'";
  const Json data = parse_json(json, name, ErrorKind::spec, again);
  const Fields fields(data, name);
  for (const char* key : {"schema", "spec", "provenance", "files"})
    if (!data.contains(key))
      fields.fail("has no field '" + std::string(key) + "'; " + again);
  if (data.at("schema") != schema)
    fields.fail("has schema " + Fields::shown(data.at("schema")) + "; this detrt reads " + std::to_string(schema) +
                "; build it again, or update detrt");
  if (!data.at("files").is_array())
    fields.fail("is damaged (files is not a list); " + std::string(again));
  Bundle bundle;
  bundle.folder_ = folder;
  bundle.spec_ = read_spec(data.at("spec"));
  for (const Json& row : data.at("files")) {
    const Fields entry(row, name + ": files");
    BundleFile file;
    file.kind = entry.text("kind");
    file.path = entry.text("path");
    file.sha256 = entry.text("sha256");
    file.size = static_cast<std::uint64_t>(entry.integer("size", 0, INT64_MAX));
    check_inside(file.path, path);
    if (entry.has("engine"))
      file.engine = engine_of(entry.at("engine"));
    bundle.files_.push_back(std::move(file));
  }
  return bundle;
}

std::vector<BundleFile> Bundle::of_kind(const std::string& kind) const {
  std::vector<BundleFile> found;
  for (const BundleFile& file : files_)
    if (file.kind == kind)
      found.push_back(file);
  return found;
}

fs::path Bundle::checked_path(const BundleFile& file) const {
  const fs::path path = compared(file);
  const fs::path place = fs::path(file.path).parent_path();
  for (const std::string& name : opened_with(file, path)) {
    const fs::path wanted = (place / name).lexically_normal();
    const auto listed = std::find_if(files_.begin(), files_.end(), [&](const BundleFile& other) {
      return fs::path(other.path).lexically_normal() == wanted;
    });
    if (listed == files_.end())
      throw Error(ErrorKind::spec, "'" + path.string() + "' keeps values in '" + name + "', which '" +
                                       (folder_ / manifest).string() + "' does not list; " + again);
    compared(*listed);
  }
  return path;
}

fs::path Bundle::compared(const BundleFile& file) const {
  const fs::path path = folder_ / file.path;
  std::error_code error;
  if (!fs::is_regular_file(path, error))
    throw Error(ErrorKind::spec, "'" + path.string() + "' is missing; " + again);
  const std::uintmax_t size = fs::file_size(path, error);
  if (error || size != file.size)
    throw Error(ErrorKind::spec, "'" + path.string() + "' has " + std::to_string(size) + " bytes, its manifest says " +
                                     std::to_string(file.size) + ": truncated or replaced; build it again");
  if (sha256_of(path) != file.sha256)
    throw Error(ErrorKind::spec,
                "'" + path.string() +
                    "' is not the file that was built (its SHA-256 differs from the manifest); build it again");
  return path;
}

std::string sha256_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string digest = file ? sha256_of(file) : "";
  if (digest.empty())
    throw Error(ErrorKind::spec, "'" + path.string() + "' cannot be read; check its permissions");
  return digest;
}

std::string sha256_of(std::istream& stream) {
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  bool ok = context && EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1;
  std::vector<char> block(1 << 20);
  while (ok && stream) {
    stream.read(block.data(), static_cast<std::streamsize>(block.size()));
    ok = EVP_DigestUpdate(context.get(), block.data(), static_cast<std::size_t>(stream.gcount())) == 1;
  }
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  if (!ok || !stream.eof() || EVP_DigestFinal_ex(context.get(), digest, &length) != 1)
    return "";
  std::string hex;
  for (unsigned int i = 0; i < length; ++i) {
    hex += "0123456789abcdef"[digest[i] >> 4];
    hex += "0123456789abcdef"[digest[i] & 15];
  }
  return hex;
}

} // namespace detrt
