// A device whose memory is the host's: what computes on it must lie on it, as on a GPU, and the host's looks are counted.
//
// Everything is computed by the CPU's kernels, on copies. Tensors of the device and of the CPU in one operation are an
// error in the words of torch's own for CUDA; what lets a GPU's host wait is counted, or refused while it is forbidden.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <unordered_set>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
std::atomic<bool> waiting_is_an_error{false};
std::atomic<int64_t> waits{0};
thread_local bool computes = false;  // what the fallback copies is none of the program's copies

void host_waits(const std::string& why) {
  if (computes) return;
  ++waits;
  TORCH_CHECK(!waiting_is_an_error, "called a synchronizing CUDA operation (", why, ")");
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return c10::Device(kDevice, 0); }
  c10::Device getDevice() const override { return c10::Device(kDevice, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kDevice, 0));
  }
  c10::Stream getDefaultStream(c10::Device) const override { return getStream(c10::Device(kDevice, 0)); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

constexpr size_t kHeader = 64;  // before each block, its size
std::atomic<int64_t> allocated{0};
std::atomic<int64_t> most_allocated{0};

void give_back(void* block) {
  if (block == nullptr) return;
  void* start = static_cast<char*>(block) - kHeader;
  allocated -= *static_cast<int64_t*>(start);
  std::free(start);
}

struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &give_back, c10::Device(kDevice, 0)};
    void* start = std::aligned_alloc(kHeader, (bytes + kHeader - 1) / kHeader * kHeader + kHeader);
    *static_cast<int64_t*>(start) = static_cast<int64_t>(bytes);
    const int64_t now = allocated += static_cast<int64_t>(bytes);
    for (int64_t most = most_allocated; most < now && !most_allocated.compare_exchange_weak(most, now);) {
    }
    void* block = static_cast<char*>(start) + kHeader;
    return {block, block, &give_back, c10::Device(kDevice, 0)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Allocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::DataPtr larger = allocator.allocate(bytes);
    if (bytes && storage.nbytes()) std::memcpy(larger.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(larger));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

const bool hooks_are_known = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& tensor) {  // the same memory
  if (tensor.device().type() != kDevice) return tensor;
  auto* start = tensor.numel() ? tensor.mutable_data_ptr() : nullptr;
  return at::from_blob(start, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const bool leaves = self.device().type() != to.device().type();
  if (leaves && !non_blocking && self.numel()) host_waits("a copy that is waited for");
  on_host(to).copy_(on_host(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (!to.sizes().equals(self.sizes())) to.resize_(self.sizes());
  on_host(to).copy_(on_host(self));  // of the fallback: no copy that the program asked for
  return to;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  return at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size), std::nullopt), self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  host_waits("a look at a value");
  return on_host(self).item();
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t length = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {length}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

const std::unordered_set<std::string> kHostMustKnow{
    "aten::equal",   "aten::nonzero",        "aten::is_nonzero",  "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave.Tensor"};

// As CUDA's kernels: a tensor of the CPU may take part if it is one number; indices may lie on the host.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.operator_name().name;
  const bool may_index = name.find("index") != std::string::npos;
  const auto arguments = torch::jit::last(stack, schema.arguments().size());
  auto check = [&](const at::Tensor& tensor) {
    const bool is_fine = !tensor.defined() || tensor.device().type() == kDevice || tensor.dim() == 0 || may_index ||
        tensor.device().type() == c10::DeviceType::Meta;
    TORCH_CHECK(is_fine, "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                "(", name, ")");
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) check(argument.toTensor());
    if (argument.isTensorList())
      for (const at::Tensor& tensor : argument.toTensorList().vec()) check(tensor);
  }
  if (kHostMustKnow.count(name)) host_waits(name);
  const bool before = computes;
  computes = true;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    computes = before;
    throw;
  }
  computes = before;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forbid_waiting", [](bool forbidden) { waiting_is_an_error = forbidden; });
  m.def("waits", [] { return waits.load(); });
  m.def("allocated", [] { return allocated.load(); });
  m.def("most_allocated", [] { return most_allocated.load(); });
  m.def("forget_the_most", [] { most_allocated = allocated.load(); });
}
