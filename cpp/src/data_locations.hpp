// Which files an ONNX file keeps values in, read from its bytes; see src/detrt/graph/external.py.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace detrt {

// Names, relative to the folder of the file, in subgraphs and functions too. Throws Error (spec): no ONNX file, or a damaged one.
std::vector<std::string> data_locations(const std::filesystem::path& path);
// The same of the content of a file. name: of the file, for messages.
std::vector<std::string> data_locations(std::string_view content, const std::string& name);

} // namespace detrt
