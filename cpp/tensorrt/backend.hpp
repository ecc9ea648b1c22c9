// The TensorRT backend: runs the engine of a bundle with TensorRT 10.3 and newer, 11, or TensorRT-RTX.
#pragma once

#include "detrt/session.hpp"

namespace detrt {

const Backend& tensorrt_backend();

} // namespace detrt
