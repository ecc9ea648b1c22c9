// The ONNX Runtime back end: runs the ONNX file that every bundle holds, on the CPU.
#pragma once

#include "detrt/session.hpp"

namespace detrt {

const Backend& onnxruntime_backend();

} // namespace detrt
