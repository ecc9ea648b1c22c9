// The OpenVINO backend: runs the OpenVINO model of a bundle.
#pragma once

#include "detrt/session.hpp"

namespace detrt {

const Backend& openvino_backend();

} // namespace detrt
