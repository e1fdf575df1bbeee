// Threads over what is shared between calls, for the thread sanitizer: the pool of kernel.h and the tables of choices.h.
// No Python and no torch, which are not instrumented. `nox -s sanitize-threads` builds and runs it; 0 means right values.
// `threads some` takes a tenth of the rounds. A race is reported by the order of two accesses, which needs no long run.
#include <cstdio>
#include <latch>
#include <thread>
#include <vector>

#include "shiplap/choices.h"
#include "shiplap/cpu/kernel.h"

namespace {

constexpr int kThreads = 8, kSetters = 2;
std::atomic<int> wrong{0};
int share = 1;  // of the rounds: all, or each tenth

void expect(bool holds, const char* what) {
  if (!holds && wrong.fetch_add(1) == 0) std::fprintf(stderr, "wrong: %s\n", what);
}

// Calls of several threads, each with a pool of its own; every task is done once.
void pools() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kThreads; ++caller) {
    callers.emplace_back([] {
      for (int round = 0; round < 50 / share; ++round) {
        std::vector<int> done(1000, 0);
        shiplap::parallel_for(4, 1000, [&](int, int64_t task) { ++done[task]; });
        for (int times : done) expect(times == 1, "a task was not done once");
      }
    });
  }
  for (std::thread& each : callers) each.join();
}

// Lookups while other threads replace and clear the table: a config is one of those that were declared, or none.
void tables() {
  shiplap::Choices choices;
  std::latch together(kThreads + kSetters);  // the number of lookups is fixed: on a busy machine setters come to run late
  std::vector<std::thread> threads;
  for (int caller = 0; caller < kThreads; ++caller) {
    threads.emplace_back([&] {
      together.arrive_and_wait();
      for (int look = 0; look < 5000 / share; ++look) {
        const shiplap::Table* table = choices.table();
        const int64_t key[] = {3, 4}, *config = nullptr;
        if (table == nullptr || table->look(key, &config) || config == nullptr) continue;
        expect(config[0] == 7 && (config[1] == 1 || config[1] == 2), "a config that nobody chose");
      }
    });
  }
  for (int64_t setter = 1; setter <= kSetters; ++setter) {
    threads.emplace_back([&, setter] {
      together.arrive_and_wait();
      for (int round = 0; round < 500 / share; ++round) {
        const int64_t rows[] = {3, 4, 0, 7, setter, 5, 6, 1, 0, 0};
        choices.set(round % 3 == 0 ? nullptr : std::make_unique<const shiplap::Table>(rows, 2, 2, 2, false));
      }
    });
  }
  for (std::thread& each : threads) each.join();
}

}  // namespace

int main(int count, char**) {
  share = count > 1 ? 10 : 1;
  pools();
  tables();
  return wrong.load() != 0;
}
