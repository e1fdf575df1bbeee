// The whole device core as one translation unit: torch's headers are most of what there is to compile, so they are read once.
#include "memory.cpp"
#include "device.cpp"
#include "ops.cpp"
#include "fallback.cpp"
#include "autocast.cpp"
#include "call.cpp"
#include "module.cpp"
