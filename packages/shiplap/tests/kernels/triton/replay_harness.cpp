// Recordings drawn at random, made, replayed by several threads and forgotten, with a driver and an allocator that look at
// what they get. Compiled with the sanitizers of addresses and of undefined behaviour. Says "replayed", or what is wrong.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "shiplap/replay.h"

using shiplap::replay::Recording;

static std::atomic<int> wrong{0}, launched{0};
static void expect(bool holds, const char* what) {
  if (!holds && wrong.fetch_add(1) < 5) std::printf("%s\n", what);
}

// ---------------------------------------------------------------------------- torch: memory of the host, one device

struct Block {
  char* memory;
  int64_t bytes;
};
thread_local Block current{};  // the scratch memory of the call of this thread
static std::atomic<int> alive{0};

extern "C" {
int32_t aoti_torch_device_type_cuda() { return 1; }
int32_t aoti_torch_dtype_uint8() { return 0; }
AOTITorchError aoti_torch_get_current_device_index(int32_t* index) { return *index = 0, 0; }
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle*) { return 1; }
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }
AOTITorchError aoti_torch_empty_strided(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t, int32_t, int32_t,
                                        AtenTensorHandle* made) {
  expect(rank == 1 && *strides == 1, "scratch memory of another shape");
  ++alive;
  current = {static_cast<char*>(std::malloc(static_cast<size_t>(*sizes))), *sizes};
  *made = reinterpret_cast<AtenTensorHandle>(new Block(current));
  return 0;
}
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle of, void** data) {
  return *data = reinterpret_cast<Block*>(of)->memory, 0;
}
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle of) {
  Block* block = reinterpret_cast<Block*>(of);
  std::free(block->memory);
  delete block;
  --alive;
  return 0;
}
}

// ----------------------------------------------------------------------------------- the driver: what a launch gets

// A function is a pointer to what its launches have to look like.
struct Expected {
  std::vector<int64_t> head;
  std::vector<std::pair<int64_t, int64_t>> parameters;
};
thread_local const int64_t* brought = nullptr;

static int launch(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned one, unsigned also_one,
                  unsigned shared, void* stream, void** parameters, void** extra) {
  const Expected& expected = *static_cast<Expected*>(function);
  const std::vector<int64_t> head{x, y, z, threads, shared};
  expect(head == expected.head && one == 1 && also_one == 1 && stream == &wrong && extra == nullptr, "another launch");
  for (size_t i = 0; i < expected.parameters.size(); ++i) {
    const auto& [kind, value] = expected.parameters[i];
    int64_t given = 0;
    std::memcpy(&given, parameters[i], sizeof given);
    if (kind == shiplap::replay::kNumber) expect(given == value, "another number");
    if (kind == shiplap::replay::kTensor) expect(given == brought[value], "another tensor");
    if (kind == shiplap::replay::kScratch) {
      expect(given == reinterpret_cast<int64_t>(current.memory) + value, "another place");
      *reinterpret_cast<volatile char*>(given) = 1;  // which the sanitizer looks at
    }
  }
  ++launched;
  return 0;
}
extern "C" __attribute__((visibility("default"))) void* harness_launch() { return reinterpret_cast<void*>(&launch); }
extern "C" __attribute__((visibility("default"))) void* harness_stream() { return &wrong; }

// ---------------------------------------------------------------------------------------------------------- recordings

using Random = std::mt19937_64;
static int64_t below(Random& random, int64_t end) { return static_cast<int64_t>(random() % static_cast<uint64_t>(end)); }

struct Made {
  std::vector<Expected> functions;
  std::vector<int64_t> words;
  int64_t tensors;
};

static void draw(Random& random, Made& made) {
  made.tensors = 1 + below(random, 7);
  const int64_t scratch = below(random, 3) * 256 * (1 + below(random, 9)), launches = below(random, 5);
  made.functions.resize(static_cast<size_t>(launches));
  made.words = {0, scratch, launches};
  for (Expected& each : made.functions) {
    each.head = {1 + below(random, 1 << 30), 1 + below(random, 9), 1, 32 << below(random, 4), below(random, 1 << 17)};
    made.words.push_back(reinterpret_cast<int64_t>(&each));
    made.words.insert(made.words.end(), each.head.begin(), each.head.end());
    const int64_t count = below(random, 40);
    made.words.push_back(count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t kind = below(random, scratch > 0 ? 3 : 2);
      const int64_t value = kind == shiplap::replay::kNumber   ? static_cast<int64_t>(random())
                            : kind == shiplap::replay::kTensor ? below(random, made.tensors)
                                                               : below(random, scratch);
      each.parameters.emplace_back(kind, value);
      made.words.push_back(kind), made.words.push_back(value);
    }
  }
}

static int replayed(const Recording* recording, const int64_t* at) {
  brought = at;
  const auto address = [&](int i) { return reinterpret_cast<const void*>(at[i]); };
  return shiplap::replay::replay(recording, {address(0), address(1), address(2), address(3), address(4), address(5), address(6),
                                             address(7)});
}

static void work(uint64_t seed) {
  Random random(seed);
  for (int round = 0; round < 60; ++round) {
    Made made;
    draw(random, made);
    const Recording recording(made.words);
    for (int call = 0; call < 5; ++call) {
      int64_t addresses[8];
      for (int64_t& each : addresses) each = static_cast<int64_t>(random());
      expect(replayed(&recording, addresses) == 0, shiplap::replay::message().c_str());
    }
    if (recording.tensors > 0) expect(shiplap::replay::replay(&recording, {}) != 0, "tensors that nobody brought");
    std::vector<int64_t> broken(made.words.begin(), made.words.begin() + below(random, static_cast<int64_t>(made.words.size())));
    if (below(random, 2) && !broken.empty()) broken[static_cast<size_t>(below(random, static_cast<int64_t>(broken.size())))] = -1;
    try {
      const Recording never(broken);
      expect(false, "words that end too early are no recording");
    } catch (const std::exception&) {
    }
  }
}

int main() {
  if (dlopen("libtorch_cuda.so", RTLD_NOW) == nullptr) return 1;
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& each : threads) each.join();
  expect(alive == 0, "scratch memory that nobody freed");
  if (wrong == 0 && launched > 0) std::puts("replayed");
}
