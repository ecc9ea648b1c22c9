// Operators of packages for a GPU that PyTorch itself does not have.
#pragma once

namespace detrt::libtorch {

void register_ops(); // once a process, before a package is opened

} // namespace detrt::libtorch
