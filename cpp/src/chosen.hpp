// Outputs of a session that chose among the queries on its device (`Session::run_images`), as decode() reads them.
#pragma once

#include <string>

#include "detrt/error.hpp"

namespace detrt {

// (m, 2) int64: image and query of each row of "logits" (m, columns) and "pred_boxes" (m, 4), in any order. All queries are there
// that have a score above the threshold.
inline constexpr const char* chosen_queries = "chosen_queries";

Error not_finite(const std::string& output); // NaN or infinite values

} // namespace detrt
