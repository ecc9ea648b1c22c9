#include "kernel_file.hpp"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <sstream>

#include "reading.hpp"
#include "unfinished.hpp"
#include "user_files.hpp"

namespace detrt {
namespace fs = std::filesystem;

fs::path kernel_file(const BundleFile& engine, const std::string& gpu) {
  const std::string chosen = variable("DETRT_RUNTIME_CACHE");
  const fs::path folder = chosen.empty() ? folder_of_user("XDG_CACHE_HOME", ".cache") : fs::path(chosen);
  if (chosen == "off" || folder.empty() || !engine.engine)
    return {};
  std::string words = gpu;
  std::transform(words.begin(), words.end(), words.begin(), [](unsigned char c) { return std::isalnum(c) ? static_cast<char>(c) : ' '; });
  std::istringstream parts(words);
  std::string name;
  for (std::string word; parts >> word;)
    name += "-" + word;
  std::istringstream compiled_by(engine.engine->compiled_by);
  return folder / (sha256_of(compiled_by).substr(0, 16) + "-" + std::to_string(engine.size) + name + ".rtxcache");
}

std::vector<char> read_kernels(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf(); // of a folder too: it cannot be read, and throws nothing
  const std::string read = file ? bytes.str() : "";
  return {read.begin(), read.end()};
}

void write_kernels(const fs::path& path, const void* data, std::size_t size) noexcept {
  try {
    fs::create_directories(path.parent_path());
    Unfinished file(path);
    std::ofstream out(file.path(), std::ios::binary);
    out.write(static_cast<const char*>(data), static_cast<std::streamsize>(size));
    out.close();
    if (out)
      file.finish();
  } catch (...) { // the next process compiles them again
  }
}

} // namespace detrt
