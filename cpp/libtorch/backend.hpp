// The libtorch backend: runs the package of `detrt build --target inductor` on a CPU or a GPU.
#pragma once

#include "detrt/session.hpp"

namespace detrt {

const Backend& libtorch_backend();

} // namespace detrt
