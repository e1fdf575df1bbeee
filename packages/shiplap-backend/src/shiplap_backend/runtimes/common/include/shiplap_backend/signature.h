// What a vendor's runtime is told of one graph: its ports, and how their tensors lie in memory.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/DimVector.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace shiplap::backend {

class Graph;  // the vendor's: vendor.h

struct Port {
  at::ScalarType dtype = at::kFloat;
  c10::DimVector sizes;  // of the tensor, as generated code speaks of it
  // The memory, row-major: dim i of it is dim order[i] of the tensor. An expanded dim has 1 element
  // there.
  c10::DimVector stored;
  c10::DimVector order;
  // Blocked: the last dim of the tensor in blocks of this many, padded: [blocks, sizes[:-1]...,
  // block]. 0: not blocked.
  int64_t block = 0;

  bool row_major() const {
    return block == 0 && stored == sizes && std::is_sorted(order.begin(), order.end());
  }
  // Strides of the tensor's dims in the memory, in elements: 0 where a dim is expanded. Not for
  // blocked memory.
  std::vector<int64_t> strides() const {
    std::vector<int64_t> strides(sizes.size());
    int64_t step = 1;
    for (auto i = stored.size(); i-- > 0; step *= stored[i]) {
      strides[order[i]] = stored[i] == sizes[order[i]] ? step : 0;
    }
    return strides;
  }
};

struct Signature {
  const char* op;
  c10::SmallVector<Port, 6> inputs, outputs;
  int threads;  // intra-op threads of the calling thread
};

// A compiled graph. `run` may be called by several threads at a time; pointers are in the order of
// the ports.
class Executable {
 public:
  virtual ~Executable() = default;
  virtual void run(c10::ArrayRef<const void*> inputs, c10::ArrayRef<void*> outputs) = 0;
};

// The vendor's: builds the graph by calling `emit` once, and compiles it.
std::shared_ptr<Executable> compile(const Signature& signature,
                                    c10::function_ref<void(Graph&)> emit);

}  // namespace shiplap::backend
