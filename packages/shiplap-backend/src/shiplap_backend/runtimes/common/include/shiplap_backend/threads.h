// Queues for a vendor whose functions return when they are done: each queue is a thread.
#pragma once

#include <shiplap_backend/driver.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace shiplap::backend {

// The vendor's class says what a copy and a run are; both are called in the queue's thread.
class ThreadDriver : public Driver {
 public:
  virtual void copy_now(void* to, const void* from, size_t bytes) = 0;
  virtual void run_now(Executable& executable, std::vector<const void*>& inputs,
                       std::vector<void*>& outputs) {
    executable.run(inputs, outputs);
  }

  Queue open(int, int) override { return new Worker; }
  void copy(Queue queue, void* to, const void* from, size_t bytes) override {
    put(queue, "a copy", [=, this] { copy_now(to, from, bytes); });
  }
  void run(Queue queue, const char* op, std::shared_ptr<Executable> executable,
           std::vector<const void*> inputs, std::vector<void*> outputs) override {
    put(queue, op,
        [this, executable = std::move(executable), inputs = std::move(inputs),
         outputs = std::move(outputs)]() mutable { run_now(*executable, inputs, outputs); });
  }
  bool idle(Queue queue) override {
    auto& w = *static_cast<Worker*>(queue);
    std::lock_guard<std::mutex> lock(w.mutex);
    return w.left == 0;
  }

  Mark mark(Queue queue) override {
    auto moment = std::make_shared<Moment>();
    put(queue, "an event", [moment] {
      std::lock_guard<std::mutex> lock(moment->mutex);
      moment->at = Clock::now();
      moment->passed = true;
      moment->changed.notify_all();
    }, 0);
    return new std::shared_ptr<Moment>(moment);
  }
  void drop(Mark mark) override { delete static_cast<std::shared_ptr<Moment>*>(mark); }
  void block(Queue queue, Mark mark) override {
    put(queue, "a wait", [moment = of(mark)] { moment->wait(); });
  }
  bool passed(Mark mark) override {
    auto moment = of(mark);
    std::lock_guard<std::mutex> lock(moment->mutex);
    return moment->passed;
  }
  void wait(Mark mark) override { of(mark)->wait(); }
  double milliseconds(Mark from, Mark to) override {
    return std::chrono::duration<double, std::milli>(of(to)->at - of(from)->at).count();
  }
  std::string failure() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(failure_, {});
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Moment {
    std::mutex mutex;
    std::condition_variable changed;
    bool passed = false;
    Clock::time_point at;

    void wait() {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [this] { return passed; });
    }
  };

  // Never destroyed, nor is its thread joined: tensors may be freed while the process ends.
  struct Worker {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::pair<std::function<void()>, int>> tasks;
    int left = 0;  // tasks that are not done; marks do not count, or none would find its queue idle

    Worker() {
      std::thread([this] { work(); }).detach();
    }
    [[noreturn]] void work() {
      std::unique_lock<std::mutex> lock(mutex);
      while (true) {
        changed.wait(lock, [this] { return !tasks.empty(); });
        auto [task, counts] = std::move(tasks.front());
        tasks.pop_front();
        lock.unlock();
        task();
        task = nullptr;  // what it holds is let go before the queue is idle
        lock.lock();
        left -= counts;
      }
    }
  };

  static std::shared_ptr<Moment> of(Mark mark) {
    return *static_cast<std::shared_ptr<Moment>*>(mark);
  }

  template <class Task>
  void put(Queue queue, const char* what, Task task, int counts = 1) {
    auto& w = *static_cast<Worker*>(queue);
    std::lock_guard<std::mutex> lock(w.mutex);
    w.left += counts;
    auto guarded = [this, what, task = std::move(task)]() mutable {
      try {
        task();
      } catch (const std::exception& e) {
        failed(what, e.what());
      } catch (...) {
        failed(what, "an exception of no known type");
      }
    };
    w.tasks.emplace_back(std::move(guarded), counts);
    w.changed.notify_one();
  }

  void failed(const char* what, const char* why) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) {  // what follows is most often a consequence
      failure_ = std::string(what) + ": " + why;
    }
  }

  std::mutex mutex_;
  std::string failure_;
};

}  // namespace shiplap::backend
