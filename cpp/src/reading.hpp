// Reading of common parts of detrt.json. Includes nlohmann/json, so include it sparingly.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "detrt/spec.hpp"

namespace detrt {

ModelSpec read_spec(const nlohmann::json& json); // throws Error (spec)

} // namespace detrt
