#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <pthread.h>
#include <shiplap_backend/call.h>
#include <shiplap_backend/memory.h>
#include <shiplap_backend/profiler.h>
#if SHIPLAP_DISCRETE
#include <shiplap_backend/queues.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#ifndef SHIPLAP_BLOCK_LAST
#define SHIPLAP_BLOCK_LAST 0  // a target whose memory is blocked says so in its compile arguments
#endif

namespace shiplap::backend {
namespace {

std::atomic<int64_t> block_last{SHIPLAP_BLOCK_LAST};

// The vendor's threads do not survive a fork, and waiting for them would never end: a child of a
// process that had started them must not compute on the device.
std::atomic<bool> vendor_started{false}, bad_fork{false};
[[maybe_unused]] const int fork_watched =
    pthread_atfork(nullptr, nullptr, [] { bad_fork = vendor_started.load(); });

constexpr size_t kCapacity = 4096;  // graphs; a model of a hundred layers uses some hundred

// Stored order of the dims of a tensor without gaps, or false: slowest first, expanded dims where
// they stand.
bool dense_order(const at::Tensor& t, c10::SmallVectorImpl<uint8_t>& order, uint64_t& expanded) {
  const auto sizes = t.sizes(), strides = t.strides();
  const auto rank = static_cast<uint8_t>(sizes.size());
  if (rank > 16) {
    return false;
  }
  order.resize(rank);
  std::iota(order.begin(), order.end(), uint8_t{0});
  for (uint8_t d = 0; d < rank; ++d) {
    if (sizes[d] > 1 && strides[d] == 0) {
      expanded |= uint64_t{1} << d;
    }
  }
  auto counts = [&](uint8_t d) { return sizes[d] > 1 && !(expanded >> d & 1); };
  // Dims of one element may stand anywhere: they keep their place among the others, so equal memory
  // gives an equal key.
  c10::SmallVector<uint8_t, 6> real;
  std::copy_if(order.begin(), order.end(), std::back_inserter(real), counts);
  std::stable_sort(real.begin(), real.end(),
                   [&](uint8_t a, uint8_t b) { return strides[a] > strides[b]; });
  auto next = real.begin();
  for (auto& d : order) {
    d = counts(d) ? *next++ : d;
  }
  int64_t step = 1;
  for (auto d = real.rbegin(); d != real.rend(); ++d) {
    if (strides[*d] != step) {
      return false;
    }
    step *= sizes[*d];
  }
  return true;
}

std::pair<const char*, const char*> extent(const at::Tensor& t) {
  const auto* begin = static_cast<const char*>(t.const_data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) {
    last += (t.size(d) - 1) * t.stride(d);
  }
  return {begin, begin + (t.numel() == 0 ? 0 : (last + 1) * static_cast<int64_t>(t.itemsize()))};
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  auto [a0, a1] = extent(a);
  auto [b0, b1] = extent(b);
  return a0 < b1 && b0 < a1;
}

// [..., n] -> [ceil(n / block), ..., block], padded with zeros, on the host.
at::Tensor to_blocks(const at::Tensor& t, int64_t block) {
  auto n = t.size(-1), blocks = (n + block - 1) / block;
  auto padded = at::constant_pad_nd(t, {0, blocks * block - n});
  return padded.unflatten(-1, {blocks, block}).movedim(-2, 0).contiguous();
}

at::Tensor from_blocks(const at::Tensor& blocks, int64_t n) {
  return blocks.movedim(0, -2).flatten(-2).narrow(-1, 0, n);
}

}  // namespace

Cache<Executable>& executables() {
  static auto* cache =
      new Cache<Executable>(kCapacity);  // compiled graphs outlive the vendor's threads at exit
  return *cache;
}

void vendor_starts() {
  TORCH_CHECK(!in_bad_fork(), "this process was forked from one that had used device '",
              at::Device(kDeviceType),
              "', whose threads it lacks. Start processes with multiprocessing's 'spawn'.");
  vendor_started.store(true, std::memory_order_relaxed);
}

bool in_bad_fork() { return bad_fork.load(std::memory_order_relaxed); }

Blocking layout() { return {block_last.load(std::memory_order_relaxed)}; }

void set_layout(Blocking blocking) { block_last.store(blocking.last); }

// --- the key

Call::Call(OpInfo& op) : op_(op), block_(layout().last) {
  key_.push_back(reinterpret_cast<int64_t>(&op));
  key_.push_back(at::get_num_threads());
  key_.push_back(block_);
}

void Call::append_double(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  word(kFloat, bits);
}

void Call::append_scalar(const at::Scalar& value) {
  word(kScalar, static_cast<int64_t>(value.type()));
  if (value.isFloatingPoint()) {
    append_double(value.toDouble());
  } else if (value.isComplex()) {
    append_double(value.toComplexDouble().real());
    append_double(value.toComplexDouble().imag());
  } else {
    word(kInt, value.isBoolean() ? static_cast<int64_t>(value.toBool()) : value.toLong());
  }
}

void Call::append_text(std::string_view text) {
  word(kText, static_cast<int64_t>(text.size()));
  for (size_t i = 0; i < text.size(); i += sizeof(int64_t)) {
    int64_t chunk = 0;
    std::memcpy(&chunk, text.data() + i, std::min(sizeof chunk, text.size() - i));
    key_.push_back(chunk);
  }
}

void Call::append_operand(const Operand& o) {
  auto rank = o.tensor.defined() ? o.tensor.dim() : 0;
  key_.push_back(static_cast<int64_t>(o.dtype) | rank << 8 |
                 static_cast<int64_t>(o.row_major) << 24);
  if (rank > 0) {
    key_.append(o.tensor.sizes().begin(), o.tensor.sizes().end());
  }
  if (!o.row_major) {
    int64_t packed = 0;
    for (auto d : o.order) {
      packed = packed << 4 | d;
    }
    key_.push_back(packed);
    key_.push_back(static_cast<int64_t>(o.expanded));
  }
}

// --- operands

Call::Operand& Call::add(c10::SmallVectorImpl<Operand>& to, const at::Tensor& t) {
  auto& o = to.emplace_back();
  o.tensor = t;
  o.dtype = t.scalar_type();
  o.row_major = t.is_contiguous();
  return o;
}

void Call::check_device(const at::Tensor& t) const {
  if (t.device() != current_device()) {
    devices_differ(op_.name, "", current_device(), t.device());
  }
}

// The wrapper has compared devices: what is on the CPU here is a number, or indices.
Call& Call::input(const at::Tensor& given) {
  const auto t = given.is_cpu() && given.dim() > 0 ? given.to(current_device()) : given;
  if (!t.is_cpu()) {
    check_device(t);
  }
  auto& o = add(inputs_, t);
  if (!o.row_major && (block_ > 0 || !dense_order(t, o.order, o.expanded))) {
    o.tensor = kDiscrete ? t.contiguous() : host_view(t).contiguous();
    o.row_major = true;
  }
  return *this;
}

Call& Call::inputs(at::TensorList list) {
  for (const auto& t : list) {
    input(t);
  }
  return *this;
}

Call& Call::scalar(const at::Scalar& s, at::ScalarType as) {
  auto& o = inputs_.emplace_back();
  o.dtype = as;
  AT_DISPATCH_V2(as, "scalar", AT_WRAP([&] {
                   auto value = s.to<scalar_t>();
                   static_assert(sizeof value <= sizeof o.value);
                   std::memcpy(o.value.data(), &value, sizeof value);
                 }),
                 AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX), at::kBool, at::kHalf, at::kBFloat16);
  return *this;
}

