// Errors that kernels find, told by a later call: a word of host memory for each device, and what its numbers stand for.
#pragma once

#include "shiplap/triton.h"

namespace shiplap::triton {

// What a kernel found wrong, told by a later call.
struct Told : Failure {
  using Failure::Failure;
};

// What a code stands for; {row} in the text is the row.
struct Message {
  int64_t code;
  const char *op, *text;
};

// The address of the word of a device, after taking what it says, with its text: Python, where there is one.
using Teller = int64_t (*)(int32_t device, char* message, uint64_t size);

// A word of host memory for each device, which kernels reach: code << 40 | row of what is wrong, or 0.
class Late {
 public:
  Late(const Message* known, size_t count) : messages_(known), count_(count) {}
  std::atomic<Teller> teller{nullptr};

  // The address of the word. Throws Told for what it says, once.
  int64_t word(int device) {
    if (device < 0 || device >= kDevices) fail("a device of number " + std::to_string(device));
    int64_t* word = words_[device].load(std::memory_order_acquire);
    if (word == nullptr) [[unlikely]] word = first(device);
    if (*const_cast<const volatile int64_t*>(word) != 0) [[unlikely]] tell(device, word);
    return reinterpret_cast<int64_t>(word);
  }

 private:
  [[gnu::cold, gnu::noinline]] int64_t* first(int device) {
    const std::lock_guard<std::mutex> alone(finding_);
    if (int64_t* known = words_[device].load(); known != nullptr) return known;
    void* memory = nullptr;
    char message[1024] = "";
    if (const Teller tells = teller.load(); tells != nullptr) {
      memory = reinterpret_cast<void*>(tells(device, message, sizeof message));
    } else {
      const Driver& driver = Driver::get();
      need_context(driver, device);
      int mode = 2;  // relaxed: the memory belongs to no graph
      driver.check(driver.exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
      const Status status = driver.host_memory(&memory, sizeof(int64_t), 3);  // portable, mapped
      driver.exchange_capture_mode(&mode);
      driver.check(status, "cuMemHostAlloc");
      *static_cast<int64_t*>(memory) = 0;
    }
    if (memory == nullptr) fail(std::string("no memory for late errors: ") + message);
    words_[device].store(static_cast<int64_t*>(memory), std::memory_order_release);
    if (*message != 0) throw Told(message);
    return static_cast<int64_t*>(memory);
  }

  [[gnu::cold, gnu::noinline]] void tell(int device, int64_t* word) {
    if (const Teller tells = teller.load(); tells != nullptr) {
      char message[1024] = "";
      tells(device, message, sizeof message);
      if (*message != 0) throw Told(message);
      return;  // another thread has told it
    }
    const int64_t told = __atomic_exchange_n(word, 0, __ATOMIC_ACQ_REL);
    if (told == 0) return;
    const std::string row = std::to_string(told & ((int64_t{1} << 40) - 1));
    for (size_t i = 0; i < count_; ++i) {
      if (messages_[i].code != told >> 40) continue;
      std::string text = messages_[i].text;
      if (const size_t at = text.find("{row}"); at != std::string::npos) text.replace(at, 5, row);
      throw Told(text + ", in an earlier call of " + messages_[i].op);
    }
    throw Told("code " + std::to_string(told >> 40) + ", row " + row + ", in an earlier call");
  }

  static constexpr int kDevices = 64;
  std::atomic<int64_t*> words_[kDevices]{};
  std::mutex finding_;
  const Message* messages_;
  size_t count_;
};

}  // namespace shiplap::triton
