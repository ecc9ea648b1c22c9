#include "outputs.hpp"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <fcntl.h>
#include <unistd.h>

#include "detrt/error.hpp"

namespace fs = std::filesystem;
using detrt::Error;
using detrt::ErrorKind;

namespace {

// Whether a file that is renamed to `path` would replace what programs share: a device, a named pipe, /dev/stdout.
bool is_stream(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (error || !fs::exists(status) || fs::is_directory(status))
    return false;
  const fs::path link = fs::is_symlink(path, error) ? fs::read_symlink(path, error) : fs::path();
  const fs::path folder = fs::weakly_canonical(fs::absolute(path).parent_path(), error);
  return !fs::is_regular_file(status) || link.string().rfind("/proc/", 0) == 0 || folder.string().rfind("/proc", 0) == 0;
}

std::string start_of(const fs::path& path, std::size_t most) {
  std::ifstream file(path, std::ios::binary);
  std::string text(most, '\0');
  file.read(text.data(), static_cast<std::streamsize>(most));
  text.resize(static_cast<std::size_t>(file.gcount()));
  return text;
}

// Whether an existing file belongs to a bundle: its manifest, or what that lists.
bool is_part(const fs::path& bundle, const fs::path& file) {
  std::error_code error;
  const fs::path folder = fs::canonical(bundle, error), place = fs::canonical(file, error);
  const std::string name = place.lexically_relative(folder).generic_string();
  if (error || name.empty() || name.rfind("..", 0) == 0)
    return false;
  std::string listed = name;
  if (listed.size() > 5 && listed.substr(listed.size() - 5) == ".json") // what is said of an engine
    listed.resize(listed.size() - 5);
  constexpr std::size_t most = 64 << 20;
  return name == "detrt.json" || start_of(folder / "detrt.json", most).find(listed) != std::string::npos;
}

Error not_written(const std::string& what) {
  return {ErrorKind::output, "cannot write " + what + (errno != 0 ? std::string(": ") + std::strerror(errno) : "") +
                                 "; check the folder, its permissions and the space on the disk"};
}

} // namespace

std::string printable(const std::string& text, const std::string& keep) {
  std::string shown;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    const auto last = static_cast<unsigned char>(i + 2 < text.size() ? text[i + 2] : 0);
    std::array<char, 8> escape{};
    if (keep.find(text[i]) != std::string::npos) {
      shown += text[i];
    } else if (byte == '\n' || byte == '\r' || byte == '\t') {
      shown += byte == '\n' ? "\\n" : byte == '\r' ? "\\r" : "\\t";
    } else if (byte < 0x20 || byte == 0x7f || (byte == 0xc2 && next >= 0x80 && next <= 0x9f)) { // C0, DEL, C1
      std::snprintf(escape.data(), escape.size(), "\\x%02x", byte == 0xc2 ? next : byte);
      shown += escape.data();
      i += byte == 0xc2;
    } else if (byte == 0xe2 && ((next == 0x80 && last >= 0xa8 && last <= 0xae) || (next == 0x81 && last >= 0xa6 && last <= 0xa9))) {
      // Line separators, and characters that change the direction of writing: U+2028 to 202e, U+2066 to 2069.
      std::snprintf(escape.data(), escape.size(), "\\u%04x", 0x2000U | (next & 0x3fU) << 6U | (last & 0x3fU));
      shown += escape.data();
      i += 2;
    } else {
      shown += text[i];
    }
  }
  return shown;
}

bool same_file(const fs::path& a, const fs::path& b) {
  std::error_code error;
  if (fs::exists(a, error) && fs::exists(b, error))
    return fs::equivalent(a, b, error);
  return fs::absolute(a).lexically_normal() == fs::absolute(b).lexically_normal();
}

void refuse_replacing(const Options& options, const std::vector<fs::path>& images) {
  const fs::path path = options.json;
  std::error_code error;
  if (options.json.empty() || options.json == "-" || !fs::exists(path, error) || is_stream(path))
    return;
  std::vector<fs::path> read = images;
  read.emplace_back(options.detector.prompt);
  for (const std::string& library : options.detector.session.plugins)
    read.emplace_back(library);
  for (const fs::path& one : read)
    if (!one.empty() && same_file(path, one))
      throw Error(ErrorKind::output, "--json '" + options.json + "' would replace what is read ('" + one.string() +
                                         "'); give another output path");
  if (is_part(options.bundle, path))
    throw Error(ErrorKind::output, "--json '" + options.json + "' would replace what is read ('" + options.bundle +
                                       "'); give another output path");
  if (fs::is_regular_file(path, error) && start_of(path, 4096).find('\0') != std::string::npos)
    throw Error(ErrorKind::output, "--json would replace '" + options.json +
                                       "', which is no text; give another output path, or remove it first");
}

void open_streams() {
  constexpr std::array modes{O_WRONLY, O_RDONLY, O_WRONLY}; // writing to a closed stdout fails, as in GNU's tools
  for (int number = 0; number < 3; ++number)
    if (fcntl(number, F_GETFD) == -1 && open("/dev/null", modes[static_cast<std::size_t>(number)]) == -1)
      return;
}

void write_line(const std::string& text) {
  if (std::printf("%s\n", text.c_str()) < 0)
    throw not_written("standard output");
}

void check_stdout() {
  errno = 0;
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    throw not_written("standard output");
}

JsonLines::JsonLines(const std::string& path) : path_(path) {
  if (path_ == "-")
    return;
  std::error_code ignored;
  const fs::file_status there = fs::status(path_, ignored);
  if (there.type() == fs::file_type::none) { // such as a name that is too long
    errno = ignored.value();
    check(false);
  }
  if (fs::is_directory(there))
    throw Error(ErrorKind::output, "cannot write '" + path + "': a folder has that name; give another output path");
  errno = 0;
  if (is_stream(path_)) {
    file_.open(path_, std::ios::binary | std::ios::app);
    check(file_.good());
    return;
  }
  if (!path_.parent_path().empty())
    fs::create_directories(path_.parent_path(), ignored);
  try {
    unfinished_.emplace(path_);
  } catch (const fs::filesystem_error& failed) {
    errno = failed.code().value();
    check(false);
  }
  file_.open(unfinished_->path(), std::ios::binary);
  check(file_.good());
}

void JsonLines::write(const std::string& line) {
  errno = 0;
  if (path_ == "-") {
    check(std::printf("%s\n", line.c_str()) >= 0 && std::fflush(stdout) == 0);
    return;
  }
  file_ << line << '\n';
  if (!unfinished_)
    file_.flush();
  check(file_.good());
}

void JsonLines::finish() {
  if (path_ == "-")
    return;
  errno = 0;
  file_.close();
  check(!file_.fail());
  if (!unfinished_)
    return;
  try {
    unfinished_->finish();
  } catch (const fs::filesystem_error& failed) {
    errno = failed.code().value();
    check(false);
  }
}

void JsonLines::check(bool ok) const {
  if (!ok)
    throw not_written(path_ == "-" ? "standard output" : "'" + path_.string() + "'");
}