Call& Call::output(const at::Tensor& t) {
  check_device(t);
  add(outputs_, t);
  return *this;
}

// An output is written in place if the graph can write it as it lies and reads nothing there;
// otherwise beside, then copied.
void Call::place_outputs() {
  for (size_t i = 0; i < outputs_.size(); ++i) {
    auto& o = outputs_[i];
    auto shares = [&](const Operand& other) {
      return other.tensor.defined() && overlap(other.tensor, o.tensor);
    };
    auto beside =
        std::any_of(inputs_.begin(), inputs_.end(), shares) ||
        std::any_of(outputs_.begin(), outputs_.begin() + static_cast<int64_t>(i), shares) ||
        (!o.row_major &&
         (block_ > 0 || !dense_order(o.tensor, o.order, o.expanded) || o.expanded != 0));
    targets_.push_back(beside ? o.tensor : at::Tensor());
    if (beside) {
      auto options = kDiscrete ? o.tensor.options() : at::TensorOptions().dtype(o.dtype);
      o.tensor = at::empty(o.tensor.sizes(), options);
      o.row_major = true;
    }
  }
}

Signature Call::signature() const {
  auto port = [this](const Operand& o) {
    Port p;
    p.dtype = o.dtype;
    if (o.tensor.defined()) {
      p.sizes = o.tensor.sizes();
    }
    p.stored = p.sizes;
    p.order.resize(p.sizes.size());
    std::iota(p.order.begin(), p.order.end(), 0);
    for (size_t i = 0; !o.row_major && i < p.sizes.size(); ++i) {
      auto dim = o.order[i];
      p.order[i] = dim;
      p.stored[i] = o.expanded >> dim & 1 ? 1 : p.sizes[dim];
    }
    p.block = p.sizes.empty() ? 0 : block_;
    return p;
  };
  Signature s{op_.name, {}, {}, at::get_num_threads()};
  std::transform(inputs_.begin(), inputs_.end(), std::back_inserter(s.inputs), port);
  std::transform(outputs_.begin(), outputs_.end(), std::back_inserter(s.outputs), port);
  return s;
}

