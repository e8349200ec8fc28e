// Stands in for the header of this name: see emulation.h.
#pragma once
#include "cuda_runtime.h"
