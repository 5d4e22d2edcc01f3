#include "casts_loops.hpp"

const tersegrad::casts::Table tersegrad::casts::avx2_table = tersegrad::casts::local_table;
