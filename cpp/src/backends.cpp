// The backends that are compiled in, best first.
#include "detrt/session.hpp"

#ifdef DETRT_WITH_TENSORRT
#include "tensorrt/backend.hpp"
#endif
#ifdef DETRT_WITH_LIBTORCH
#include "libtorch/backend.hpp"
#endif
#ifdef DETRT_WITH_OPENVINO
#include "openvino/backend.hpp"
#endif
#ifdef DETRT_WITH_ONNXRUNTIME
#include "onnxruntime/backend.hpp"
#endif

namespace detrt {

const std::vector<Backend>& backends() {
  static const std::vector<Backend> rows{
#ifdef DETRT_WITH_TENSORRT
      tensorrt_backend(),
#endif
#ifdef DETRT_WITH_LIBTORCH
      libtorch_backend(),
#endif
#ifdef DETRT_WITH_OPENVINO
      openvino_backend(),
#endif
#ifdef DETRT_WITH_ONNXRUNTIME
      onnxruntime_backend(),
#endif
  };
  return rows;
}

} // namespace detrt
