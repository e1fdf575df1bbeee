// What torch asks of a device as such: guard, streams and events, hooks, random numbers. There is
// one device, index 0, and every op is done when its call returns: streams order nothing and an
// event is a moment in time.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <shiplap_backend/device.h>
#include <shiplap_backend/memory.h>

#include <chrono>
#include <mutex>

namespace shiplap::backend {
namespace {

using Clock = std::chrono::steady_clock;
void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index <= 0, "device index ", static_cast<int>(index),
              " is out of range: there is 1 device, index 0");
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    check_index(device.index());
    return kDevice;
  }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override { check_index(device.index()); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(kDevice); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Clock::time_point;
    }
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr,
                "both events must be recorded before their distance is asked");
    auto span = *static_cast<Clock::time_point*>(to) - *static_cast<Clock::time_point*>(from);
    return std::chrono::duration<double, std::milli>(span).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// The stream of random numbers is the CPU's for the same seed: random ops run there.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(at::Generator host)
      : GeneratorImpl(kDevice, c10::DispatchKeySet(kKey)), host_(std::move(host)) {}
  const at::Generator& host() const { return host_; }

  void set_current_seed(uint64_t seed) override { host_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host_.set_offset(offset); }
  uint64_t get_offset() const override { return host_.get_offset(); }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return host_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(host_.clone()); }
  at::Generator host_;
};

const at::Generator& default_generator() {
  static auto* g =
      new at::Generator(at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator()));
  return *g;
}

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex index) const override { check_index(index); }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    check_index(index);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    check_index(index);
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    check_index(index);
    return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
  }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
    auto grown = device_allocator()->allocate(bytes);
    auto kept = std::min(bytes, impl->nbytes());
    if (kept > 0) {
      device_allocator()->copy_data(grown.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(bytes);
  }
};

[[maybe_unused]] const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

at::Generator host_generator(const std::optional<at::Generator>& generator) {
  const auto& g = generator && generator->defined() ? *generator : default_generator();
  return g.device().type() == kDeviceType
             ? static_cast<DeviceGenerator*>(g.unsafeGetGeneratorImpl())->host()
             : g;
}

}  // namespace shiplap::backend
