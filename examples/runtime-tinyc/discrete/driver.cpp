// Two devices whose memory the host cannot touch. Each is one piece of memory that is
// mapped twice: at the addresses that torch sees nothing may be read or written, and
// the kernels use the other ones.
#include <shiplap_backend/threads.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>

namespace shiplap::backend {
namespace {

constexpr size_t kBytes = size_t{1} << 30;
constexpr size_t kUnit = 4096;  // a page

class Memory {
 public:
  Memory() {
    auto file = memfd_create("tinyc", 0);
    auto map = [&](int allowed) {
      return static_cast<char*>(mmap(nullptr, kBytes, allowed, MAP_SHARED, file, 0));
    };
    if (file >= 0 && ftruncate(file, kBytes) == 0) {
      closed_ = map(PROT_NONE);
      open_ = map(PROT_READ | PROT_WRITE);
      free_[0] = kBytes;
    }
    ::close(file);
  }

  void* allocate(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    bytes = (bytes + kUnit - 1) / kUnit * kUnit;
    for (auto [at, room] : free_) {
      if (room >= bytes) {
        free_.erase(at);
        if (room > bytes) free_[at + bytes] = room - bytes;
        used_[at] = bytes;
        return closed_ + at;
      }
    }
    return nullptr;
  }

  void release(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto at = static_cast<size_t>(static_cast<char*>(data) - closed_);
    auto bytes = used_.extract(at).mapped();
    madvise(open_ + at, bytes, MADV_REMOVE);
    auto next = free_.emplace(at, bytes).first;
    const auto after = std::next(next);
    if (after != free_.end() && after->first == at + bytes) {
      next->second += after->second;
      free_.erase(after);
    }
    if (next == free_.begin()) return;
    if (auto before = std::prev(next); before->first + before->second == at) {
      before->second += next->second;
      free_.erase(next);
    }
  }

  // What the kernels use in the place of `address`; nullptr if it is not of this
  // memory.
  char* opened(const void* address) const {
    auto at = static_cast<const char*>(address);
    return at >= closed_ && at < closed_ + kBytes ? open_ + (at - closed_) : nullptr;
  }

 private:
  char *closed_ = nullptr, *open_ = nullptr;
  std::mutex mutex_;
  std::map<size_t, size_t> free_, used_;  // where -> bytes
};

class Tinyc final : public ThreadDriver {
 public:
  int devices() override { return 2; }
  size_t total(int) override { return kBytes; }
  void* allocate(int device, size_t bytes) override {
    return memory_[device].allocate(bytes);
  }
  void release(int device, void* data) override { memory_[device].release(data); }

  void copy_now(void* to, const void* from, size_t bytes) override {
    std::memmove(opened(to), opened(from), bytes);
  }
  void run_now(Executable& executable, std::vector<const void*>& inputs,
               std::vector<void*>& outputs) override {
    for (auto& p : inputs) p = opened(p);
    for (auto& p : outputs) p = opened(p);
    executable.run(inputs, outputs);
  }

 private:
  void* opened(const void* address) const {
    for (const auto& m : memory_) {
      if (auto* here = m.opened(address)) return here;
    }
    return const_cast<void*>(address);  // the host's
  }
  Memory memory_[2];
};

}  // namespace

Driver& driver() {
  static auto* d = new Tinyc;
  return *d;
}

}  // namespace shiplap::backend
