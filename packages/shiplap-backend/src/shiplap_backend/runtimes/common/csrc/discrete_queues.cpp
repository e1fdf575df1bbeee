// Devices, streams and events of a discrete device, and how torch asks for them.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <shiplap_backend/device.h>
#include <shiplap_backend/queues.h>

#include <array>
#include <mutex>

namespace shiplap::backend {
namespace {

constexpr c10::StreamId kStreams = 33;  // of a device: the default one, and those given out in turn

struct Streams {
  std::mutex mutex;
  std::array<Queue, kStreams> queues{};
  c10::StreamId next = 0;
};

Streams& streams_of(c10::DeviceIndex index) {
  static auto* all = new std::vector<Streams>(static_cast<size_t>(device_count()));
  return (*all)[static_cast<size_t>(index)];
}

thread_local c10::DeviceIndex device_now = 0;
thread_local c10::SmallVector<c10::StreamId, 8> streams_now;  // by device; none: the default stream

c10::DeviceIndex index_of(c10::Device device) {
  check_index(device.index());
  return device.index() < 0 ? device_now : device.index();
}

// Waits with the mark in hand, which is dropped whatever happens.
void wait_and_drop(Mark mark) {
  driver().wait(mark);
  driver().drop(mark);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(kDeviceType, device_now);
    device_now = index_of(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDeviceType, device_now}; }
  void setDevice(c10::Device device) const override { device_now = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) {
      device_now = device.index();
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
#if __has_include(<c10/core/DeviceCapability.h>)
  c10::DeviceCapability getDeviceCapability(c10::Device) const { return capability(); }
#endif

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kDeviceType, index_of(device)});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto index = index_of(device);
    auto& streams = streams_of(index);
    std::lock_guard<std::mutex> lock(streams.mutex);
    auto id = 1 + streams.next++ % (kStreams - 1);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, index), id);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto index = index_of(stream.device());
    auto before = current_stream(index);
    streams_now.resize(static_cast<size_t>(device_count()), 0);
    streams_now[static_cast<size_t>(index)] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return driver().idle(queue_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(queue_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    synchronize(index_of({kDeviceType, index}));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    c10::getDeviceAllocator(kDeviceType)->recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    auto* before = std::exchange(*event, driver().mark(queue_of(stream)));
    if (before != nullptr) {
      driver().drop(before);
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) {
      driver().drop(event);
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      driver().block(queue_of(stream), event);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || driver().passed(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      driver().wait(event);
    }
    raise_failure();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr,
                "both events must be recorded before their distance is asked");
    TORCH_CHECK(driver().passed(from) && driver().passed(to),
                "both events must be completed before their distance is asked: synchronize() first");
    return driver().milliseconds(from, to);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

c10::DeviceIndex device_count() {
  static const auto count = static_cast<c10::DeviceIndex>(driver().devices());
  return count;
}
c10::DeviceIndex current_index() { return device_now; }
void set_current_index(c10::DeviceIndex index) { device_now = index_of({kDeviceType, index}); }

c10::Stream current_stream(c10::DeviceIndex index) {
  auto at = static_cast<size_t>(index);
  auto id = at < streams_now.size() ? streams_now[at] : 0;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, index), id);
}

Queue queue_of(const c10::Stream& stream) {
  vendor_starts();
  auto& streams = streams_of(stream.device_index());
  std::lock_guard<std::mutex> lock(streams.mutex);
  TORCH_CHECK(stream.id() >= 0 && stream.id() < kStreams, "stream ", stream.id(), " of device ",
              stream.device(), " is none that this device gave out");
  auto& queue = streams.queues[static_cast<size_t>(stream.id())];
  if (queue == nullptr) {
    queue = driver().open(stream.device_index(), 0);
  }
  return queue;
}

void raise_failure() {
  auto failure = driver().failure();
  TORCH_CHECK(failure.empty(), failure,
              "\n  It failed in a stream, after its call had returned: what was computed since may "
              "be wrong.");
}

void wait_for(Queue queue) {
  wait_and_drop(driver().mark(queue));
  raise_failure();
}

void synchronize(c10::DeviceIndex index) {
  std::vector<Mark> marks;
  {
    auto& streams = streams_of(index);
    std::lock_guard<std::mutex> lock(streams.mutex);
    for (auto* queue : streams.queues) {
      if (queue != nullptr) {
        marks.push_back(driver().mark(queue));
      }
    }
  }
  std::for_each(marks.begin(), marks.end(), wait_and_drop);
  raise_failure();
}

}  // namespace shiplap::backend
