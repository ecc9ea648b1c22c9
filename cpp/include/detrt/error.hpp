// Errors of libdetrt: a message says what was wrong, what was got, what is allowed and what to do next.
#pragma once

#include <stdexcept>
#include <string>

namespace detrt {

// Kind of an error. All of them end detrt-run with exit code 2.
enum class ErrorKind { spec, image, session, prompt, output, usage };

// The one exception that leaves public functions for bad input; anything else is a bug.
class Error : public std::runtime_error {
public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

private:
  ErrorKind kind_;
};

} // namespace detrt
