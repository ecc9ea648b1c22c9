// Reading of parts of detrt.json that several files share. Includes nlohmann/json, so few files do.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "detrt/spec.hpp"

namespace detrt {

ModelSpec read_spec(const nlohmann::json& json); // throws Error (spec)

} // namespace detrt
