// What detrt-run writes: paths that replace nothing that is read, and streams that may be closed or full.
#pragma once

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "options.hpp"
#include "unfinished.hpp"

// A text for a terminal: control characters are escaped, but for those of `keep`, as in detrt.errors.printable.
std::string printable(const std::string& text, const std::string& keep = "");

bool same_file(const std::filesystem::path& a, const std::filesystem::path& b);

// Compares the file that is written with the images, the bundle and the prompt. Throws detrt::Error (output).
void refuse_replacing(const Options& options, const std::vector<std::filesystem::path>& images);

// Gives streams that the caller has closed a descriptor that the next file cannot take.
void open_streams();

// A line on stdout, and whether all lines got there. Throw detrt::Error (output).
void write_line(const std::string& text);
void check_stdout();

// JSON lines to stdout, to a device or a pipe as they come, or to a file that appears at the end.
class JsonLines {
public:
  explicit JsonLines(const std::string& path);
  JsonLines(const JsonLines&) = delete;
  JsonLines& operator=(const JsonLines&) = delete;
  ~JsonLines() = default;

  void write(const std::string& line);
  void finish();

private:
  void check(bool ok) const;

  std::filesystem::path path_;
  std::optional<detrt::Unfinished> unfinished_;
  std::ofstream file_;
};
