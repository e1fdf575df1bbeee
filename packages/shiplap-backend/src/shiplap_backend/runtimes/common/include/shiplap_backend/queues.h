// torch's streams of a discrete device as queues of the vendor's driver.
#pragma once

#include <c10/core/Stream.h>
#include <shiplap_backend/driver.h>
#include <shiplap_backend/memory.h>

namespace shiplap::backend {

// The calling thread's stream of a device.
c10::Stream current_stream(c10::DeviceIndex index);
Queue queue_of(const c10::Stream& stream);
inline Queue current_queue(c10::DeviceIndex index) { return queue_of(current_stream(index)); }
// Returns when all that is in the queue by now is done; throws what went wrong in a queue.
void wait_for(Queue queue);
// Throws what went wrong in a queue since the last call.
void raise_failure();

// The pinned block that holds `data`, if there is one, is not given away before the queue has done
// what is in it by now.
void use_pinned(const void* data, Queue queue);

}  // namespace shiplap::backend
