// What a vendor provides for a device whose memory is its own: nothing of the device
// core reads or writes an address that `allocate` returned; it hands them to `copy` and
// `run`.
//
// A runtime says `discrete=True` and defines `driver()`. Work is done in queues: what
// is put into one queue is done in that order, and nothing else is ordered. A vendor
// whose library only has functions that return when they are done takes the queues of
// threads.h.
#pragma once

#include <shiplap_backend/signature.h>

#include <memory>
#include <string>
#include <vector>

namespace shiplap::backend {

using Queue = void*;  // the vendor's: a stream
using Mark = void*;   // the vendor's: a moment in a queue, an event

class Driver {
 public:
  virtual ~Driver() = default;

  virtual int devices() = 0;
  // Bytes that the device has.
  virtual size_t total(int device) = 0;
  // Memory of at least 64 bytes' alignment, or nullptr if there is no such room left.
  virtual void* allocate(int device, size_t bytes) = 0;
  // The core has waited for all that uses the memory.
  virtual void release(int device, void* data) = 0;

  // A queue of the device; it is never closed. A lower `priority` goes first, where
  // that is possible.
  virtual Queue open(int device, int priority) = 0;
  // Each of the two addresses is on the host, on the queue's device or on another
  // device. The call does not wait for the copy; the core keeps both sides until the
  // queue has done it.
  virtual void copy(Queue queue, void* to, const void* from, size_t bytes) = 0;
  // As Executable::run, in the queue. All addresses are on the queue's device.
  virtual void run(Queue queue, const char* op, std::shared_ptr<Executable> executable,
                   std::vector<const void*> inputs, std::vector<void*> outputs) = 0;
  // Whether the queue has nothing left to do.
  virtual bool idle(Queue queue) = 0;

  // A new mark, which is passed when all that is in the queue by now is done.
  virtual Mark mark(Queue queue) = 0;
  virtual void drop(Mark mark) = 0;
  // What is put into the queue from now on begins after the mark.
  virtual void block(Queue queue, Mark mark) = 0;
  virtual bool passed(Mark mark) = 0;
  // Returns when the mark is passed.
  virtual void wait(Mark mark) = 0;
  // Between the moments at which the two were passed.
  virtual double milliseconds(Mark from, Mark to) = 0;

  // What went wrong in a queue since the last call, with the operator's name; empty:
  // nothing.
  virtual std::string failure() = 0;
};

// The vendor's, for discrete runtimes only.
Driver& driver();

}  // namespace shiplap::backend
