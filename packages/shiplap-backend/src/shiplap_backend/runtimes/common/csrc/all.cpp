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
