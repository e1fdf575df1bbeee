// The whole device core as one translation unit: torch's headers are most of what there is to
// compile, so they are read once.
#include "attention.cpp"
#include "autocast.cpp"
#include "autograd.cpp"
#include "call.cpp"
#include "cells.cpp"
#include "device.cpp"
#include "fallback.cpp"
#include "memory.cpp"
#include "module.cpp"
#include "ops.cpp"
#if SHIPLAP_DISCRETE
#include "discrete_copy.cpp"
#include "discrete_memory.cpp"
#include "discrete_pinned.cpp"
#include "discrete_queues.cpp"
#else
#include "shared_guard.cpp"
#include "shared_memory.cpp"
#endif
