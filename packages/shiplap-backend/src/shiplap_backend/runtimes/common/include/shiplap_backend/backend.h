// All that generated code includes: how it describes a call, how it falls back, and the vendor's
// nodes.
#pragma once

#include <shiplap_backend/call.h>
#include <shiplap_backend/fallback.h>
#include <torch/library.h>
#include <vendor.h>
