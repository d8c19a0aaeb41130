// What a build of torch without CUDA lacks for tensors that say they are on a GPU, and have no memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using c10::Device, c10::DeviceIndex, c10::Stream;
thread_local DeviceIndex current = 0;
int capability = 90;  // 10 × major + minor
constexpr DeviceIndex DEVICES = 64;  // more than any machine has: a device index must be below

// Without a guard, autograd aborts the process: "PyTorch is not linked with support for cuda devices"
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device getDevice() const override { return {type(), current}; }
  Device exchangeDevice(Device d) const override { auto old = getDevice(); current = d.index(); return old; }
  void setDevice(Device d) const override { current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  Stream getStream(Device d) const noexcept override { return Stream(Stream::DEFAULT, d); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream getNewStream(Device d, int) const override { return Stream(Stream::DEFAULT, d); }
  Stream exchangeStream(Stream s) const noexcept override { return s; }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
};

// Without these, backward says "Cannot access accelerator device when none is available"
struct FakeCUDAHooks final : at::CUDAHooksInterface {
  explicit FakeCUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto old = current; current = d; return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  int getNumGPUs() const override { return DEVICES; }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

// Without this, attention silently takes the kernel that holds all scores, and every memory figure is wrong.
// Of torch's documentation: flash (1) takes half precision without a mask, from capability 8.0 on; memory-efficient (2)
// takes masks, fp32 and older devices (but for bf16), and no grouped heads; math (0) takes all
int64_t choose_attention(
    const at::Tensor& query, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask, double, bool,
    std::optional<double>, bool grouped_heads) {
  const auto type = query.scalar_type();
  const bool half = type == at::kHalf || (type == at::kBFloat16 && capability >= 80);
  if (half && capability >= 80 && !mask.has_value() && query.sym_size(-1).guard_int(__FILE__, __LINE__) <= 256) return 1;
  return (half || type == at::kFloat) && !grouped_heads ? 2 : 0;
}
const bool chosen = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  return true;
}();
}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
namespace at { C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", FakeCUDAHooks) }

extern "C" int armature_current_device() { return current; }
extern "C" void armature_set_capability(int major, int minor) { capability = 10 * major + minor; }
extern "C" void armature_set_device(int index) { current = static_cast<DeviceIndex>(index); }
