// torch's autograd engine gives each device a thread, and counts devices at the first backward of a
// process. A device that is loaded later is given its thread here; one loaded before needs nothing.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <shiplap_backend/call.h>
#include <shiplap_backend/device.h>
#include <shiplap_backend/memory.h>
#include <pthread.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include <atomic>
#include <memory>
#include <thread>

namespace shiplap::backend {
namespace {

using torch::autograd::Engine;

// What the engine leaves to classes derived from it, reached through pointers to members: the engine
// itself is of torch's own class.
struct Threads : Engine {
  static bool started(Engine& engine) { return engine.*(&Threads::thread_pool_shared_) != nullptr; }
  static auto& queues(Engine& engine) { return engine.*(&Threads::device_ready_queues_); }
};

// A child of a process whose engine had threads has the queues, and no thread.
std::atomic<bool> threads_lost{false};
[[maybe_unused]] const int autograd_watched = pthread_atfork(nullptr, nullptr, [] {
  threads_lost = Threads::started(Engine::get_default_engine());
});

}  // namespace

// A backward returns when its last function is done, and the thread that ran it lets go of the graph
// afterwards. Objects of Python are among that: a thread that asks for the interpreter while it ends is
// ended itself, in the middle of a destructor, which ends the process. A thread does one thing after the
// other, so a small backward of our own, which has no objects of Python, is behind all that. It has no
// elements, since the device may have no memory left.
void settle_autograd() {
  if (threads_lost || in_bad_fork() || !Threads::started(Engine::get_default_engine())) {
    return;
  }
  const at::AutoGradMode with_gradients(true);
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
    auto x = at::empty({0}, at::TensorOptions(c10::Device(kDeviceType, i)));
    x.requires_grad_();
    auto y = x.view({1, 0});
    torch::autograd::grad({y}, {x}, {at::empty_like(y)});
  }
}

void join_autograd() {
  auto& engine = Engine::get_default_engine();
  // Before its first backward the engine has not counted, and must not be made to: a process whose
  // engine has threads may not be forked.
  if (!Threads::started(engine) || !Threads::queues(engine).empty()) {
    return;
  }
  // Nobody reads the list meanwhile: an engine without queues runs in its callers' threads.
  for (int i = 0; i < device_count(); ++i) {
    Threads::queues(engine).push_back(std::make_shared<torch::autograd::ReadyQueue>());
  }
  for (int i = 0; i < device_count(); ++i) {
    std::thread([&engine, i, queue = Threads::queues(engine)[static_cast<size_t>(i)]] {
      engine.thread_init(i, queue);
    }).detach();
  }
}

}  // namespace shiplap::backend
