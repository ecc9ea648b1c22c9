// Reading of detrt.json and of files like it. Includes nlohmann/json, so include it sparingly.
#pragma once

#include <cstdint>
#include <filesystem>
#include <iosfwd>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "detrt/error.hpp"
#include "detrt/spec.hpp"

namespace detrt {

// The text of a file that is there. what: what a larger one is too large for, and what to do. Throws Error of `kind`.
std::string read_text(const std::filesystem::path& path, std::uintmax_t most, ErrorKind kind, const std::string& what);
std::string sha256_of(std::istream& stream); // hex digest of what is left of it; empty where it cannot be read
ModelSpec read_spec(const nlohmann::json& json); // throws Error (spec)

} // namespace detrt