// --- execution

bool Call::run(c10::function_ref<void(Graph&)> emit) {
  if (std::all_of(outputs_.begin(), outputs_.end(),
                  [](const Operand& o) { return o.tensor.numel() == 0; })) {
    count_native(op_);
    return true;
  }
  vendor_starts();
  place_outputs();
  word(kList, static_cast<int64_t>(inputs_.size()));
  for (const auto& o : inputs_) {
    append_operand(o);
  }
  for (const auto& o : outputs_) {
    append_operand(o);
  }
  try {
    executables().with(key_, [&] { return compile(signature(), emit); },
                       [&](const std::shared_ptr<Executable>& made) {
                         count_native(op_);
                         execute(made);
                       });
  } catch (const Unheld&) {
    return false;
  }
  return true;
}
#if SHIPLAP_DISCRETE

// A tensor in the layout that the target stores tensors in, or as it is; always on the device.
at::Tensor Call::placed(const Operand& o) const {
  if (o.tensor.defined() && on_device(o.tensor)) {
    return block_ == 0 || o.tensor.dim() == 0
               ? o.tensor
               : to_blocks(host_view(o.tensor), block_).to(o.tensor.device());
  }
  auto scalar = at::empty({}, at::TensorOptions(current_device()).dtype(o.dtype));
  upload(scalar.mutable_data_ptr(), o.tensor.defined() ? o.tensor.const_data_ptr() : o.value.data(),
         scalar.nbytes());
  return scalar;
}

// The operands may be let go before the stream comes to them: their memory goes to what the same
// stream does later.
void Call::execute(std::shared_ptr<Executable> executable) {
  raise_failure();
  c10::SmallVector<at::Tensor, 6> kept;
  std::vector<const void*> in;
  for (const auto& o : inputs_) {
    in.push_back(kept.emplace_back(placed(o)).const_data_ptr());
  }
  std::vector<void*> out;
  auto made = kept.size();
  for (const auto& o : outputs_) {
    out.push_back(kept.emplace_back(placed(o)).mutable_data_ptr());
  }
  {
    const Profiled profiled(op_.name);
    driver().run(current_queue(current_index()), op_.name, std::move(executable), std::move(in),
                 std::move(out));
  }
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const auto &result = outputs_[i].tensor, &stored = kept[made + i];
    if (!stored.is_same(result)) {
      result.copy_(from_blocks(host_view(stored), result.size(-1)));
    }
    if (targets_[i].defined()) {
      targets_[i].copy_(result);
    }
  }
}
#else

void Call::execute(std::shared_ptr<Executable> executable) {
  auto blocked = [this](const Operand& o) {
    return block_ > 0 && o.tensor.defined() && o.tensor.dim() > 0;
  };
  c10::SmallVector<at::Tensor, 6> kept;  // blocked copies
  c10::SmallVector<const void*, 6> in;
  for (const auto& o : inputs_) {
    if (blocked(o)) {
      kept.push_back(to_blocks(host_view(o.tensor), block_));
    }
    in.push_back(blocked(o)           ? kept.back().const_data_ptr()
                 : o.tensor.defined() ? o.tensor.const_data_ptr()
                                      : o.value.data());
  }
  c10::SmallVector<void*, 2> out;
  auto first_out = kept.size();
  for (const auto& o : outputs_) {
    if (blocked(o)) {
      kept.push_back(to_blocks(host_view(o.tensor), block_));
    }
    out.push_back(blocked(o) ? kept.back().mutable_data_ptr() : o.tensor.mutable_data_ptr());
  }
  {
    const Profiled profiled(op_.name);
    executable->run(in, out);
  }
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (blocked(outputs_[i])) {
      host_view(outputs_[i].tensor)
          .copy_(from_blocks(kept[first_out++], outputs_[i].tensor.size(-1)));
    }
    if (targets_[i].defined()) {
      host_view(targets_[i]).copy_(outputs_[i].tensor);
    }
  }
}

#endif

}  // namespace shiplap::backend
