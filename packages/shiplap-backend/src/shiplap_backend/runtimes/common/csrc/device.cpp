// What torch asks of a device as such, in either kind of memory: hooks and random numbers.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <shiplap_backend/device.h>
#include <shiplap_backend/memory.h>

#include <mutex>

namespace shiplap::backend {
namespace {

// The stream of random numbers is the CPU's for the same seed: random ops run there.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(at::Generator host, c10::DeviceIndex index)
      : GeneratorImpl({kDeviceType, index}, c10::DispatchKeySet(kKey)), host_(std::move(host)) {}
  const at::Generator& host() const { return host_; }

  void set_current_seed(uint64_t seed) override { host_.set_current_seed(seed); }
  // The CPU's stream has no offset; pickling asks for one, and sets it again.
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset == 0, "the random numbers of device '", kDeviceType,
                "' are the CPU's, which have no offset: got ", offset, ", expected 0");
  }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return host_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(host_.clone(), device().index());
  }
  at::Generator host_;
};

at::Generator made_generator(c10::DeviceIndex index) {
  return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator(),
                                             index < 0 ? current_index() : index);
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      made->push_back(made_generator(i));
    }
    return made;
  }();
  check_index(index);
  return (*all)[static_cast<size_t>(index < 0 ? current_index() : index)];
}

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    check_index(index);
    set_current_index(index);
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_index(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = current_index();
    setCurrentDevice(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_index() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    check_index(index);
    return made_generator(index);
  }
  c10::Device getDeviceFromPtr(void*) const override { return current_device(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
    const c10::DeviceGuard guard(storage.device());
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
  const auto& g = generator && generator->defined() ? *generator : default_generator(-1);
  return g.device().type() == kDeviceType
             ? static_cast<DeviceGenerator*>(g.unsafeGetGeneratorImpl())->host()
             : g;
}

}  // namespace shiplap::backend
