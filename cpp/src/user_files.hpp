// Where detrt keeps files of the user: the rule of detrt.files.folder_of_user.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace detrt {

// Of the environment; empty where it is not set.
inline std::string variable(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

// name: of the variable for the folder of all programs, e.g. XDG_CACHE_HOME. usual: where it is otherwise, in the home folder.
// Empty for a user without a home folder.
inline std::filesystem::path folder_of_user(const char* name, const char* usual) {
  const std::string folder = variable(name), home = variable("HOME");
  if (folder.empty() && home.empty())
    return {};
  return (folder.empty() ? std::filesystem::path(home) / usual : std::filesystem::path(folder)) / "detrt";
}

} // namespace detrt
