// Has torch say that it has two GPUs and what their current stream is, for fakelane.c.
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceType;
using c10::Stream;

extern "C" {
int current_stream = 1;
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override { return device; }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, current_stream);
  }
  Stream exchangeStream(Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  void *getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void *>(stream.id());
  }
};

} // namespace

extern "C" void install() {
  static Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)]
      .store(&guard);
}
