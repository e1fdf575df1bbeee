// torch's autograd engine gives each device a thread, and counts devices at the first backward of a
// process. A device that is loaded later is given its thread here; one loaded before needs nothing.
#include <shiplap_backend/device.h>
#include <shiplap_backend/memory.h>
#include <torch/csrc/autograd/engine.h>

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

}  // namespace

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
