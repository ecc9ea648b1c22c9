// The file of kernels that TensorRT-RTX compiled for an engine on a GPU, which Python and C++ share: `default_runtime_cache` in
// src/detrt/backends/tensorrt/session.py has the rule for its name.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "detrt/bundle.hpp"

namespace detrt {

// gpu: the name that CUDA gives. Empty where none is kept: DETRT_RUNTIME_CACHE=off, or a user without a home folder.
std::filesystem::path kernel_file(const BundleFile& engine, const std::string& gpu);
// Empty where it is not there, or cannot be read.
std::vector<char> read_kernels(const std::filesystem::path& path);
// Atomic; what cannot be written is left out.
void write_kernels(const std::filesystem::path& path, const void* data, std::size_t size) noexcept;

} // namespace detrt
