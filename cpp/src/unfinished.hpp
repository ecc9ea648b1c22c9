// A file that has its name when it is whole: the rule of detrt.files.writing.
#pragma once

#include <cerrno>
#include <filesystem>
#include <functional>
#include <string>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace detrt {

// An empty hidden file beside `target`, made at once, which goes unless it is finished. Its names are few and a lock tells that it is in
// use, so that what a killed process left is removed by the next one. Whoever writes it opens it by its name and does not replace it.
class Unfinished {
public:
  // Throws std::filesystem::filesystem_error where it cannot be made.
  explicit Unfinished(std::filesystem::path target) : target_(std::move(target)) {
    for (int number = 0; file_ == -1; ++number) {
      const std::string name = "." + short_name(target_.filename().string()) + "." + std::to_string(number) + ".tmp";
      path_ = target_.parent_path() / name;
      remove_dead();
      file_ = ::open(path_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0666);
      if (file_ == -1 && errno != EEXIST)
        throw std::filesystem::filesystem_error("cannot write", target_, std::error_code(errno, std::generic_category()));
      if (file_ != -1 && !locked(file_)) { // another process took it for a dead one
        ::close(file_);
        file_ = -1;
      }
    }
  }
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;
  ~Unfinished() {
    if (!finished_)
      ::unlink(path_.c_str());
    ::close(file_);
  }

  const std::filesystem::path& path() const { return path_; }

  // Puts it in the place of the target: content first, then name, so that a power cut leaves the old file or the new one.
  // Throws std::filesystem::filesystem_error.
  void finish() {
    ::fsync(file_);
    std::filesystem::rename(path_, target_);
    finished_ = true;
    const std::string folder = target_.has_parent_path() ? target_.parent_path().string() : ".";
    if (const int names = ::open(folder.c_str(), O_RDONLY | O_CLOEXEC); names != -1) {
      ::fsync(names);
      ::close(names);
    }
  }

private:
  // The name, or its start and a digest of it where the hidden name would be longer than the 255 bytes of file systems.
  static std::string short_name(const std::string& name) {
    constexpr std::size_t longest = 200, digits = 16;
    if (name.size() <= longest)
      return name;
    std::string digest = std::to_string(std::hash<std::string>{}(name));
    digest.resize(digits, '0');
    return name.substr(0, longest - digits - 1) + "-" + digest;
  }

  // Whether a lock was had, or cannot be had on this file system, and the file still has its name.
  bool locked(int file) const {
    struct stat held {}, named {};
    const bool used = ::flock(file, LOCK_EX | LOCK_NB) == -1 && errno == EWOULDBLOCK;
    return !used && ::fstat(file, &held) == 0 && ::lstat(path_.c_str(), &named) == 0 && held.st_ino == named.st_ino &&
           held.st_dev == named.st_dev;
  }

  void remove_dead() const {
    const int file = ::open(path_.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct stat facts {};
    if (file != -1 && ::fstat(file, &facts) == 0 && S_ISREG(facts.st_mode) && ::flock(file, LOCK_EX | LOCK_NB) == 0 && locked(file))
      ::unlink(path_.c_str());
    if (file != -1)
      ::close(file);
  }

  std::filesystem::path target_, path_;
  int file_ = -1;
  bool finished_ = false;
};

} // namespace detrt
