// Looks up 1000 entries with keys of six numbers, hits and misses: nanoseconds, allocations, wrong answers, a sum.
#include "shiplap/choices.h"
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
static size_t allocations = 0;
void* operator new(size_t n) { ++allocations; return std::malloc(n); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
int main(int, char** arguments) {
  constexpr int64_t entries = 1000, key = 6, config = 4;
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < entries; ++i) {
    const int64_t row[] = {shiplap::rounded(i), i, 7, 0, 1, 1, 0, i, i + 1, i + 2, i + 3};
    rows.insert(rows.end(), row, row + key + 1 + config);
  }
  shiplap::Choices choices;
  choices.set(std::make_unique<const shiplap::Table>(rows.data(), entries, key, config, false));
  const size_t before = allocations;
  const auto started = std::chrono::steady_clock::now();
  const int64_t rounds = std::atoll(arguments[1]);
  int64_t sum = 0, wrong = 0;
  for (int64_t r = 0; r < rounds; ++r) {
    const int64_t i = (r * 7919) % (2 * entries);
    const int64_t wanted[] = {shiplap::rounded(i), i, 7, 0, 1, 1}, none = -1, *found = &none;
    const bool defer = choices.table()->look(wanted, &found);
    wrong += defer || (i < entries ? found[0] != i || found[3] != i + 3 : found != &none);
    sum += *found;
  }
  const auto ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - started).count() / rounds;
  std::printf("%.1f %zu %lld %lld\n", ns, allocations - before, (long long)wrong, (long long)sum);
}
