// Text as UTF-8.
#pragma once

#include <cstddef>
#include <string>

namespace detrt {

// Bytes of the character that starts at `at`; 0 if they are not UTF-8.
std::size_t utf8_length(const std::string& text, std::size_t at);
// The text between quotes, escaped.
std::string json_text(const std::string& text);

} // namespace detrt
