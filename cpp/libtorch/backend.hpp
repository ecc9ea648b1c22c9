// The libtorch back end: runs the package that `detrt build --target inductor` compiled, on a CPU or a GPU.
#pragma once

#include "detrt/session.hpp"

namespace detrt {

const Backend& libtorch_backend();

} // namespace detrt
