// A CUDA device that is none, for a CPU build of torch: tensors say "cuda", their memory is the host's, and the CPU
// runs every operation. It refuses what a device would refuse (tensors of several devices in one operation) and counts
// operations and what would make the host wait. It is loaded before torch, which asks for the hooks of CUDA only once.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <time.h>

namespace {

using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId;
using at::Tensor;
constexpr DeviceIndex kDevices = 2;

thread_local DeviceIndex current = 0;
thread_local bool inside = false;  // what the fallback copies itself makes no device wait
thread_local bool timed = false;
std::atomic<int64_t> kernels = 0;  // nanoseconds of CPU time in what a device would do
thread_local StreamId streams[kDevices] = {0, 0};

std::recursive_mutex lock;  // guards all that follows
std::map<std::string, int64_t> counts;  // "wait: ...", "mixed: ..." and "op: ...", since they were last taken
int64_t strict = 0;  // whether what waits raises, where torch's debug mode for that does
int64_t watched = 1;  // whether memory raises that a stream may get again while another still uses it
int64_t late = -1;  // how many questions an event answers with no before copies arrive; -1: they are there at once
int64_t now = 0;  // counts what a device is given to do
StreamId last_stream = 0;
std::string fault;  // raised by the next operation

int64_t clock_now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec * 1000000000 + t.tv_nsec;
}

struct Kernel {  // its time is the device's
  bool outer = !std::exchange(timed, true);
  int64_t begun = outer ? clock_now() : 0;
  ~Kernel() {
    if (outer) {
      kernels += clock_now() - begun;
      timed = false;
    }
  }
};

void note(const std::string& what) {
  std::lock_guard<std::recursive_mutex> held(lock);
  counts[what] += 1;
}

struct Copy {  // to the host, on its way
  DeviceIndex device;
  StreamId stream;
  int64_t at;
  Tensor to, value;
};
std::vector<Copy> copies;

struct Event {
  DeviceIndex device;
  StreamId stream;
  int64_t at, asked;
  double seconds;
};

struct Block {
  StreamId stream;
  std::map<StreamId, int64_t> used;  // by other streams
  std::set<StreamId> recorded;
};
std::map<const void*, Block> blocks[kDevices];
std::map<StreamId, std::vector<std::pair<StreamId, int64_t>>> freed[kDevices];  // of a stream, and who used it until when
std::map<std::pair<StreamId, StreamId>, int64_t> seen[kDevices];  // up to when (one) waited for (another); -1 is the host

// The host, or a stream, has waited for a stream: what that was given before `at` is done.
void waited(DeviceIndex device, StreamId waiter, StreamId stream, int64_t at) {
  auto& known = seen[device][{waiter, stream}];
  known = std::max(known, at);
  if (waiter != -1) return;
  std::vector<Copy> left;
  for (auto& copy : copies) {
    if (copy.device == device && copy.stream == stream && copy.at <= at) {
      std::memcpy(copy.to.mutable_data_ptr(), copy.value.const_data_ptr(), copy.to.nbytes());
    } else {
      left.push_back(copy);
    }
  }
  copies.swap(left);
}

void all_done(DeviceIndex device) {
  std::lock_guard<std::recursive_mutex> held(lock);
  std::set<StreamId> known = {0, streams[device]};
  for (StreamId s = 1; s <= last_stream; ++s) known.insert(s);
  for (auto s : known) waited(device, -1, s, now);
}

void waits(const std::string& what, DeviceIndex device) {
  note("wait: " + what);
  all_done(device);
  TORCH_CHECK(!strict || inside, "called a synchronizing CUDA operation: ", what);
}

void uses(const Tensor& t) {
  if (!t.is_cuda() || !t.has_storage()) return;
  std::lock_guard<std::recursive_mutex> held(lock);
  auto d = t.device().index();
  auto found = blocks[d].find(t.storage().data());
  if (found != blocks[d].end() && found->second.stream != streams[d]) found->second.used[streams[d]] = ++now;
}

