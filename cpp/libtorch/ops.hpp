// Operators of GPU packages that PyTorch does not have.
#pragma once

namespace detrt::libtorch {

void register_ops(); // once per process, before a package is opened

} // namespace detrt::libtorch
