// The ONNX Runtime backend: runs the ONNX file of a bundle.
#pragma once

#include "detrt/session.hpp"

namespace detrt {

const Backend& onnxruntime_backend();

} // namespace detrt