void release(void* memory) {
  std::lock_guard<std::recursive_mutex> held(lock);
  for (DeviceIndex d = 0; d < kDevices; ++d) {
    auto found = blocks[d].find(memory);
    if (found == blocks[d].end()) continue;
    for (auto& [stream, at] : found->second.used) {
      if (watched && !found->second.recorded.count(stream)) freed[d][found->second.stream].push_back({stream, at});
    }
    blocks[d].erase(found);
  }
  std::free(memory);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    size_t room = (n + 511) / 512 * 512;  // as the caching allocator: aligned to 512 bytes
    if (n && posix_memalign(&p, 512, room)) throw std::bad_alloc();
    if (n) {
      std::memset(p, 0xA5, room);  // what nothing wrote is no zero
      std::lock_guard<std::recursive_mutex> held(lock);
      auto own = streams[current];
      for (auto [stream, at] : std::exchange(freed[current][own], {})) {
        bool done = seen[current][{own, stream}] >= at || seen[current][{-1, stream}] >= at;
        if (!done) fault = "a stream may get memory that another stream still uses";
      }
      blocks[current][p] = {own, {}, {}};
    }
    return {p, p, &release, Device(c10::kCUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kCUDA;
  static Stream made(DeviceIndex d, StreamId id) { return Stream(Stream::UNSAFE, {c10::kCUDA, d}, id); }
  static DeviceIndex of(Device d) { return d.index() < 0 ? current : d.index(); }
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device getDevice() const override { return {c10::kCUDA, current}; }
  Device exchangeDevice(Device d) const override {
    Device old = getDevice();
    setDevice(d);
    return old;
  }
  void setDevice(Device d) const override { current = of(d); }
  void uncheckedSetDevice(Device d) const noexcept override { current = of(d); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Stream getStream(Device d) const override { return made(of(d), streams[of(d)]); }
  Stream getDefaultStream(Device d) const override { return made(of(d), 0); }
  Stream getNewStream(Device d, int) const override {
    std::lock_guard<std::recursive_mutex> held(lock);
    return made(of(d), ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override { return made(s.device_index(), std::exchange(streams[s.device_index()], s.id())); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> held(lock);
    delete static_cast<Event*>(*event);
    auto clock = std::chrono::steady_clock::now().time_since_epoch();
    *event = new Event{s.device_index(), s.id(), ++now, 0, std::chrono::duration<double>(clock).count()};
  }
  void block(void* event, const Stream& s) const override {
    std::lock_guard<std::recursive_mutex> held(lock);
    auto* e = static_cast<Event*>(event);
    if (e && e->device == s.device_index()) waited(e->device, s.id(), e->stream, e->at);
  }
  bool queryEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> held(lock);
    auto* e = static_cast<Event*>(event);
    if (!e) return true;
    if (late >= 0 && e->asked++ < late) return false;
    waited(e->device, -1, e->stream, e->at);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> held(lock);
    note("wait: event.synchronize");
    if (auto* e = static_cast<Event*>(event)) waited(e->device, -1, e->stream, e->at);
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& s) const override { waits("stream.synchronize", s.device_index()); }
  void synchronizeDevice(DeviceIndex d) const override {
    note("wait: synchronize");
    all_done(d < 0 ? current : d);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override {
    std::lock_guard<std::recursive_mutex> held(lock);
    auto found = blocks[s.device_index()].find(p.get());
    if (found != blocks[s.device_index()].end()) found->second.recorded.insert(s.id());
  }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    return std::max(1e3 * (static_cast<Event*>(to)->seconds - static_cast<Event*>(from)->seconds), 1e-3);
  }
};

const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
using Size = c10::SymIntArrayRef;

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

// The same memory as a CPU tensor; keeps `t` alive.
Tensor host(const Tensor& t) {
  if (!t.is_cuda()) return t;
  uses(t);
  auto made = at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [t](void*) {}, t.options().device(at::kCPU), at::Device(at::kCPU));
  made._set_conj(t.is_conj());
  made._set_neg(t.is_neg());
  return made;
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  Kernel kernel;
  TORCH_CHECK(fault.empty(), std::exchange(fault, ""));
  bool down = src.is_cuda() && !self.is_cuda();
  if (!inside && self.numel()) {
    auto way = std::string(src.is_cuda() ? down ? "cuda->cpu" : "on the device" : "cpu->cuda");
    if (self.is_cuda() && src.is_cuda()) {
      note(self.device() == src.device() ? "op: copy_ on the device" : "op: copy_ between devices");
    } else if (non_blocking) {
      note("op: copy_ " + way + ", async");
    } else {
      waits("copy_ " + way + ", blocking", down ? src.device().index() : self.device().index());
    }
  }
  auto to = host(self), from = host(src);
  if (down && !inside && non_blocking && late >= 0 && self.is_non_overlapping_and_dense() && self.numel()) {
    auto value = at::empty_strided(self.sizes(), self.strides(), self.options());
    value.copy_(from);
    std::memset(self.mutable_data_ptr(), 0xA5, self.nbytes());
    std::lock_guard<std::recursive_mutex> held(lock);
    copies.push_back({src.device().index(), streams[src.device().index()], ++now, self, value});
    return self;
  }
  to.copy_(from);
  return self;
}

void foreach_copy_(at::TensorList self, at::TensorList src, bool non_blocking) {
  Kernel kernel;
  bool alike = true;  // then one launch, as on CUDA
  for (size_t i = 0; i < self.size(); ++i) {
    alike = alike && self[i].device() == self[0].device() && src[i].device() == self[0].device() &&
        self[i].dtype() == self[0].dtype() && src[i].dtype() == src[0].dtype();
  }
  TORCH_CHECK(fault.empty(), std::exchange(fault, ""));
  if (alike && !inside) note("op: _foreach_copy_");
  for (size_t i = 0; i < self.size(); ++i) {
    alike ? host(self[i]).copy_(host(src[i])) : self[i].copy_(src[i], non_blocking);
  }
}

at::Scalar local_scalar(const Tensor& self) {
  waits("item()", self.device().index());
  return host(self).item();
}

bool equal(const Tensor& a, const Tensor& b) {
  waits("equal", a.device().index());
  return host(a).equal(host(b));
}

Tensor as_strided(const Tensor& self, Size size, Size stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
const Tensor& resize_(const Tensor& self, Size size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor reshape_alias(const Tensor& self, Size size, Size stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor view(const Tensor& self, Size size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
Tensor& set_offset(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (self.sizes() != to.sizes()) at::native::resize_(to, self.sizes(), std::nullopt);
  host(to).copy_(host(self));
  return to;
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool) { return copy_from_and_resize(self, to); }
void record_stream(Tensor& t, Stream s) { Guard().recordDataPtrOnStream(t.storage().data_ptr(), s); }

Tensor to_copy(const Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<Device> device,
               std::optional<bool>, bool non_blocking, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!layout || *layout == at::kStrided, "the simulated device has dense tensors only");
  auto options = self.options().dtype(dtype.value_or(self.scalar_type())).device(device.value_or(self.device())).pinned_memory(false);
  auto kept = format.value_or(at::MemoryFormat::Preserve);
  bool same = kept == at::MemoryFormat::Preserve;
  auto made = same && self.is_non_overlapping_and_dense() ? at::empty_strided(self.sizes(), self.strides(), options)
                                                          : at::empty(self.sizes(), options, same ? self.suggest_memory_format() : kept);
  return made.copy_(self, non_blocking);
}

const std::set<std::string> waiting = {"nonzero", "masked_select", "_unique2", "bincount", "unique_dim", "unique_consecutive", "repeat_interleave"};
const std::set<std::string> takes_host = {"index.Tensor", "index_put_", "_index_put_impl_", "index_put", "_pack_padded_sequence"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Kernel kernel;
  TORCH_CHECK(fault.empty(), std::exchange(fault, ""));
  const auto name = op.schema().name().substr(op.schema().name().find("::") + 2);
  const auto full = name + (op.schema().overload_name().empty() ? "" : "." + op.schema().overload_name());
  std::optional<Device> device;
  bool host_tensor = false;
  auto look = [&](const Tensor& t) {
    if (!t.defined()) return;
    if (!t.is_cuda()) {
      host_tensor |= t.dim() > 0;
      return;
    }
    uses(t);
    TORCH_CHECK(!device || *device == t.device(),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1! (", full, ")");
    device = t.device();
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    else if (value.isList()) for (const c10::IValue& each : value.toListRef()) if (each.isTensor()) look(each.toTensor());
  }
  TORCH_CHECK(!device || !host_tensor || takes_host.count(name) || takes_host.count(full),
              "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and cpu! (", full, ")");
  if (waiting.count(name)) waits(name, device ? device->index() : current);
  note("op: " + full);
  c10::DeviceGuard guard(device ? *device : Device(c10::kCUDA, current));
  struct In {
    bool was = std::exchange(inside, true);
    ~In() { inside = was; }
  } in;
  at::native::cpu_fallback(op, stack);
}

c10::Dict<std::string, int64_t> taken() {
  std::lock_guard<std::recursive_mutex> held(lock);
  c10::Dict<std::string, int64_t> found;
  for (auto& [what, count] : counts) found.insert(what, count);
  counts.clear();
  return found;
}

}  // namespace

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return d < 0 ? current : std::exchange(current, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  Device getDeviceFromPtr(void*) const override { return {kCUDA, current}; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(DeviceIndex d) const override { Guard().synchronizeDevice(d); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
const bool allocates = (c10::SetAllocator(c10::kCUDA, &memory), true);
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("copy_", copy_);
  m.impl("_foreach_copy_", foreach_copy_);
  m.impl("_to_copy", to_copy);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("equal", equal);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_offset);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY(cudasim, m) {
  m.def("host(Tensor t) -> Tensor");
  m.def("taken", taken);
  m.def("strict", [](int64_t on) { strict = on; });
  m.def("watch_streams", [](int64_t on) { watched = on; });
  m.def("kernels", []() { return kernels.exchange(0); });
  m.def("late", [](int64_t questions) { late = questions; });
  m.def("device", [](int64_t index) { return static_cast<int64_t>(index < 0 ? current : std::exchange(current, static_cast<DeviceIndex>(index))); });
}

TORCH_LIBRARY_IMPL(cudasim, CUDA, m) { m.impl("host", host); }
TORCH_LIBRARY_IMPL(cudasim, CPU, m) { m.impl("host", host); }
